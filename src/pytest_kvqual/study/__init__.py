"""What a study declares: frozen records, decoded once, strictly, and locked."""
