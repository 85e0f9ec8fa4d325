"""Progress of a verb on standard error; none beside JSON."""

from collections.abc import Iterator
from contextlib import contextmanager

from forebay.preview.progress import OnProgress
from forebay.preview.progress import shown_progress as drawn_progress


@contextmanager
def shown_progress(as_json: bool) -> Iterator[OnProgress]:
    """A function to call with every `Progress` of one job."""
    if as_json:
        yield lambda progress: None
    else:
        with drawn_progress() as on_progress:
            yield on_progress
