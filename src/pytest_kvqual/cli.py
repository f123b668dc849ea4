"""The command line ``kvqual``. Each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pytest_kvqual.errors import KvqualError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error raised on purpose is one line on standard error and exit status 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KvqualError as error:
        print(f"kvqual {args.command}: {error.line()}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvqual", description="Qualification of KV-cache changes.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
