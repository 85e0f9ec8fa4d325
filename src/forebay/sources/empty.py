"""Documents without text: a source that knows where one stands says so itself."""

from forebay.source import Failure


def empty(sample: str, where: str) -> Failure:
    """A document with no text in it, at `line 17` or `row 17` of its file."""
    return Failure(sample, "empty", f"{where}: the document has no text")
