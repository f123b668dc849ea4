"""What was decided, as statements that others can read, check and sign."""
