"""The questions asked of a served model: prompts built and raw answers parsed by pure functions."""
