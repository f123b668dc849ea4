"""Statistics as pure functions: numbers in, a result record out. Nothing here reads a file or a clock."""
