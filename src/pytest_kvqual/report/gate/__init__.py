"""The gate report of a run directory: one HTML page for people, one JUnit file for CI.

A view. It reads receipts, the evidence that they name, the frozen study and an audit's statement, and decides nothing:
each outcome is the receipt's. What it could not read, or found changed, it says in the place where it would have stood.

    evidence.py    the files that receipts name, by digest
    run.py         what the run directory holds, as plain records
    answers.py     lost and gained questions, both answers side by side
    latencies.py   what the recordings of trials say of each request
    words.py       numbers and foreign text, fit to print
    plots.py       plots as SVG, each with its numbers as text
    figures.py     which plot belongs to which gate
    page.py        the HTML page
    xunit.py       the JUnit file
    files.py       both, on disk
"""
