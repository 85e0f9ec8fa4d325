"""Where a cache is to be made is tried before the source is listed."""

import errno
import os
from pathlib import Path

import pytest

import forebay as fb
from forebay.errors import SourceNotFound, StoreFull, StoreRefused


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def build(store: Path | fb.Store) -> None:
    """Of a source that is not there: whoever lists it first says so."""
    fb.build(store, fb.sources.lines("nothing"), fb.RawRecipe(), workers=0)


def test_a_file_system_without_links_is_refused_before_the_source_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreRefused, match=r"(?s)^'.*/new/cache' cannot be used .* does not support hard links"):
        build(tmp_path / "new" / "cache")


class FullStore(fb.LocalStore):
    def create(self, key: str, data: object, **options: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_before_the_source_is_listed(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="a write failed although"):
        build(FullStore(tmp_path / "new" / "cache"))


def test_nothing_is_left_where_it_was_tried(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        build(tmp_path / "new" / "cache")
    assert not (tmp_path / "new" / "cache").exists()
