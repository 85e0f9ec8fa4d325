"""Progress of a verb on standard error; none beside JSON, and none if the verb is quiet."""

from collections.abc import Iterator
from contextlib import contextmanager

from forebay.cache.records import OnProgress
from forebay.cli.verb import is_json, is_quiet
from forebay.preview.progress import shown_progress as drawn_progress


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """A function to call with every `Progress` of one job."""
    if is_json() or is_quiet():
        yield lambda progress: None
    else:
        with drawn_progress() as on_progress:
            yield on_progress
