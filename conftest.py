"""What every test needs. Fixtures of one kind of test live beside it."""

pytest_plugins = ["pytester"]
