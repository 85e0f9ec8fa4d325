"""From a generation to arrays."""
