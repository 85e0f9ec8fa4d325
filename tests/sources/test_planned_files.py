"""Readers compare the file that they opened with the plan."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from tests.sources.written import parquet_of

import forebay as fb
from forebay.errors import SourceChanged
from forebay.source import Source, samples_of
from forebay.sources import parquet_sources
from forebay.testing.kind_contracts import parts_of

CONTENT = b'{"text": "one"}\n{"text": "two"}\n'
READERS: dict[str, tuple[str, bytes, Callable[[Path], Source]]] = {
    "jsonl": ("a.jsonl", CONTENT, fb.sources.jsonl),
    "jsonl.gz": ("a.jsonl.gz", gzip.compress(CONTENT, mtime=0), fb.sources.jsonl),
    "lines": ("a.txt", CONTENT, fb.sources.lines),
    "text": ("a.txt", CONTENT, fb.sources.text),
    "files": ("a.bin", CONTENT, fb.sources.files),
    "images": ("a.png", CONTENT, fb.sources.images),
    "parquet": ("a.parquet", parquet_of(pa.array(["one", "two"])), fb.sources.parquet),
}


@pytest.mark.parametrize("kind", READERS)
def test_file_edited_after_planning_is_not_read(tmp_path, kind):
    name, content, open_source = READERS[kind]
    path = tmp_path / name
    path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))
    source = open_source(path)
    (part,) = parts_of(source, 1 << 40, 1 << 40)
    os.utime(path, ns=(10**18, 10**18 + 10**9))  # as an edit of the same size does
    planned_again = parts_of(source, 1 << 40, 1 << 40)
    assert list(samples_of(source, planned_again[0]))
    with pytest.raises(SourceChanged, match="changed while it was read"):
        list(samples_of(source, part))


@pytest.mark.parametrize("kind", READERS)
def test_file_exchanged_between_two_stats_is_not_read(tmp_path, kind):
    name, content, open_source = READERS[kind]
    path, aside = tmp_path / name, tmp_path / "aside"
    path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))
    source = open_source(path)
    (part,) = parts_of(source, 1 << 40, 1 << 40)
    parquet_sources._opened.cache_clear()  # planning left it open
    before = source.look(part.file.path)
    path.rename(aside)
    path.write_bytes(content)
    with pytest.raises(SourceChanged, match="changed while it was read"):
        list(source.read(part))
    aside.replace(path)
    assert source.look(part.file.path).same_look(before)
    assert list(source.read(part))
