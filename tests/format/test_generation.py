"""Generations: a table of published chunks that opens from one file."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import joined, small_chunk

from forebay.columns import Column
from forebay.errors import IndexCorrupt, KeyRefused, RecipeInvalid
from forebay.format.chunk import ChunkRecord
from forebay.format.documents import CacheDocument
from forebay.format.generation import ChunkTable, Generation, decode_generation
from forebay.recipe import RecipeDocument

CACHE = msgspec.json.encode(CacheDocument(cache_id="c" * 32, base="tokens")).decode()


def record(chunk: int, **facts: object) -> ChunkRecord:
    given_facts = {
        "chunk": chunk, "rows": chunk * 10, "samples": chunk * 11, "failures": chunk, "size": 5000 + chunk,
        "head_size": 4096, "head": bytes([chunk % 256]) * 16, "sha256": bytes([chunk % 256]) * 32,
        "content": b"c" * 16, "ids": b"i" * 16, "base": bytes(16), "statistics": {"tokens": chunk * 7},
    }  # fmt: skip
    return ChunkRecord(**{**given_facts, **facts})  # type: ignore[arg-type]


def recipe_text(layer: str) -> str:
    column = Column(name="x", dtype="uint8")
    kept = RecipeDocument(
        format_version=1, layer=layer, kind="k", revision=1, fingerprint="f" * 64, fields={}, dependencies={},
        reads=(), sample_ids="", columns=(column,),
    )  # fmt: skip
    return msgspec.json.encode(kept).decode()


def generation(**facts: object) -> Generation:
    given_facts = {
        "number": 3,
        "cache": CACHE,
        "recipes": {"tokens": recipe_text("tokens"), "lune": recipe_text("lune")},
        "constants": {"tokens": "0" * 64},
        "plan": ("1" * 64, "2" * 64),
        "versions": ({"zstd": "1.5.7"},),
        "layers": {"tokens": ChunkTable.of([record(0), record(2)]), "lune": ChunkTable.of([])},
    }
    return Generation(**{**given_facts, **facts})  # type: ignore[arg-type]


def read_back(one: Generation, key: bytes | None = None) -> Generation:
    return decode_generation(memoryview(b"".join(one.encode(key))), "root", "generations/000003.safetensors", key)


def test_a_generation_comes_back():
    again = read_back(generation())
    assert again.metadata() == generation().metadata()
    assert again.table("tokens").records() == [record(0), record(2)]
    assert again.table("lune").records() == again.table("no such layer").records() == []
    assert (again.base, again.document.cache_id, again.tagged) == ("tokens", "c" * 32, False)
    assert again.same_content(generation(number=9))


@given(st.lists(st.integers(0, 2**40), unique=True, max_size=8))
def test_chunks_are_listed_in_order_and_found_by_number(chunks):
    table = read_back(generation(layers={"tokens": ChunkTable.of(map(record, chunks))})).table("tokens")
    assert table.chunks.tolist() == sorted(chunks)
    assert table.rows.tolist() == [chunk * 10 for chunk in sorted(chunks)]
    for chunk in chunks:
        position = table.position(chunk)
        assert position is not None
        assert table.record(position) == record(chunk)
    assert table.position(2**41) is None


def test_the_record_of_a_real_chunk_comes_back():
    encoded = small_chunk("zstd")
    one = encoded.record(encoded.sha256())
    again = read_back(generation(layers={"lune": ChunkTable.of([one])})).table("lune").record(0)
    assert again == one
    assert again.size == len(joined(encoded))


def test_a_later_record_takes_the_place_of_an_older_one():
    table = ChunkTable.of([record(0), record(1)]).with_records([record(1, revision=1, size=9), record(5)])
    assert [(one.chunk, one.revision, one.size) for one in table.records()] == [(0, 0, 5000), (1, 1, 9), (5, 0, 5005)]


def test_statistics_are_summed_and_a_chunk_without_one_counts_as_zero():
    table = ChunkTable.of(
        [
            record(0, statistics={"tokens": 5, "histogram": [1, 2]}),
            record(1, statistics={"histogram": [10, 20], "loss": 0.5}),
        ]
    )
    again = read_back(generation(layers={"tokens": table})).table("tokens")
    assert again.totals() == {"tokens": 5, "histogram": [11, 22], "loss": 0.5}
    assert again.record(1).statistics == {"tokens": 0, "histogram": [10, 20], "loss": 0.5}


@pytest.mark.parametrize("other", [[1, 2, 3], 4])
def test_a_statistic_that_changes_its_shape_is_the_recipes_mistake(other):
    with pytest.raises(RecipeInvalid, match="'histogram'"):
        ChunkTable.of([record(0, statistics={"histogram": [1, 2]}), record(1, statistics={"histogram": other})])


@pytest.mark.parametrize(
    "other",
    [
        {"plan": ("1" * 64,)},
        {"recipes": {"tokens": recipe_text("tokens"), "lune": recipe_text("lune").replace('"k"', '"l"')}},
        {"constants": {}},
        {"versions": ()},
        {"cache": CACHE.replace("c" * 32, "d" * 32)},
        {"layers": {"tokens": ChunkTable.of([record(0), record(2)])}},
        {"layers": {"tokens": ChunkTable.of([record(0), record(2, revision=1)]), "lune": ChunkTable.of([])}},
        {"layers": {"tokens": ChunkTable.of([record(0), record(2, sha256=b"!" * 32)]), "lune": ChunkTable.of([])}},
        {"layers": {"tokens": ChunkTable.of([record(0), record(3)]), "lune": ChunkTable.of([])}},
    ],
)
def test_whatever_is_published_makes_another_content(other):
    assert not generation().same_content(generation(**other))
    assert b"".join(generation().encode(None)) != b"".join(generation(**other).encode(None))


def test_a_generation_made_with_a_key_needs_it():
    tagged = b"".join(generation().encode(b"key"))
    assert read_back(generation(), b"key").tagged
    for content, key in ((tagged, None), (tagged, b"wrong"), (b"".join(generation().encode(None)), b"key")):
        with pytest.raises(KeyRefused):
            decode_generation(memoryview(content), "root", "generations/000003.safetensors", key)


def test_a_chunk_in_place_of_a_generation_is_refused():
    with pytest.raises(IndexCorrupt):
        decode_generation(memoryview(joined(small_chunk("none"))), "root", "generations/000000.safetensors", None)


def test_the_facts_of_many_chunks_are_views_of_the_file():
    content = memoryview(b"".join(generation(layers={"tokens": ChunkTable.of(map(record, range(1000)))}).encode(None)))
    table = decode_generation(content, "root", "g", None).table("tokens")
    whole = np.frombuffer(content, np.uint8)
    facts = [*table.numbers.values(), *table.digests.values(), *table.statistics.values()]
    assert all(np.shares_memory(values, whole) for values in facts)
