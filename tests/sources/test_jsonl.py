"""JSON lines: every document comes back as it was written, every bad line is named."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.sources.written import STORED, read_all, texts, write

import forebay as fb
from forebay.errors import SourceInvalid, SourceNotFound, SourceUnreadable
from forebay.source import Failure, Part, Sample, SourceFile, TextBatch, samples_of
from forebay.sources import JsonlSource

ENDINGS = pytest.mark.parametrize("ending", STORED, ids=lambda ending: ending or "plain")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.text('\n\r\\"{}\u2028é🂡', max_size=12)


@ENDINGS
@given(
    documents=st.lists(TEXTS, max_size=20),
    escaped=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
    finished=st.booleans(),
    first=st.integers(1, 200),
    every=st.integers(1, 200),
)
@settings(max_examples=scaled(60), deadline=None)
def test_documents_come_back_as_they_were_written(ending, documents, escaped, newline, finished, first, every):
    written = newline.join(
        json.dumps({"id": 3, "text": text, "more": {"text": "no"}}, ensure_ascii=escaped) for text in documents
    )
    with TemporaryDirectory() as folder:
        path = write(Path(folder), f"a.jsonl{ending}", (written + newline * finished).encode())
        assert texts(fb.sources.jsonl(path), first, every) == documents


BAD_LINES = {
    b'{"text": null}': ("null", "the field 'text' is null"),
    b'{"text": 12}': ("not-text", "the field 'text' is a number, not a string"),
    b'{"text": -1.5e3}': ("not-text", "the field 'text' is a number, not a string"),
    b'{"text": true}': ("not-text", "the field 'text' is true, not a string"),
    b'{"text": ["a"]}': ("not-text", "the field 'text' is an array, not a string"),
    b'{"text": {"text": "a"}}': ("not-text", "the field 'text' is an object, not a string"),
    b'{"Text": "a"}': ("no-text", "the object has no field 'text'"),
    b'{"\xff": "a"}': ("no-text", "(its fields have no readable names)"),
    b'{"\\ud800": "a"}': ("bad-json", "surrogate"),
    b"{}": ("no-text", "the object has no field 'text'"),
    b'"text"': ("bad-json", "object"),
    b"null": ("bad-json", "object"),
    b'{"text": "a"': ("bad-json", "truncated"),
    b'{"text": "a"}{"text": "b"}': ("bad-json", "trailing"),
    b'{"text": "a"} b': ("bad-json", "trailing"),
    b'{"text": "a\tb"}': ("bad-json", "invalid character"),
    b'{"text": "\\ud800"}': ("bad-json", ""),
    b'{"text": "\\udc00 a"}': ("bad-json", "surrogate"),
    b'{"text": 5, "more": [}': ("bad-json", "invalid character"),
    b'{"text": "ab\xff"}': ("not-utf8", "byte 0xff at offset 44 of the file"),
    b'{"text": "\xed\xa0\x80"}': ("not-utf8", "byte 0xed at offset 42 of the file"),
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b', "text": "a"}': ("bad-json", "nested too deeply"),
}


@ENDINGS
@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda line: line[:24].decode("latin-1"))
def test_a_bad_line_is_a_failure_with_its_number_and_the_others_are_read(tmp_path, ending, bad):
    lines = [b'{"text": "one"}', b'{"text": "two"}', bad, b'{"text": "four"}']
    source = fb.sources.jsonl(write(tmp_path, f"a.jsonl{ending}", b"\n".join(lines)))
    one, two, failure, four = read_all(source)
    assert [one.data, two.data, four.data] == ["one", "two", "four"]
    assert failure.sample == f"a.jsonl{ending}@32"
    reason, words = BAD_LINES[bad]
    assert failure.reason == reason
    assert failure.detail.startswith("line 3: ")
    assert words in failure.detail
    assert read_all(source, 1, 1) == [one, two, failure, four]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("other", [b'{"text": "fine"}', b"{broken"])
def test_a_document_without_text_is_a_failure_with_its_line(tmp_path, ending, other):
    content = b"".join(b'{"text": "%s"}\n' % (b"" if number in (2, 9_000) else b"fine") for number in range(9_002))
    source = fb.sources.jsonl(write(tmp_path, f"a.jsonl{ending}", content + other))
    seen = [one for one in read_all(source, 50_000, 50_000) if isinstance(one, Failure) and one.reason == "empty"]
    assert [one.sample for one in seen] == [f"a.jsonl{ending}@{place}" for place in (34, 9_000 * 17 - 4)]
    assert [one.detail for one in seen] == [f"line {n}: the document has no text" for n in (3, 9_001)]


def test_an_object_without_the_field_is_told_by_the_fields_it_has(tmp_path):
    long = {f"field {number}\n" + "é" * 50: number for number in range(9)}
    lines = [json.dumps(one) for one in ({"id": 1, "text": "a"}, {}, long)]
    source = fb.sources.jsonl(write(tmp_path, "a.jsonl", "\n".join(lines).encode()), text="txt")
    first, second, third = (one.detail for one in read_all(source))
    assert first == "line 1: the object has no field 'txt' (it has: id, text)"
    assert second == "line 2: the object has no field 'txt' (it is empty)"
    assert third.startswith("line 3: the object has no field 'txt' (it has: field 0\\n\\xe9")
    assert third.endswith("…)")
    assert len(third) < 300


def test_two_values_in_one_line_do_not_make_up_for_an_empty_one(tmp_path):
    double = b'{"text": "a"}{"text": "b"}'
    for content in (double + b"\n\n", b"\n" + double, b'{"text":\n"a"}\n' + double, double + b'\n{"text":\n"a"}'):
        source = fb.sources.jsonl(write(tmp_path, "a.jsonl", content))
        assert {type(one) for one in read_all(source)} == {Failure}


@ENDINGS
def test_line_numbers_count_from_the_beginning_of_the_file_in_any_order_of_reading(tmp_path, ending):
    good, bad = b'{"text": "good"}\n', b"bad\n"
    content = b"".join(bad if number % 1000 == 0 else good for number in range(1, 30_001))
    source = fb.sources.jsonl(write(tmp_path, f"a.jsonl{ending}", content))
    parts = fb.testing.kind_contracts.parts_of(source, 70_000, 50_000)
    assert len(parts) > 5
    for order in (parts, parts[::-1]):
        found = [one.detail for part in order for one in samples_of(source, part) if isinstance(one, Failure)]
        assert sorted(int(detail.split()[1].rstrip(":")) for detail in found) == list(range(1000, 30_001, 1000))


@ENDINGS
def test_blank_lines_are_passed_over_and_still_counted(tmp_path, ending):
    content = b'{"text": "a"}\n\n{"text": "b"}\n' + b" " * 300 + b"\n\t\r\n{broken\n\n \r\n"
    source = fb.sources.jsonl(write(tmp_path, f"a.jsonl{ending}", content))
    for cut in (1, 1 << 40):
        a, b, broken = read_all(source, cut, cut)
        assert (a.data, b.data) == ("a", "b")
        assert broken.detail.startswith("line 6: ")


@ENDINGS
def test_what_was_planned_reads_the_same_after_the_file_grew_behind_its_blank_end(tmp_path, ending):
    path = write(tmp_path, f"a.jsonl{ending}", b'{"text": "a"}\n\n')
    source = fb.sources.jsonl(path)
    (part,) = fb.testing.kind_contracts.parts_of(source, 1 << 40, 1 << 40)
    with path.open("ab") as file:
        file.write(STORED[ending](b'{"text": "b"}\n'))
    assert list(samples_of(source, part)) == [Sample(f"a.jsonl{ending}@0", "a")]


@ENDINGS
def test_a_byte_order_mark_at_the_start_of_a_file_is_no_part_of_the_first_line(tmp_path, ending):
    for content in (b'{"text": "a"}\n{"text": "b"}\n', b'{"text": "a"}\nbad\n{"text": "b"}\n'):
        source = fb.sources.jsonl(write(tmp_path, f"a.jsonl{ending}", b"\xef\xbb\xbf" + content))
        first, *_, last = read_all(source)
        assert (first.id, first.data, last.data) == (f"a.jsonl{ending}@0", "a", "b")


@ENDINGS
def test_an_id_is_where_the_line_begins(tmp_path, ending):
    content = b'{"text": "a"}\r\n{"text": "\xc3\xa9"}\n{"text": "c"}'
    source = fb.sources.jsonl(write(tmp_path, f"a.jsonl{ending}", content))
    for sample in read_all(source):
        offset = int(sample.id.rpartition("@")[2])
        assert json.loads(content[offset:].split(b"\n")[0])["text"] == sample.data


@given(field=st.text(st.characters(codec="utf-8", exclude_characters='"\\', min_codepoint=32), max_size=8))
@example(field="text")
@example(field="doc.text")
@settings(max_examples=scaled(30), deadline=None)
def test_the_text_may_be_any_field(field):
    with TemporaryDirectory() as folder:
        line = json.dumps({"_" + field: "no", field: "yes", field + "_": 5}, ensure_ascii=False).encode()
        path = write(Path(folder), "a.jsonl", line)
        assert texts(fb.sources.jsonl(path, text=field)) == ["yes"]


@pytest.mark.parametrize("field", ['a"b', "a\\b", "a\nb"])
def test_a_field_that_cannot_be_asked_for_is_refused_at_once(tmp_path, field):
    with pytest.raises(SourceInvalid, match="no field can be found"):
        fb.sources.jsonl(tmp_path, text=field)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_truncated_file_is_unreadable_at_the_line_it_breaks_off(tmp_path, ending):
    lines = [json.dumps({"text": os.urandom(50).hex()}).encode() + b"\n" for _ in range(20_000)]
    path = write(tmp_path, f"a.jsonl{ending}", b"".join(lines))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(SourceUnreadable, match=rf"a\.jsonl{ending}.*line \d+, after [\d,]+ decompressed bytes"):
        read_all(fb.sources.jsonl(path))


def test_folders_and_globs_take_the_files_of_this_kind_only(tmp_path):
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.jsonl.zst", "e.txt", "f.json.gz", "g.jsonl.bak"):
        write(tmp_path, name, b'{"text": "a"}\n')
    found = [file.path for file in fb.sources.jsonl(tmp_path).files()]
    assert found == ["a.jsonl", "b.json", "c.jsonl.gz", "d.jsonl.zst", "f.json.gz"]
    assert [file.path for file in fb.sources.jsonl(tmp_path / "*").files()] == found
    assert [file.path for file in fb.sources.jsonl(tmp_path / "e.txt").files()] == ["e.txt"]  # named, so meant
    assert [file.path for file in fb.sources.jsonl(tmp_path / "*.txt").files()] == ["e.txt"]
    with pytest.raises(SourceNotFound, match=r"ends in \.jsonl, \.ndjson, \.json \(in any case, also compressed\)"):
        fb.sources.jsonl(tmp_path / "e*").files()
    with pytest.raises(SourceNotFound, match="no file matches"):
        fb.sources.jsonl(tmp_path / "x*").files()


def test_one_stream_is_read_by_two_at_once(tmp_path):
    lines = b"".join(json.dumps({"text": str(number)}).encode() + b"\n" for number in range(50_000))
    source = fb.sources.jsonl(write(tmp_path, "a.jsonl.gz", lines))
    parts = fb.testing.kind_contracts.parts_of(source, 300_000, 300_000)
    left, right = samples_of(source, parts[0]), samples_of(source, parts[1])
    pairs = list(zip(left, right, strict=False))
    assert [one.data for one, _ in pairs] == [str(number) for number in range(len(pairs))]
    assert [int(two.data) - int(one.data) for one, two in pairs] == [int(pairs[0][1].data)] * len(pairs)


@dataclass(frozen=True, slots=True)
class NeverReadTwice(JsonlSource):
    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        raise AssertionError(f"{file.path} is read again for its digest")


def test_a_build_takes_the_digest_of_its_source_while_it_reads_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": ""}\n{"text": 1}\n' * 200)
    source = NeverReadTwice(str(tmp_path), ("a.jsonl",))
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=8, chunk_rows=10)
    made = fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=1.0)
    assert made.failures == 400
    plain = fb.sources.jsonl(tmp_path / "a.jsonl")
    assert not fb.build(tmp_path / "cache", plain, recipe, workers=0, max_failures=1.0).built
    assert fb.verify(tmp_path / "cache", source=plain, full=True).sound


def test_a_batch_has_the_texts_of_a_block_and_none_if_a_line_is_not_valid(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "one"}\n{"text": ""}\n')
    source = fb.sources.jsonl(tmp_path)
    whole, single = (list(source.read(Part(file, 0, file.size))) for file in source.files())
    assert whole == [TextBatch(["a.jsonl@0", "a.jsonl@16"], ["one", "two"])]
    assert single == [Sample("b.jsonl@0", "one"), Failure("b.jsonl@16", "empty", "line 2: the document has no text")]
