"""Statistics as pure functions: numbers in, a result record out. Nothing here reads a file, a clock or a random source."""
