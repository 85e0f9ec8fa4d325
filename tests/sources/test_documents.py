"""An iterable as a source: spooled whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.sources.recipes import TextRecipe
from tests.sources.written import read_all, texts

import forebay as fb
from forebay.errors import SourceInvalid
from forebay.source import Failure

NAME = "a.jsonl"


@given(documents=st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=10), every=st.integers(1, 60))
@settings(max_examples=scaled(40), deadline=None)
def test_documents_come_back_as_they_were_given(documents, every):
    with TemporaryDirectory() as folder:
        source = fb.sources.documents(iter(documents), Path(folder) / "new" / NAME)
        assert texts(source, every, every) == documents
        assert os.listdir(Path(folder) / "new") == [NAME]


def test_mappings_give_the_field_asked_for_and_what_is_no_document_is_a_failure(tmp_path):
    given = [{"body": "one", "id": object()}, {"body": None}, {"id": 2}, {"body": 5}, "two", {"body": "half \ud800"}]
    seen = read_all(fb.sources.documents(given, tmp_path / NAME, text="body"))
    assert [one.reason if isinstance(one, Failure) else one.data for one in seen] == [
        "one", "null", "no-text", "not-text", "two", "bad-json",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [b"bytes", date(2026, 1, 1), object()])
def test_what_is_no_text_is_not_made_text_by_writing_it(tmp_path, value):
    with pytest.raises(SourceInvalid, match=rf"'text' of document 1 is {type(value).__name__}; expected a str"):
        fb.sources.documents([{"text": "one"}, {"text": value}], tmp_path / "a.jsonl")
    assert os.listdir(tmp_path) == []


def test_an_iterable_that_fails_leaves_what_was_there(tmp_path):
    def failing():
        yield "new"
        raise RuntimeError("no more")

    for before in ([], ["old"]):
        if before:
            fb.sources.documents(before, tmp_path / NAME)
        with pytest.raises(RuntimeError, match="no more"):
            fb.sources.documents(failing(), tmp_path / NAME)
        assert os.listdir(tmp_path) == [NAME] * len(before)
    assert texts(fb.sources.jsonl(tmp_path / NAME)) == ["old"]


KILLED = """
import sys, time
import forebay as fb
def slow():
    yield "x" * 5_000_000
    print("begun", flush=True)
    time.sleep(60)
fb.sources.documents(slow(), sys.argv[1])
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_spool_that_is_interrupted_is_not_there(tmp_path, how):
    path = tmp_path / "a.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(how)
        process.communicate()
    assert not path.exists()
    assert bool(os.listdir(tmp_path)) == (how == signal.SIGKILL)
    with pytest.raises(fb.errors.SourceNotFound):
        fb.sources.jsonl(tmp_path).files()  # what a kill left is no file of a source


def test_the_same_documents_again_leave_the_file_and_its_caches_valid(tmp_path):
    given = [f"document {number}" for number in range(300)]
    source = fb.sources.documents(given, tmp_path / NAME)
    before = os.stat(tmp_path / NAME)
    fb.build(tmp_path / "cache", source, TextRecipe(), workers=0)
    time.sleep(0.01)
    again = fb.sources.documents((text for text in given), tmp_path / NAME)
    after = os.stat(tmp_path / NAME)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert fb.build(tmp_path / "cache", again, TextRecipe(), workers=0).built == 0
    os.unlink(tmp_path / NAME)
    other = fb.sources.documents(given[1:], tmp_path / NAME)
    with pytest.raises(fb.errors.SourceChanged):
        fb.build(tmp_path / "cache", other, TextRecipe(), workers=0)


@pytest.mark.parametrize("other", [b'{"text": "somebody else\'s"}\n', b"\x00 not even text", "documents", "link"])
def test_a_file_that_holds_something_else_is_never_overwritten(tmp_path, other):
    if other == "link":
        (tmp_path / "far").write_bytes(b"")
        (tmp_path / NAME).symlink_to("far")
    elif other == "documents":
        fb.sources.documents(["one", "two", "three"], tmp_path / NAME)
    else:
        (tmp_path / NAME).write_bytes(other)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(SourceInvalid, match="exists and does not begin these documents"):
        fb.sources.documents(["one", "two"], tmp_path / NAME)
    assert (tmp_path / NAME).read_bytes() == before
    assert len(os.listdir(tmp_path)) == (2 if other == "link" else 1)


def test_more_documents_behind_the_same_ones_grow_a_cache(tmp_path):
    given = [f"document {number}" for number in range(50)]
    fb.build(tmp_path / "cache", fb.sources.documents(given[:30], tmp_path / "a.jsonl"), TextRecipe(), workers=0)
    source = fb.sources.documents(given, tmp_path / "a.jsonl")
    fb.update(tmp_path / "cache", source, recipe=TextRecipe(), workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    assert [bytes(cache[row]["text"]).decode() for row in range(len(cache))] == given


@pytest.mark.parametrize("given", ["one text", b"bytes", {"text": "one"}, [5], ["fine", None], [b"bytes"]])
def test_what_cannot_be_documents_is_refused_and_nothing_is_written(tmp_path, given):
    with pytest.raises(SourceInvalid, match=r"put it into a list|document \d is"):
        fb.sources.documents(given, tmp_path / "a.jsonl")
    assert os.listdir(tmp_path) == []


def test_a_spool_of_no_known_format_is_refused(tmp_path):
    with pytest.raises(SourceInvalid, match=r"\.jsonl file, not to '.*a\.txt'"):
        fb.sources.documents(["a"], tmp_path / "a.txt")
