"""Which rows a training run gets, in which order, and ahead of time. Numpy only."""
