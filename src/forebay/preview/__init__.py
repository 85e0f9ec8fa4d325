"""Rows in readable form, for the command line, notebooks and Python."""
