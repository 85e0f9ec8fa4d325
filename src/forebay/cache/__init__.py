"""Plans, claims, builds, readers: the core, which knows no kind of data."""
