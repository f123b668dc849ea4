"""What a terminal shows after it got some text, and pytest run on one."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import termios
from pathlib import Path


def screen(text: str, width: int) -> list[str]:
    """The lines on a terminal of that width after it got ``text``: what of it moves the cursor or erases is obeyed."""
    rows: list[list[str]] = [[]]
    row = column = place = 0
    while place < len(text):
        char = text[place]
        place += 1
        if char == "\x1b":
            end = next(index for index in range(place + 1, len(text)) if text[index].isalpha())
            code, count = text[end], text[place + 1 : end]
            place = end + 1
            if code == "A":
                row = max(0, row - int(count or 1))
            elif code == "K":
                rows[row] = [] if count == "2" else rows[row][:column]
            else:
                assert code == "m", f"{code!r} is not expected"
        elif char == "\r":
            column = 0
        elif char == "\n":
            row, column = row + 1, 0
            if row == len(rows):
                rows.append([])
        else:
            if column == width:
                row, column = row + 1, 0
            if row == len(rows):
                rows.append([])
            rows[row] += [" "] * (column - len(rows[row]))
            rows[row][column : column + 1] = [char]
            column += 1
    return ["".join(line).rstrip() for line in rows]


def on_terminal(argv: list[str], *, folder: Path, environment: dict[str, str], columns: int = 100) -> tuple[int, str]:
    """Run a program whose standard streams are a terminal; its exit status, and all that it wrote there.

    Raises:
        TimeoutError: It did not end within a minute; it has been ended then.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, columns))
    process = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True
    )
    os.close(theirs)
    written = b""
    try:
        while select.select([ours], [], [], 60)[0]:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:
                # Linux: nobody has the other end any more.
                break
            if not chunk:
                break
            written += chunk
        else:
            process.kill()
            raise TimeoutError(f"{argv}: no output for a minute")
        return process.wait(60), written.decode(errors="replace")
    finally:
        os.close(ours)
