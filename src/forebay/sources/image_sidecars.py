"""What is said about an image in a file beside it: `a.jpg.json` or `a.json`, else tags in `a.jpg.txt` or `a.txt`."""

import os
from typing import Any

import msgspec

from forebay.sources.paths import full_path


class SidecarUnreadable(Exception):
    """A sidecar that does not say what it should; the text says why."""


def sidecar_names(image: str) -> tuple[str, ...]:
    """Where the sidecar of an image may be, the first that is there counts.

    >>> sidecar_names("cats/a.jpg")
    ('cats/a.jpg.json', 'cats/a.json', 'cats/a.jpg.txt', 'cats/a.txt')
    """
    stem = os.path.splitext(image)[0]
    return tuple(f"{name}{ending}" for ending in (".json", ".txt") for name in (image, stem))


def sidecar_of(root: str, image: str) -> str | None:
    return next((name for name in sidecar_names(image) if os.path.isfile(full_path(root, name))), None)


def parse_sidecar(name: str, content: bytes) -> dict[str, Any]:
    """The metadata in a sidecar: a JSON object, or tags between commas as `{"tags": […]}`."""
    try:
        if name.endswith(".txt"):
            return {"tags": [tag for part in content.decode("utf-8-sig").split(",") if (tag := part.strip())]}
        return msgspec.json.decode(content, type=dict[str, Any])
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise SidecarUnreadable(f"'{os.path.basename(name)}': {error}") from error
