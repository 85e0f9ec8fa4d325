"""Batches of images, and the way of an image into a model."""
