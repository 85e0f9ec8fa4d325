"""docs/format.md says what the bytes are: a chunk typed from it, and a reader written from it, agree with forebay."""

import hashlib
import hmac
import json
import re
from pathlib import Path

import lz4.block
import numpy as np
import plain_reader
import pytest
import xxhash
import zstandard
from tests.helpers.cache_files import segment_of
from tests.helpers.dedup_cases import DistinctRecipe, write_file

import forebay as fb
from forebay.columns import DTYPES, Column, Ragged
from forebay.format import layout
from forebay.format.chunk import encode_chunk
from forebay.format.codecs import compressor
from forebay.format.generation import ChunkTable, Generation
from forebay.format.tensors import seal
from forebay.source import Failure, Part, SourceFile
from forebay.store import MemoryStore

FORMAT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def tables(first_heading: str) -> list[list[str]]:
    """The rows of the table of docs/format.md whose first heading this is."""
    lines = FORMAT[FORMAT.index(f"| {first_heading} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def typed_chunk() -> bytes:
    """Two rows: `n` is 1 and 515; `t` is "ab" and nothing. One sample failed."""
    n = bytes.fromhex("0100 0302")
    t = b"ab"
    offsets = bytes.fromhex("0000000000000000 0200000000000000 0200000000000000")
    source = bytes.fromhex("2a00000000000000")
    failures = b'{"detail":"","reason":"empty","sample":"b@9"}'
    digest_n = b'["n","uint16",[],false,2]' + n
    digest_t = b'["t","uint8",[],true,2]' + offsets + t
    metadata = (
        '{"base":"","check":"%s","chunk":0,"columns":['
        '{"codec":"none","dtype":"uint16","index":"","level":"default","name":"n","ragged":false,"rows_per_block":0,"shape":[]},'
        '{"codec":"none","dtype":"uint8","index":"","level":"default","name":"t","ragged":true,"rows_per_block":0,"shape":[]}'
        '],"content":"' + xxhash.xxh3_128_hexdigest(digest_n + digest_t) + '","failures":1,'
        '"fingerprint":"0000000000000000000000000000000000000000000000000000000000000000","format_version":1,'
        '"ids":"' + xxhash.xxh3_128_hexdigest(digest_t) + '","layer":"tiny","rows":2,"samples":3,'
        '"statistics":{"bytes":2,"share":0.5},"type":"chunk"}'
    )
    check = xxhash.xxh3_64_hexdigest((metadata % "").encode() + source + failures)
    header = (
        '{"__metadata__":{"forebay":"' + (metadata % check).replace('"', '\\"') + '"},'
        '"n.sums":{"dtype":"U64","shape":[1],"data_offsets":[0,8]},'
        '"t.offsets":{"dtype":"U64","shape":[3],"data_offsets":[8,32]},'
        '"t.sums":{"dtype":"U64","shape":[1],"data_offsets":[32,40]},'
        '".source":{"dtype":"U64","shape":[1],"data_offsets":[40,48]},'
        '"n":{"dtype":"U16","shape":[2],"data_offsets":[48,52]},'
        '"t":{"dtype":"U8","shape":[2],"data_offsets":[52,54]},'
        '".failures":{"dtype":"U8","shape":[45],"data_offsets":[54,99]}}'
    ).encode()
    sum_n, sum_t = (xxhash.xxh3_64_intdigest(block).to_bytes(8, "little") for block in (n, t))
    data = sum_n + offsets + sum_t + source + n + t + failures
    return bytes.fromhex("f80f000000000000") + header + b" " * (4088 - len(header)) + data


def test_the_chunk_typed_from_the_text_is_the_one_we_write():
    columns = {"n": np.array([1, 515], np.uint16), "t": Ragged.of_bytes([b"ab", b""])}
    declared = [Column(name="n", dtype="uint16"), Column(name="t", dtype="uint8", ragged=True)]
    written = encode_chunk(
        columns,
        declared,
        layer="tiny",
        chunk=0,
        fingerprint="0" * 64,
        samples=3,
        failures=[Failure("b@9", "empty")],
        statistics={"share": 0.5, "bytes": 2},
        sample_ids="t",
        source_sums=[42],
    )
    assert b"".join(written.buffers) == typed_chunk()
    assert written.head_size == 4096 + 48
    pinned = "bd3a9971086493f6969595f2390269cadc1a292ed1faf3354fd9c1d567e51296"
    assert hashlib.sha256(typed_chunk()).hexdigest() == pinned


def every_column(codec: str, level: str, rows: int) -> tuple[dict[str, object], list[Column]]:
    """All types, fixed and ragged, with shapes; blocks of the automatic size and of three rows."""
    random = np.random.default_rng(rows)
    declared = [
        Column(name=f"{dtype}_{kind}", dtype=dtype, shape=shape, ragged=kind == "ragged", codec=codec, level=level,
               rows_per_block=3 if shape else 0)
        for dtype in DTYPES for kind, shape in (("fixed", ()), ("ragged", (2,)))
    ]  # fmt: skip
    declared.append(Column(name="grid", dtype="float32", shape=(2, 3), codec=codec, level=level, rows_per_block=4))
    declared.append(Column(name="void", dtype="float32", shape=(0,), codec=codec, level=level))
    columns: dict[str, object] = {}
    for column in declared:
        lengths = random.integers(0, 4, rows)
        count = int(lengths.sum()) if column.ragged else rows
        raw = random.integers(0, 2, count * column.item_bytes, np.uint8)
        values = np.frombuffer(raw.tobytes(), column.array_dtype).reshape(count, *column.shape)
        columns[column.name] = Ragged(values, np.append(0, np.cumsum(lengths))) if column.ragged else values
    return columns, declared


@pytest.mark.parametrize("rows", [0, 1, 200])
@pytest.mark.parametrize(
    ("codec", "level"), [("none", "default"), *((c, lv) for c in ("lz4", "zstd") for lv in ("fast", "default", "max"))]
)
def test_a_reader_written_from_the_text_reads_what_we_write(codec, level, rows):
    columns, declared = every_column(codec, level, rows)
    chunk = encode_chunk(columns, declared, layer="base", chunk=0, fingerprint="0" * 64, samples=rows)
    metadata, found = plain_reader.read_chunk(b"".join(chunk.buffers))
    assert metadata["rows"] == rows
    assert list(found) == [column.name for column in declared]
    for name, made in columns.items():
        values, offsets = found[name] if isinstance(made, Ragged) else (found[name], None)
        expected = made.values if isinstance(made, Ragged) else made
        assert (values.dtype, values.shape, values.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        assert offsets is None or offsets.tolist() == made.offsets.tolist()


def test_a_reader_written_from_the_text_reads_a_generation_and_its_chunks():
    store = MemoryStore()
    records = []
    for chunk in (0, 2):
        columns, declared = every_column("zstd", "default", 5 + chunk)
        encoded = encode_chunk(
            columns, declared, layer="base", chunk=chunk, fingerprint="0" * 64, samples=9, statistics={"bytes": chunk}
        )
        store.create(layout.chunk(layout.layer_folder("base", "0" * 64), chunk), encoded.buffers)
        records.append(encoded.record(encoded.sha256()))
    recipe = {
        "format_version": 2, "layer": "base", "kind": "k", "revision": 1, "fingerprint": "0" * 64, "fields": {},
        "dependencies": {}, "reads": [], "sample_ids": "", "columns": [],
    }  # fmt: skip
    generation = Generation(
        number=4, cache='{"format_version": 2, "cache_id": "c", "base": "base"}', recipes={"base": json.dumps(recipe)},
        constants={}, plan=("0" * 64,), versions=(),
        layers={"base": ChunkTable.of(records)},
    )  # fmt: skip
    store.create(layout.generation(4), generation.encode(None))

    metadata, table = read = plain_reader.read_generation(store.read("generations/000004.safetensors"))
    assert (metadata["number"], metadata["layers"], metadata["plan"]) == (4, ["base"], ["0" * 64])
    assert table["base.rows"].tolist() == [5, 7]
    assert table["base.statistics.bytes"].tolist() == [0, 2]
    found = list(plain_reader.read_layer(store.read, read, "base"))
    assert [(chunk["chunk"], chunk["rows"]) for chunk, _ in found] == [(0, 5), (2, 7)]
    for chunk, columns in found:
        expected, _ = every_column("zstd", "default", chunk["rows"])
        assert columns["grid"].tobytes() == expected["grid"].tobytes()


def typed_sealed() -> bytes:
    """A constants file of two tensors, tagged: names in the order of their widths, not of the alphabet."""
    header = (
        rb'{"__metadata__":{"forebay":"{\"format_version\":2,\"layer\":\"tiny\",\"type\":\"constants\"}"},'
        rb'"wide":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},'
        rb'"a":{"dtype":"U8","shape":[2],"data_offsets":[4,6]},'
        rb'"b":{"dtype":"BOOL","shape":[],"data_offsets":[6,7]},'
        rb'".digest":{"dtype":"U8","shape":[32],"data_offsets":[7,39]},'
        rb'".hmac":{"dtype":"U8","shape":[32],"data_offsets":[39,71]}}'
    )
    content = bytes.fromhex("f80f000000000000") + header.ljust(4088) + bytes.fromhex("feffffff 0102 01")
    content += hashlib.sha256(content).digest()
    return content + hmac.digest(b"key", content, "sha256")


def test_the_index_file_typed_from_the_text_is_the_one_we_write():
    tensors = {"b": np.array(True), "a": np.array([1, 2], np.uint8), "wide": np.array([-2], np.int32)}
    written = seal({"type": "constants", "format_version": 2, "layer": "tiny"}, tensors, b"key")
    assert b"".join(written) == typed_sealed()


def test_the_table_of_types_in_the_text_is_the_one_in_the_code():
    rows = {name: (tag, int(size)) for name, tag, size, _ in tables("column type")}
    assert rows == {name: (tag, dtype.itemsize) for name, (tag, dtype) in DTYPES.items()}
    assert list(rows) == list(DTYPES)


def test_the_levels_in_the_text_are_the_ones_in_the_code():
    random = np.random.default_rng(0)  # words of a small language: every level finds something else in them
    words = [random.bytes(length) for length in range(2, 14) for _ in range(40)]
    block = b"".join(words[number] for number in random.geometric(0.01, 20_000) % len(words))
    for codec, _, *levels in tables("codec"):
        for name, level in zip(("fast", "default", "max"), levels, strict=True):
            number = int((re.findall(r"\d+", level) or ["0"])[0])
            if codec == "zstd":
                expected = zstandard.ZstdCompressor(level=number).compress(block)
            elif codec == "lz4":
                mode = {"mode": "fast", "acceleration": number}
                if "high" in level:
                    mode = {"mode": "high_compression", "compression": number}
                expected = lz4.block.compress(block, store_size=False, **mode)
            else:
                expected = block
            assert compressor(codec, name)(block) == expected, (codec, name)


def test_the_names_in_the_text_are_the_ones_in_the_code():
    named = [name for name, _, _ in tables("name")]
    folder = layout.layer_folder("<layer>", "<fp>")
    assert named == [
        layout.CACHE, layout.plan_segment(0), layout.identities(0, "<hash>"), layout.recipe("<layer>"),
        layout.constants(folder), layout.chunk(folder, 35), layout.generation(3), layout.claim(folder, 35),
        layout.PLAN_CLAIM, layout.PUBLISH_CLAIM, layout.builder("<owner>"),
    ]  # fmt: skip


def test_the_keys_of_a_chunks_metadata_are_the_ones_in_the_text():
    described = {key.strip("` ") for keys, _ in tables("key") for key in keys.split(",")}
    header = typed_chunk()[8:4096]
    assert described == json.loads(json.loads(header)["__metadata__"]["forebay"]).keys()


def test_the_tensors_of_a_generation_are_the_ones_in_the_text():
    rows = FORMAT[FORMAT.index("### Generations") : FORMAT.index("### Constants")].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `<layer>")]
    described = [name for cell in cells for name in re.findall(r"[`>]\.([\w.<>]+)`", cell)]
    assert described == [*ChunkTable.of([]).numbers, *ChunkTable.of([]).digests, "statistics.<name>"]


def tensors_described(heading: str, next_heading: str) -> dict[str, str]:
    """The tensors that a section of docs/format.md lists, with their tags."""
    described: dict[str, str] = {}
    for row in FORMAT[FORMAT.index(heading) : FORMAT.index(next_heading)].splitlines():
        names, *tags = (re.findall(r"`(\w+)`", cell) for cell in row.split("|")[1:3]) if row.startswith("| `") else [[]]
        described.update(zip(names, [*tags[0], *tags[0]] if names else [], strict=False))
    return described


def test_the_tensors_of_a_plan_are_the_ones_in_the_text():
    described = tensors_described("### Plan segments", "### Duplicates")
    files = [SourceFile("a.txt", 10), SourceFile("b.gz", 9, 5, "etag", True, 77, ctime_ns=6, inode=8)]
    parts = [Part(files[0], 0, 4), Part(files[1], 0, 30)]
    segment = segment_of([parts], number=0, first_chunk=0, source={"kind": "lines"}, weight=34)
    metadata, tensors = plain_reader.read_tensors(b"".join(segment.encode()))
    assert tensors.pop(".digest").shape == (32,)
    assert {name: plain_reader.DTYPES[tag] for name, tag in described.items()} == {
        name: array.dtype.str.replace("|", "") for name, array in tensors.items()
    }
    assert metadata == {
        "format_version": 2, "type": "plan", "number": 0, "first_chunk": 0, "source": {"kind": "lines"}, "weight": 34,
        "previous": "", "cache_id": "",
    }  # fmt: skip


def test_a_plan_that_leaves_out_duplicates_and_its_identities_are_as_the_text_says(tmp_path):
    lines = [b"a", b"bb", b"a", b"", b"bb", b"", b"ccc", b"a"]
    source = fb.sources.lines(write_file(tmp_path / "source.txt", lines))
    fb.build(tmp_path / "cache", source, DistinctRecipe(chunk_bytes=60), workers=0)
    metadata, tensors = plain_reader.read_tensors((tmp_path / "cache/plan/000000.safetensors").read_bytes())
    described = tensors_described("### Duplicates", "### Identities")
    assert {name: tensors[name].dtype.str for name in described} == {
        name: plain_reader.DTYPES[tag] for name, tag in described.items()
    }
    slices = [range_of_lines(lines, *tensors["part_start"][chunk : chunk + 1], *tensors["part_stop"][chunk : chunk + 1])
              for chunk in range(len(tensors["part_start"]))]  # fmt: skip
    assert len(slices) > 2
    seen: set[bytes] = set()
    for chunk, samples in enumerate(slices):
        names = [xxhash.xxh3_128_digest(line) if line else b"" for line in samples]
        repeated = [i for i, name in enumerate(names) if name and name in [*seen, *names[:i]]]
        seen |= {*names} - {b""}
        first, last = tensors["chunk_duplicates"][chunk : chunk + 2].tolist()
        assert tensors["duplicates"][first:last].tolist() == repeated
        judged = b"".join(b"\1" + name if name else b"\0" for name in names)
        assert tensors["chunk_check"][chunk] == xxhash.xxh3_64_intdigest(judged)

    file = (tmp_path / f"cache/identities/000000.{metadata['identities'][:16]}.safetensors").read_bytes()
    assert file == typed_identities(sorted(seen))
    assert metadata["identities"] == file[-32:].hex()


def range_of_lines(lines: list[bytes], start: int, stop: int) -> list[bytes]:
    return b"".join(line + b"\n" for line in lines)[int(start) : int(stop)].split(b"\n")[:-1]


def typed_identities(names: list[bytes]) -> bytes:
    """Three identities, each as two numbers: all the upper halves, then all the lower ones."""
    assert len(names) == 3
    header = (
        rb'{"__metadata__":{"forebay":"{\"format_version\":2,\"number\":0,\"type\":\"identities\"}"},'
        rb'"high":{"dtype":"U64","shape":[3],"data_offsets":[0,24]},'
        rb'"low":{"dtype":"U64","shape":[3],"data_offsets":[24,48]},'
        rb'".digest":{"dtype":"U8","shape":[32],"data_offsets":[48,80]}}'
    )
    halves = [name[:8][::-1] for name in names] + [name[8:][::-1] for name in names]
    content = bytes.fromhex("f80f000000000000") + header.ljust(4088) + b"".join(halves)
    return content + hashlib.sha256(content).digest()
