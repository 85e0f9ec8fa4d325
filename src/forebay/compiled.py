"""The compiled loops of `_native.c`, or None where they were not built: then numpy does the same, bit for bit.

Whoever has a loop here has its numpy twin next to the call, and `tests/test_native.py` compares the two.
"""

__all__ = ["native"]

try:
    from forebay import _native as native
except ImportError:  # installed without a compiler
    native = None  # type: ignore[assignment]
