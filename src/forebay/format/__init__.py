"""Arrays as bytes: keys, chunks, sealed indexes."""
