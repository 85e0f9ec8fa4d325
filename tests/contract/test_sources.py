"""Every source we ship keeps the contract."""

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.sources import functions
from tests.sources.written import parquet_of

from forebay import sources
from forebay.errors import SourceChanged, SourceInvalid
from forebay.source import Source
from forebay.testing import SourceContract, read_in_parts
from forebay.testing.kind_contracts import LINES


def lines_of(content: bytes) -> list[bytes]:
    """What a line is: whatever stands before a newline, and what is left at the end if it is not empty."""
    *finished, rest = content.split(b"\n")
    return [*finished, rest] if rest else finished


class TestLines(SourceContract):
    hashes = True
    test_bad_content_is_a_failure_with_an_id_and_a_reason_whatever_the_cuts = None

    def open_source(self, folder: Path) -> Source:
        return sources.lines(folder)

    def samples_of(self, content: bytes) -> list[bytes]:
        return lines_of(content)

    def test_a_file_that_grew_inside_its_last_line_is_refused(self, folder):
        source = self.write(folder, {"a": b"one\ntwo"})
        (folder / "a.txt").write_bytes(b"one\ntwo and more\n")
        with pytest.raises(SourceChanged, match=r"a\.txt.*byte 7"):
            list(source.cuts(source.files()[0], 7, 1, 1))


class TestGzipLines(TestLines):
    suffix = ".jsonl.gz"

    def stored(self, content: bytes) -> bytes:
        return gzip.compress(content, 1, mtime=0)

    test_a_file_that_grew_inside_its_last_line_is_refused = None


class TestZstdLines(TestLines):
    suffix = ".jsonl.zst"

    def stored(self, content: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=1).compress(content)

    test_a_file_that_grew_inside_its_last_line_is_refused = None


class TestFiles(SourceContract):
    hashes = True
    test_bad_content_is_a_failure_with_an_id_and_a_reason_whatever_the_cuts = None

    def open_source(self, folder: Path) -> Source:
        return sources.files(folder)

    def samples_of(self, content: bytes) -> list[bytes]:
        return [content]

    def test_a_file_that_grew_is_appended(self, folder):
        """One file is one sample: what grew has changed."""
        source = self.write(folder, {"a": b"12345"})
        with pytest.raises(SourceChanged, match=r"a\.txt"):
            list(source.cuts(source.files()[0], 3, 1, 1))

    test_a_file_that_did_not_grow_has_nothing_more_to_cut = None


class TestJsonl(SourceContract):
    hashes = True
    """Every line of the content is the text of an object, byte for character."""

    suffix = ".jsonl"
    broken = b'{"text": "fine"}\n{"text": null}\n\n{"text": \xff}\n{"text": "fine again"}'

    def open_source(self, folder: Path) -> Source:
        return sources.jsonl(folder)

    def samples_of(self, content: bytes) -> list[str]:
        return [line.decode("latin-1") for line in lines_of(content)]

    def stored(self, content: bytes) -> bytes:
        objects = [json.dumps({"text": text}).encode() for text in self.samples_of(content)]
        end = b"\n" if content.endswith(b"\n") else b""
        return b"\n".join(objects) + end


class TestGzipJsonl(TestJsonl):
    suffix = ".jsonl.gz"
    broken = gzip.compress(TestJsonl.broken, mtime=0)

    def stored(self, content: bytes) -> bytes:
        return gzip.compress(super().stored(content), 1, mtime=0)


class TestZstdJsonl(TestJsonl):
    suffix = ".jsonl.zst"
    broken = zstandard.compress(TestJsonl.broken)

    def stored(self, content: bytes) -> bytes:
        return zstandard.compress(super().stored(content), 1)


class TestText(SourceContract):
    hashes = True
    """Documents are lines of the content, byte for character, with a separator in place of the newline."""

    suffix = ".txt"
    separator = "<|end|>"
    broken = b"fine<|end|>\xff bad<|end|>\nfine <|end|> bad \xe2\x82"

    def open_source(self, folder: Path) -> Source:
        return sources.text(folder, separator=self.separator)

    def samples_of(self, content: bytes) -> list[str]:
        return [line.decode("latin-1") for line in lines_of(content)]

    def stored(self, content: bytes) -> bytes:
        return content.decode("latin-1").replace("\n", self.separator).encode()


class TestGzipText(TestText):
    suffix = ".txt.gz"
    broken = gzip.compress(TestText.broken, mtime=0)

    def stored(self, content: bytes) -> bytes:
        return gzip.compress(super().stored(content), 1, mtime=0)


