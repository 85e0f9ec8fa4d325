"""Plans, claims, state, verification and copies: the index of a cache, independent of kinds of data."""
