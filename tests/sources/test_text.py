"""Text files: documents are what splitting the whole file gives, wherever it is cut."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.helpers.option_pairs import dealt
from tests.sources.written import STORED, read_all, texts, write

import forebay as fb
from forebay.errors import SourceChanged, SourceInvalid
from forebay.source import Failure, samples_of

ENDINGS = pytest.mark.parametrize("ending", STORED, ids=lambda ending: ending or "plain")
BLOCK = 128 * 1024
SEPARATORS = ["\n\n\n", "<|endoftext|>", "\n---\n", "aba", "aa", "é", "\x00"]


def documents_of(content: str, separator: str) -> list[str]:
    """The definition: what splitting gives, but for nothing behind the last separator."""
    documents = content.split(separator)
    return documents if documents[-1] else documents[:-1]


@ENDINGS
@given(
    separator=st.sampled_from(SEPARATORS),
    pieces=st.lists(
        st.sampled_from([*SEPARATORS, "\n", "\r\n", "a", "b", "-", "é", "𐀀", "<|end", "oftext|>"]), max_size=30
    )
    | st.lists(st.text(st.characters(codec="utf-8"), max_size=9), max_size=9),
    first=st.integers(1, 40),
    every=st.integers(1, 40),
)
@example(separator="\n\n\n", pieces=["a", "\n\n\n\n", "b"], first=4, every=1)
@example(separator="aba", pieces=["ababababababa"], first=5, every=3)
@settings(max_examples=scaled(100), deadline=None)
def test_documents_are_what_splitting_the_file_gives_wherever_it_is_cut(ending, separator, pieces, first, every):
    content = "".join(pieces).removeprefix("\ufeff")
    with TemporaryDirectory() as folder:
        source = fb.sources.text(write(Path(folder), f"a.txt{ending}", content.encode()), separator=separator)
        assert texts(source, first, every) == documents_of(content, separator)


@ENDINGS
@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n\n\n", "aa"])
def test_a_separator_across_the_edge_of_a_block_is_found(tmp_path, ending, separator):
    for before in range(BLOCK - len(separator) - 1, BLOCK + 2):
        content = "x" * before + separator + "y" * 10 + separator + "z"
        source = fb.sources.text(write(tmp_path, f"a.txt{ending}", content.encode()), separator=separator)
        assert texts(source) == texts(source, 1000, 1000) == ["x" * before, "y" * 10, "z"]


@pytest.mark.parametrize(("ending", "count"), dealt([*STORED], [200_001, 262_143]))
def test_a_long_run_of_what_overlaps_itself_is_cut_as_it_is_split(tmp_path, ending, count):
    content = "a" + "\n" * count + "b"
    source = fb.sources.text(write(tmp_path, f"a.txt{ending}", content.encode()), separator="\n\n\n")
    for first, every in ((100_000, 70_001), (1 << 40, 1 << 40)):
        assert texts(source, first, every) == documents_of(content, "\n\n\n")


@ENDINGS
def test_without_a_separator_a_file_is_one_document_named_as_the_file(tmp_path, ending):
    content = "One.\n\n\r\nTwo: é 𐀀\n" * 30_000
    for name, text in (("a.txt", content), ("b.md", "")):
        write(tmp_path, name + ending, text.encode())
    whole, empty = read_all(fb.sources.text(tmp_path))
    assert (whole.id, whole.data) == (f"a.txt{ending}", content)
    assert empty == Failure(f"b.md{ending}", "empty", "line 1: the document has no text")


@ENDINGS
def test_a_document_without_text_is_a_failure_with_its_line(tmp_path, ending):
    path = write(tmp_path, f"a.txt{ending}", b"\xef\xbb\xbf|one\ntwo||\n|" + b"word\n|" * 30_000 + b"|end")
    seen = [one for one in read_all(fb.sources.text(path, separator="|"), 50_000, 50_000) if isinstance(one, Failure)]
    assert [(one.sample.partition("@")[2], one.reason) for one in seen] == [
        ("0", "empty"), ("12", "empty"), ("180015", "empty"),
    ]  # fmt: skip
    assert [one.detail for one in seen] == [f"line {n}: the document has no text" for n in (1, 2, 30_003)]


@ENDINGS
@pytest.mark.parametrize("separator", [None, "|"])
def test_invalid_utf8_is_a_failure_that_names_byte_and_line(tmp_path, ending, separator):
    content = b"first\nsecond\n\xc3\xa9 \xff third|fine\n|a\nb\xe2\x82"
    source = fb.sources.text(write(tmp_path, f"a.txt{ending}", content), separator=separator)
    seen = read_all(source)
    details = [one.detail for one in seen if isinstance(one, Failure)]
    assert details[0] == "line 3: byte 0xff at offset 16 of the file is not UTF-8 (invalid start byte)"
    if separator:
        assert details[1:] == ["line 5: byte 0xe2 at offset 33 of the file is not UTF-8 (unexpected end of data)"]
        assert seen[1].data == "fine\n"
        assert read_all(source, 1, 1) == seen
    assert {one.reason for one in seen if isinstance(one, Failure)} == {"not-utf8"}


@ENDINGS
@pytest.mark.parametrize("separator", [None, "|"])
def test_a_byte_order_mark_at_the_start_of_a_file_is_left_out(tmp_path, ending, separator):
    source = fb.sources.text(write(tmp_path, f"a.txt{ending}", b"\xef\xbb\xbfone\xff"), separator=separator)
    assert [one.detail[:38] for one in read_all(source)] == ["line 1: byte 0xff at offset 6 of the f"]
    source = fb.sources.text(write(tmp_path, f"a.txt{ending}", b"\xef\xbb\xbfone"), separator=separator)
    assert texts(source) == ["one"]


def test_a_file_that_was_cut_elsewhere_is_not_read(tmp_path):
    path = write(tmp_path, "a.txt", b"one||two||three")
    source = fb.sources.text(path, separator="||")
    parts = fb.testing.kind_contracts.parts_of(source, 1, 1)
    path.write_bytes(b"one, two, three, four")
    with pytest.raises(SourceChanged, match=r"a\.txt.*no document that starts at byte 5"):
        list(samples_of(source, parts[1]))


def test_folders_take_text_files_and_compressed_ones_of_the_suffixes_asked_for(tmp_path):
    for name in ("a.txt", "b.md", "c.txt.gz", "d.md.zst", "e.rst", "f.gz"):
        write(tmp_path, name, b"text")
    assert [file.path for file in fb.sources.text(tmp_path).files()] == ["a.txt", "b.md", "c.txt.gz", "d.md.zst"]
    assert [file.path for file in fb.sources.text(tmp_path, suffixes=[".rst"]).files()] == ["e.rst"]
    assert [file.path for file in fb.sources.text(tmp_path / "f.gz").files()] == ["f.gz"]


def test_a_separator_of_nothing_is_refused(tmp_path):
    with pytest.raises(SourceInvalid, match="at least one character"):
        fb.sources.text(tmp_path, separator="")


def notes_of(source: fb.Source) -> tuple[str, ...]:
    return source.notes(source.files())


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_separator_that_only_differs_by_windows_line_ends_is_named(tmp_path: Path, ending: str) -> None:
    write(tmp_path, f"a.txt{ending}", b"one\r\n---\r\ntwo\r\n")
    found = notes_of(fb.sources.text(tmp_path, separator="\n---\n"))
    assert f"a.txt{ending}' has Windows line ends" in found[0]
    assert r"pass '\r\n---\r\n'" in found[0]
    assert notes_of(fb.sources.text(tmp_path, separator="\r\n---\r\n")) == ()
    assert notes_of(fb.sources.text(tmp_path, separator="---")) == ()


@pytest.mark.parametrize("content", [b"one\n---\ntwo\r\n---\r\n", b"one\r\ntwo", b""])
def test_other_files_get_no_note_about_line_ends(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, "a.txt", content)
    assert notes_of(fb.sources.text(tmp_path, separator="\n---\n")) == ()
