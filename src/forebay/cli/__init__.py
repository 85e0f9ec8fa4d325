"""The command line: one file per verb; `show` is the one module that prints."""
