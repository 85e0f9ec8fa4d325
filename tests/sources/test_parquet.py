"""Parquet: every row of the text column comes back, whatever it is stored as, and never more of it than is needed."""

import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.sources.measured import measure_reading
from tests.sources.written import parquet_of, read_all, texts

import forebay as fb
from forebay.errors import SourceUnreadable
from forebay.source import Failure, Sample, samples_of
from forebay.testing.kind_contracts import parts_of

KINDS = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "binary_view": pa.binary_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


def column(documents: list[str | None], kind: str) -> pa.Array:
    array = pa.array(documents, pa.large_string())
    return array.dictionary_encode() if kind == "dictionary" else array.cast(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@given(
    documents=st.lists(TEXTS | st.none(), max_size=30),
    rows_per_group=st.integers(1, 12),
    first=st.integers(1, 15),
    every=st.integers(1, 15),
)
@settings(max_examples=scaled(25), deadline=None)
def test_rows_come_back_as_they_were_written(kind, documents, rows_per_group, first, every):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        path.write_bytes(parquet_of(column(documents, kind), rows_per_group))
        seen = read_all(fb.sources.parquet(path), first, every)
    bad = {None: ("null", "the text is null"), "": ("empty", "the document has no text")}
    expected = [
        Failure(f"a.parquet#{row}", bad[text][0], f"row {row}: {bad[text][1]}")
        if text in bad
        else Sample(f"a.parquet#{row}", text)
        for row, text in enumerate(documents)
    ]
    assert seen == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
def test_invalid_utf8_is_a_failure_that_names_row_and_byte(tmp_path, kind):
    stored = pa.array([b"one", b"tw\xff", None, b"\xc3\xa9"], pa.binary())
    array = stored if kind == pa.binary() else pa.Array.from_buffers(kind, 4, stored.buffers())
    (tmp_path / "a.parquet").write_bytes(parquet_of(array))
    one, bad, null, four = read_all(fb.sources.parquet(tmp_path))
    assert (one.data, null.reason, four.data) == ("one", "null", "é")
    assert (bad.sample, bad.reason) == ("a.parquet#1", "not-utf8")
    assert bad.detail == "row 1: byte 0xff at offset 2 of the text is not UTF-8 (invalid start byte)"


def test_a_file_without_the_column_is_an_error_that_names_it_and_what_it_has(tmp_path):
    (tmp_path / "a.parquet").write_bytes(parquet_of(pa.array(["fine"])))
    pq.write_table(pa.table({"content": ["x"], "url": ["y"]}), tmp_path / "b.parquet")
    with pytest.raises(SourceUnreadable, match=r"b\.parquet.*no column 'text'; it has: 'content', 'url'"):
        fb.build(tmp_path / "cache", fb.sources.parquet(tmp_path), fb.RawRecipe(), workers=0)
    assert not (tmp_path / "cache").exists()
    assert texts(fb.sources.parquet(tmp_path / "b.parquet", text="content")) == ["x"]


def test_two_columns_of_the_name_are_an_error(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(SourceUnreadable, match=r"a\.parquet.* it has 2 columns 'text'"):
        read_all(fb.sources.parquet(tmp_path))


@pytest.mark.parametrize("values", [[1, 2], [[b"a"], []], [{"text": "a"}, None], [1.5, None]])
def test_a_column_that_holds_no_text_is_an_error_that_says_what_it_holds(tmp_path, values):
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(SourceUnreadable, match=r"a\.parquet.*column 'text' holds (int64|list|struct|double).*not text"):
        read_all(fb.sources.parquet(tmp_path))


def test_columns_of_nearly_the_same_name_are_told_apart(tmp_path):
    table = pa.table({"text.x": ["no"], "text": ["yes"], "a": [{"text": "no"}]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert texts(fb.sources.parquet(tmp_path)) == ["yes"]
    assert texts(fb.sources.parquet(tmp_path, text="text.x")) == ["no"]


def damaged(whole: bytes) -> dict[str, bytes]:
    return {
        "nothing": b"",
        "other": b"id,text\n1,a\n",
        "truncated": whole[: len(whole) // 2],
        "footer": whole[:-60] + bytes(20) + whole[-40:],
        "footer length": whole[:-8] + b"\xff\xff\xff\x7f" + whole[-4:],
    }


@pytest.mark.parametrize("how", damaged(b""))
def test_a_damaged_file_is_unreadable_at_planning(tmp_path, how):
    (tmp_path / "a.parquet").write_bytes(damaged(parquet_of(pa.array(["a"] * 50)))[how])
    with pytest.raises(SourceUnreadable, match=r"a\.parquet.*Parquet"):
        parts_of(fb.sources.parquet(tmp_path), 1, 1)


def test_a_damaged_page_is_unreadable_when_it_is_read(tmp_path):
    documents = pa.array([os.urandom(20).hex() for _ in range(2000)])
    whole = bytearray(parquet_of(documents, use_dictionary=False, write_page_checksum=True))
    whole[len(whole) // 3] ^= 1
    (tmp_path / "a.parquet").write_bytes(whole)
    source = fb.sources.parquet(tmp_path)
    parts = parts_of(source, 1 << 40, 1 << 40)
    with pytest.raises(SourceUnreadable, match=r"a\.parquet.*(CRC|checksum)"):
        list(samples_of(source, parts[0]))


def test_a_page_that_claims_two_gigabytes_of_a_small_file_is_not_given_them(tmp_path):
    content = parquet_of(pa.array(["one", "two"] * 300))
    page = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(0).column(1).dictionary_page_offset
    sizes = re.compile(rb"\x15\x04\x15[\x80-\xff]*[\0-\x7f]\x15").match(content, page)
    begin = content[: sizes.end()] + b"\xfe\xff\xff\xff\x0f"  # the compressed size, 2**31 - 1
    (tmp_path / "a.parquet").write_bytes(begin + re.sub(rb"^[\x80-\xff]*[\0-\x7f]", b"", content[sizes.end() :]))
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(SourceUnreadable, match=r"Page was smaller \(.*\) than expected \(2147483647\)"):
        read_all(fb.sources.parquet(tmp_path))
    assert pa.default_memory_pool().max_memory() < max(before, 1 << 28)


def test_the_digest_of_rows_covers_their_text_and_the_footer_and_nothing_else(tmp_path):
    path = tmp_path / "a.parquet"
    texts_of = [f"document {number} " + os.urandom(9).hex() for number in range(90)]
    path.write_bytes(parquet_of(pa.array(texts_of), rows_per_group=30, compression="none", use_dictionary=False))
    source = fb.sources.parquet(path)
    (file,) = source.files()
    ranges = [(0, 30), (10, 20), (30, 60), (25, 35), (0, 90)]
    whole = path.read_bytes()
    before = [source.digest(file, *rows) for rows in ranges]
    assert before == [source.digest(file, *rows) for rows in ranges]

    def after(position: int) -> list[bool]:
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
        return [source.digest(file, *rows) != old for rows, old in zip(ranges, before, strict=True)]

    assert after(whole.index(b"document 45 ") + 9) == [False, False, True, True, True]
    assert after(whole.index(b"document 3 ") + 9) == [True, True, False, True, True]
    assert after(whole.index(b"no 45")) == [False] * 5  # another column
    assert after(whole.rindex(b"title")) == [True] * 5  # the footer
    assert after(0) == [False] * 5


def test_parts_within_a_row_group_are_read_in_any_order(tmp_path):
    documents = [f"{number} " + "x" * (number % 50) for number in range(3000)]
    (tmp_path / "a.parquet").write_bytes(parquet_of(pa.array(documents), rows_per_group=1100))
    source = fb.sources.parquet(tmp_path)
    parts = parts_of(source, 170, 130)
    assert any(part.stop % 1100 for part in parts[:-1])
    for order in (parts, parts[::-1], parts[::2] + parts[1::2]):
        for part in order:
            assert [sample.data for sample in samples_of(source, part)] == documents[part.start : part.stop]
    left, right = samples_of(source, parts[0]), samples_of(source, parts[1])
    assert [(one.id, two.id) for one, two in zip(left, right, strict=False)][:2] == [
        ("a.parquet#0", f"a.parquet#{parts[1].start}"),
        ("a.parquet#1", f"a.parquet#{parts[1].start + 1}"),
    ]


@pytest.mark.slow
def test_a_large_row_group_is_never_in_memory_as_a_whole(tmp_path):
    path = tmp_path / "a.parquet"
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        texts_of = [os.urandom(2500).hex() for _ in range(1000)]
        writer.write_table(pa.table({"text": texts_of * 24}, schema=schema), row_group_size=1 << 20)
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    assert path.stat().st_size > 110_000_000
    rows, size, peak = measure_reading(f"fb.sources.parquet({str(path)!r})", every=2000)
    assert (rows, size) == (24_000, 24_000 * 5000)
    assert peak < 90_000_000  # the column takes 120 MB


@pytest.mark.slow
def test_a_long_text_that_is_stored_once_and_read_in_every_row_is_not_in_memory_for_all_of_them(tmp_path):
    pq.write_table(pa.table({"text": ["x" * 200_000] * 1000}), tmp_path / "a.parquet")
    rows, size, peak = measure_reading(f"fb.sources.parquet({str(tmp_path / 'a.parquet')!r})", every=2000)
    assert (rows, size) == (1000, 200_000_000)
    assert peak < 150_000_000


@pytest.mark.parametrize("damage", [b"\xe4ext", b"texu"])
def test_schema_with_a_damaged_name_is_unreadable(tmp_path, damage):
    stored = parquet_of(pa.array([f"document {number}" for number in range(40)]), 20)
    footer = len(stored) - 8 - int.from_bytes(stored[-8:-4], "little")
    at = 1 + stored.index(b"\x04text", footer)  # the schema comes before the row groups
    (tmp_path / "a.parquet").write_bytes(stored[:at] + damage + stored[at + 4 :])
    source = fb.sources.parquet(tmp_path)
    with pytest.raises(SourceUnreadable, match=r"a\.parquet"):
        read_all(source)
    with pytest.raises(SourceUnreadable, match=r"a\.parquet"):
        source.digest(source.files()[0], 0, 40)


# Three rows; one byte of the footer, in the size statistics of the column, is another.
DAMAGED_STATISTICS = (
    "P(e~L6#x}F6*?>x1{DAm1{DSzHUKCCba!tU18;6+5fK0Y00IC200sdA0001QZe;@i004A%Zv_AV0CZ?_Wn~ov87wsb7zT4=Xk~3-"
    "6#@Vi3?u>=1axJ1bR_^x8~^|S76us{85|}692E>1B?bT)7zA`>cytv276ul47JMcMJT?F*19W$97z1x^Wf2ho85|V=6#x|i06Z2J"
    "83q|900sa602X`}1||p=d;lmQaA9(Bb!BudV{mXSVRCYBcOZ6Ua&u{KZXhx?E-)@J85|q{005W(002-yQZW"
)
READ = """
import sys
import forebay as fb
from forebay.source import Part
source = fb.sources.parquet(sys.argv[1])
(file,) = source.files()
try:
    print(len(list(source.read(Part(file, 0, list(source.cuts(file, 0, 9, 9))[-1])))))
except fb.errors.SourceUnreadable as error:
    print("refused:", error)
"""


def test_a_damaged_footer_at_which_pyarrow_ends_the_process_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(base64.b85decode(DAMAGED_STATISTICS))
    ran = subprocess.run([sys.executable, "-c", READ, tmp_path / "a.parquet"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("refused: cannot read '"), ran.stdout


def test_a_footer_of_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    os.truncate(path, 2 << 30)
    with open(path, "ab") as file:
        file.write((2_000_000_000).to_bytes(4, "little") + b"PAR1")
    source = fb.sources.parquet(path)
    with pytest.raises(SourceUnreadable, match=r"its footer has 2,000,000,000 bytes, more than the 268,435,456"):
        list(source.cuts(source.files()[0], 0, 9, 9))


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("hostile", ["statistics", "bomb"])
def test_build_of_a_hostile_file_ends_with_an_error_line(tmp_path, hostile, workers):
    path = tmp_path / "a.parquet"
    if hostile == "statistics":
        path.write_bytes(base64.b85decode(DAMAGED_STATISTICS))
    else:
        values = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), pa.array(["a" * 1_000_000]))
        pq.write_table(pa.table({"text": values}), path, compression="zstd")
    verb = ["build", "tokens", str(path), "--into", str(tmp_path / "cache"), "--workers", workers]
    command = [sys.executable, "-m", "forebay", *verb]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1
    assert "error: " in ran.stderr
    assert "a.parquet" in ran.stderr
    assert "Traceback" not in ran.stderr
