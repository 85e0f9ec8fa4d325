"""Data, timing and peers of the benchmarks."""
