"""Attention over packed rows and letterboxed images."""
