"""Judging a source reads little of it from the disk: what is promised, and not several times over."""

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.sources.recipes import TextRecipe
from tests.sources.written import write

import forebay as fb
from forebay.sources import pieces

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="counts what a process reads by /proc")


def bytes_read(work: Callable[[], object]) -> int:
    """What this process asks the system for while it works."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = so_far()
    work()
    return so_far() - before


@LINUX_ONLY
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_estimate_reads_a_small_share_of_the_source(tmp_path, ending):
    noise = Random(5).randbytes(7_000_000).hex()  # which compression does not make vanish
    lines = "".join(f'{{"text": "{noise[at : at + 997]}"}}\n' for at in range(0, len(noise), 997)).encode()
    paths = [write(tmp_path, f"{name}.jsonl{ending}", lines) for name in "ab"]
    source, recipe = fb.sources.jsonl(*paths), TextRecipe()
    fb.estimate(source, recipe, workers=0)  # imports what it needs; the start of a worker reads modules
    for path in paths:
        path.touch()  # what is remembered of files is of those with an older time
    stored = sum(path.stat().st_size for path in paths)
    assert bytes_read(lambda: fb.estimate(source, recipe, workers=0)) < (0.15 if ending else 0.05) * stored + 100_000


@LINUX_ONLY
@pytest.mark.parametrize("where", ["alone", "first", "last"])
def test_a_long_line_is_looked_through_once_however_many_places_fall_into_it(tmp_path, where):
    lines = {"alone": b"", "first": b"", "last": b"short\n" * 1000}[where], {"first": b"\nshort" * 1000}.get(where, b"")
    path = write(tmp_path, "a.txt", (b"long " * 4_000_000).join(lines))
    source = fb.sources.lines(path)
    (file,) = source.files()
    every = path.stat().st_size // 24

    def look_everywhere() -> None:
        for first in range(every, file.size, every):
            next(source.cuts(file, 0, first, every))

    assert bytes_read(look_everywhere) < 1.1 * file.size


@given(
    content=st.lists(st.sampled_from([b"-", b"-", b"a"]), max_size=60).map(b"".join),
    separator=st.sampled_from([b"-", b"--", b"-a-"]),
    asked=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12),
)
@example(content=b"aaaa-aaaa--a", separator=b"--", asked=[(6, 3), (1, 1), (7, 2)])
def test_where_a_file_may_be_cut_does_not_depend_on_what_was_asked_before(tmp_path_factory, content, separator, asked):
    path = write(tmp_path_factory.mktemp("asked"), "a.txt", content)
    source = fb.sources.text(path, separator=separator.decode())
    (file,) = source.files()
    ends = ends_of(content, separator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_LONG_PIECE", 2)
        for first, every in asked:
            cuts = list(source.cuts(file, 0, first, every))
            assert cuts == expected_cuts(ends, len(content), first, every)


def ends_of(content: bytes, separator: bytes) -> list[int]:
    """Where separators end, by the definition of `bytes.split`."""
    ends, at = [], 0
    for piece in content.split(separator)[:-1]:
        at += len(piece) + len(separator)
        ends.append(at)
    return ends


def expected_cuts(ends: list[int], size: int, first: int, every: int) -> list[int]:
    cuts, cut, step = [], 0, first
    while (found := next((end for end in ends if end >= cut + step and end < size), None)) is not None:
        cuts.append(found)
        cut, step = found, every
    return [*cuts, size] if size else []
