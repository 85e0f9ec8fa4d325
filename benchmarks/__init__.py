"""Measured in one run, interleaved, against named peers; ratios, because machines differ."""
