"""Rows as a person reads them."""
