"""Turn raw training data once into a verified cache, then feed training from it at memory speed."""

__version__ = "0.1.0"
