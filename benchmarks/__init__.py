"""Measured in one run, interleaved, against named peers; ratios, because machines differ.

Processes that are timed use compiled bytecode, as those of an installed package do.
"""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
