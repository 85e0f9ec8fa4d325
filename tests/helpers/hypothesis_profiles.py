"""How many examples property tests draw.

In `make test` a seventh of what they ask for, in `make test-long` three times as many.
"""

from hypothesis import settings

PROFILES = {"steady": 15, "long": 300}  # of a hundred


def scaled(examples: int) -> int:
    """`examples` in proportion to the profile that is loaded."""
    return max(3, examples * settings.default.max_examples // 100)
