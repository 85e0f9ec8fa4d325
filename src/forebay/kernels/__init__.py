"""Loops over bytes: compiled (`_kernels.c`), or the NumPy definitions of `reference.py` without a compiler.

The choice is made once, here. Other modules do not depend on it.
"""

try:
    from forebay.kernels._kernels import (
        best_fit,
        copy_runs,
        frame_documents,
        gather,
        line_starts,
        locate_rows,
        mirror,
        pack_tokens,
        paint,
        paint_scaled,
        permute,
        read_rows,
        token_places,
    )

    IS_COMPILED = True
except ImportError:  # installed without a compiler
    from forebay.kernels.reference import (
        best_fit,
        copy_runs,
        frame_documents,
        gather,
        line_starts,
        locate_rows,
        mirror,
        pack_tokens,
        paint,
        paint_scaled,
        permute,
        read_rows,
        token_places,
    )

    IS_COMPILED = False

__all__ = [
    "IS_COMPILED", "best_fit", "copy_runs", "frame_documents", "gather", "line_starts", "locate_rows", "mirror",
    "pack_tokens", "paint", "paint_scaled", "permute", "read_rows", "token_places",
]  # fmt: skip
