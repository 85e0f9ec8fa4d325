"""The key that tags generations, from the environment."""

import hashlib
import hmac
import os
from collections.abc import Sequence

from forebay.errors import ForebayError
from forebay.store.base import Buffer

VARIABLE = "FOREBAY_HMAC_KEY"


MIN_BYTES = 16  # of a key to sign with


def hmac_key() -> bytes | None:
    """The key in use, None where there is none. An empty one is an error: a script may have lost its secret."""
    value = os.environ.get(VARIABLE)
    if value == "":
        raise ForebayError(f"the environment variable {VARIABLE} is set and empty; set it to the key, or unset it")
    return None if value is None else os.fsencode(value)


def short_key_note(key: bytes | None) -> tuple[str, ...]:
    """What to say of a key that is easily guessed."""
    if key is None or len(key) >= MIN_BYTES:
        return ()
    return (
        f"{VARIABLE} has {len(key)} bytes and is easily guessed; change it with `forebay rekey` to {MIN_BYTES} or more",
    )


def tag(key: bytes, buffers: Sequence[Buffer]) -> bytes:
    code = hmac.new(key, digestmod=hashlib.sha256)
    for buffer in buffers:
        code.update(buffer)
    return code.digest()


def same_tag(found: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(found, expected)
