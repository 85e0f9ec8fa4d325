"""The file format: keys, chunks and index files as bytes."""
