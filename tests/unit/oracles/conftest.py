"""How many examples the oracles' properties are tried on."""

from __future__ import annotations

from hypothesis import settings

# No deadline: the first example of a test pays for what torch loads late, and a busy machine is no failure.
settings.register_profile("oracles", max_examples=30, deadline=None)
settings.load_profile("oracles")
