"""The key that tags generations, from the environment."""

import hashlib
import hmac
import os
from collections.abc import Sequence

from forebay.store.base import Buffer

VARIABLE = "FOREBAY_HMAC_KEY"


def hmac_key() -> bytes | None:
    """The key in use, None where there is none."""
    return os.fsencode(os.environ.get(VARIABLE, "")) or None


def tag(key: bytes, buffers: Sequence[Buffer]) -> bytes:
    code = hmac.new(key, digestmod=hashlib.sha256)
    for buffer in buffers:
        code.update(buffer)
    return code.digest()


def same_tag(found: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(found, expected)
