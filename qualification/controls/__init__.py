"""Seeded faults, each of which the gate that claims it must be the first to see."""
