"""Benchmarks next to named peers: same data, equal output, one run, ratios. `python -m benchmarks --help`."""
