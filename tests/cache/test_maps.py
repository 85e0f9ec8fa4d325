"""Mapped chunks: bounded in number, kept while a gather may point into them."""

import gc
import weakref

import numpy as np
import pytest

from forebay.cache.maps import Maps


class File:
    """Stands for a mapped chunk, as far as `Maps` knows one."""


def made(limit: int, count: int = 100) -> tuple[Maps, list[int]]:
    opened: list[int] = []
    return Maps(count, lambda position: opened.append(position) or File(), limit), opened  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("limit", [1, 2, 8, 50])
def test_no_more_maps_than_allowed_are_open(limit: int) -> None:
    maps, _ = made(limit)
    for position in np.random.default_rng(0).integers(0, 100, 500).tolist():
        maps.get(position)
        assert 0 < len(maps) <= limit


def test_a_map_is_opened_once_while_it_is_in_use() -> None:
    maps, opened = made(4)
    assert maps.get(3) is maps.get(3)
    for position in range(10):
        maps.get(3)
        maps.get(position)
    assert opened.count(3) == 1


def test_the_least_recently_touched_is_closed() -> None:
    maps, _ = made(3)
    closed: list[int] = []
    maps.on_close(closed.append)
    for position in (0, 1, 2):
        maps.get(position)
    maps.get(3)
    assert closed == [0]
    maps.begin_reading()
    maps.touch(np.array([1]))
    maps.get(4)
    assert closed == [0, 2]


def test_a_closed_map_lives_until_the_last_gather_that_may_know_it_has_ended() -> None:
    maps, _ = made(1)
    early = maps.begin_reading()
    file = weakref.ref(maps.get(0))
    late = maps.begin_reading()
    maps.get(1)
    gc.collect()
    assert file() is not None
    after = maps.begin_reading()
    maps.end_reading(early)
    gc.collect()
    assert file() is not None, "the second gather began before it was closed"
    maps.end_reading(late)
    gc.collect()
    assert file() is None, "the third gather cannot know it"
    maps.end_reading(after)


def test_a_closed_map_goes_at_once_where_nobody_reads() -> None:
    maps, _ = made(1)
    file = weakref.ref(maps.get(0))
    maps.get(1)
    assert file() is None


def test_a_note_about_a_map_that_is_closed_already_is_not_taken() -> None:
    maps, _ = made(1)
    notes: list[str] = []
    file = maps.get(0)
    maps.while_open(0, file, lambda: notes.append("open"))
    maps.get(1)
    maps.while_open(0, file, lambda: notes.append("closed"))
    again = maps.get(0)
    maps.while_open(0, file, lambda: notes.append("another map of the same chunk"))
    maps.while_open(0, again, lambda: notes.append("open again"))
    assert notes == ["open", "open again"]


def test_a_chunk_that_cannot_be_opened_leaves_nothing_behind() -> None:
    def fails(position: int) -> File:
        raise OSError("gone")

    maps = Maps(3, fails, 2)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="gone"):
        maps.get(1)
    assert len(maps) == 0