class TestWholeText(SourceContract):
    hashes = True
    suffix = ".md"

    def open_source(self, folder: Path) -> Source:
        return sources.text(folder)

    def samples_of(self, content: bytes) -> list[str]:
        return [content.decode("latin-1")]

    def stored(self, content: bytes) -> bytes:
        return content.decode("latin-1").encode()

    def test_a_file_that_grew_is_appended(self, folder):
        """One file is one document: what grew has changed."""
        source = self.write(folder, {"a": b"12345"})
        assert not source.files_grow
        with pytest.raises(SourceChanged, match=r"a\.md"):
            list(source.cuts(source.files()[0], 3, 1, 1))

    test_a_file_that_did_not_grow_has_nothing_more_to_cut = None
    test_bad_content_is_a_failure_with_an_id_and_a_reason_whatever_the_cuts = None


class TestWholeZstdText(TestWholeText):
    suffix = ".md.zst"

    def stored(self, content: bytes) -> bytes:
        return zstandard.compress(super().stored(content), 1)

    test_a_file_that_grew_is_appended = None


class TestParquet(SourceContract):
    """Every line of the content is a row, byte for character."""

    suffix = ".parquet"
    broken = parquet_of(pa.array([b"fine", None, b"bad \xff", b"fine"], pa.binary()))

    def open_source(self, folder: Path) -> Source:
        return sources.parquet(folder)

    def samples_of(self, content: bytes) -> list[str]:
        return [line.decode("latin-1") for line in lines_of(content)]

    def stored(self, content: bytes) -> bytes:
        return parquet_of(pa.array(self.samples_of(content), pa.string()), rows_per_group=99)

    def test_a_file_that_grew_is_appended(self, folder):
        """Its footer stands at its end: what grew has changed."""
        assert not self.write(folder, {"a": b"12345"}).files_grow


class TestFunction(SourceContract):
    """Every line of a file is a document, byte for character; a slice is a file, and its only part."""

    hashes = True

    def open_source(self, folder: Path) -> Source:
        functions.FOLDER[:] = [folder]
        return sources.function(functions.lines_of_folder, slices=len(list(folder.iterdir())))

    def samples_of(self, content: bytes) -> list[str]:
        return [line.decode("latin-1") for line in lines_of(content)]

    def test_files_are_named_in_order_and_look_the_same_one_by_one(self, folder):
        source = self.write(folder, {"b": b"1\n", "a": b"2\n", "c": b""})
        assert [file.path.rpartition("/")[2] for file in source.files()] == ["0", "1", "2"]
        assert [source.look(file.path) for file in source.files()] == source.files()

    def test_a_file_that_is_gone_is_not_found(self, folder):
        source = self.write(folder, {"a": b"1\n"})
        for path in ("tests.sources.functions:lines_of_folder/1", "other:function/0", "a.txt"):
            with pytest.raises(FileNotFoundError, match=path):
                source.look(path)

    test_its_description_is_json_from_which_it_opens_again = None

    def test_its_description_is_json_that_opens_nothing(self, folder: Path) -> None:
        described = json.loads(json.dumps(self.write(folder, {"a": LINES}).describe()))
        with pytest.raises(SourceInvalid, match="functions:lines_of_folder"):
            sources.FunctionSource.from_description(described)  # a name in a file is never imported

    # What a function gives has no end to cut at, no time to look at, and grows by slices.
    test_cuts_rise_and_the_last_is_the_end = None
    test_a_file_that_grew_is_appended = None
    test_a_file_that_changed_has_another_identity = None
    test_bad_content_is_a_failure_with_an_id_and_a_reason_whatever_the_cuts = None


CONTENTS = st.lists(
    st.lists(st.sampled_from([b"", b"\n", b"\r\n", b"a", b"bb", b"\x00", b"\xff" * 9, b"\n\n"]), max_size=12).map(
        b"".join
    ),
    min_size=1,
    max_size=4,
)
KINDS = [
    TestLines, TestGzipLines, TestZstdLines, TestFiles, TestJsonl, TestGzipJsonl, TestZstdJsonl,
    TestText, TestGzipText, TestWholeText, TestWholeZstdText, TestParquet, TestFunction,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(contents=CONTENTS, first=st.integers(1, 30), every=st.integers(1, 30))
@settings(max_examples=scaled(60), deadline=None)
def test_whatever_the_content_and_the_cuts_every_sample_comes_once_and_in_order(kind, contents, first, every):
    contract = kind()
    with TemporaryDirectory() as folder:
        source = contract.write(Path(folder), {str(number): content for number, content in enumerate(contents)})
        samples = read_in_parts(source, first, every)
    assert [sample.data for sample in samples] == [one for content in contents for one in contract.samples_of(content)]
    assert len({sample.id for sample in samples}) == len(samples)
