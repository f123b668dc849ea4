"""One judge per gate: evidence in, :class:`~pytest_kvqual.judge.verdict.Verdict` out. No judge reads a file."""
