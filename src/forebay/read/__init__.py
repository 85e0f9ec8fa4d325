"""Read rows of a generation as arrays."""
