"""Where the body of an answer begins in the file that was asked for."""

import re

import httpx2

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")


def begins_at(response: httpx2.Response, asked: int, size: int) -> int | None:
    """Where it was asked for, or 0 from a server that knows no ranges; None where it is no answer to that."""
    if response.status_code == 200:
        return 0
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None or int(found[1]) != asked or found[2] not in ("*", str(size)):
        return None
    return asked
