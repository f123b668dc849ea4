"""A server of known delays and faults, in a process of its own, that the recorder is measured against."""
