"""What is said about an image in a file beside it: `a.jpg.json` or `a.json`, else tags in `a.jpg.txt` or `a.txt`."""

import os
import re
from collections.abc import Container
from typing import Any

import msgspec

from forebay.source import TOO_DEEP, is_shallow
from forebay.sources.failures import BOM

MOST_BYTES = 1 << 24  # far more than anybody says of a picture
SIDECAR_SUFFIXES = (".json", ".txt")
_BETWEEN_TAGS = re.compile(r"[,\r\n]")


class SidecarUnreadable(Exception):
    """A sidecar that does not say what it should; the text says why."""


def sidecar_of(image: str, names: Container[str]) -> str | None:
    """The sidecar of an image among the names in its folder; of several, the first in this order counts.

    >>> sidecar_of("a.jpg", ["a.jpg", "a.json", "a.txt"])
    'a.json'
    """
    stem = os.path.splitext(image)[0]
    candidates = (f"{image}.json", f"{stem}.json", f"{image}.txt", f"{stem}.txt")
    return next((name for name in candidates if name in names), None)


def parse_sidecar(name: str, content: bytes) -> dict[str, Any]:
    """The metadata in a sidecar: a JSON object, or tags between commas or on lines of their own.

    >>> parse_sidecar("a.txt", b"cat, looking_left")
    {'tags': ['cat', 'looking_left']}
    """
    try:
        if name.endswith(".txt"):
            return {"tags": [tag for part in _BETWEEN_TAGS.split(content.decode("utf-8-sig")) if (tag := part.strip())]}
        said = msgspec.json.decode(content.removeprefix(BOM), type=dict[str, Any])
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise SidecarUnreadable(f"'{name}' is no sidecar: {error}") from error
    except RecursionError as error:
        raise SidecarUnreadable(f"'{name}' is no sidecar: {TOO_DEEP}") from error
    if not is_shallow(said):
        raise SidecarUnreadable(f"'{name}' is no sidecar: {TOO_DEEP}")
    return said
