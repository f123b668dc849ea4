"""What every test needs. Fixtures of one kind of test live beside it."""

from hypothesis import settings

pytest_plugins = ["pytester"]

# Two test processes share two cores: how long one example takes says nothing.
settings.register_profile("kvqual", deadline=None)
settings.load_profile("kvqual")
