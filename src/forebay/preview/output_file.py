"""Where a picture or a page may be written: a new name, or over an earlier one of its kind."""

import os

from forebay.errors import ForebayError

PNG, HTML = b"\x89PNG", b"<!doctype html>"


def check_output(path: str, begins: bytes) -> None:
    """Raise where a file of another kind, or anything but a file, has this name: it is not ours to overwrite."""
    if not os.path.lexists(path):
        return
    if os.path.isfile(path) and not os.path.islink(path):
        with open(path, "rb") as file:
            if file.read(len(begins)) == begins:
                return
    kind = "PNG" if begins == PNG else "HTML page"
    raise ForebayError(f"'{path}' exists and is not a {kind}, so it is not overwritten; name another file")
