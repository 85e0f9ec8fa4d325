"""The names and files of older caches."""
