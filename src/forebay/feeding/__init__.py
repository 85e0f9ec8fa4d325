"""Rows of a training run: selection, order and prefetch. Numpy only."""
