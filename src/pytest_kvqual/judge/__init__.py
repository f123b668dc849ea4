"""Verdicts: pure functions from evidence to a conclusion, the order of the gates, and the permit to time."""
