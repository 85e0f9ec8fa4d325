"""Generations: a table of published chunks that opens from one file."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.columns import Array, Column
from forebay.errors import FormatTooNew, IndexCorrupt, KeyRefused, RecipeInvalid
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import (
    ChunkTable,
    Generation,
    decode_generation,
)
from forebay.format.layout import CacheDocument
from forebay.format.tensors import seal, unseal
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
        format_version=2, layer=layer, kind="k", revision=1, fingerprint="f" * 64, fields={}, dependencies={},
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


def test_a_later_record_takes_the_place_of_an_older_one():
    table = ChunkTable.of([record(0), record(1)]).with_records([record(1, size=9), record(5)])
    assert [(one.chunk, one.size) for one in table.records()] == [(0, 5000), (1, 9), (5, 5005)]


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


def test_a_sum_beyond_64_bits_is_a_float_and_those_beside_it_stay_integers():
    values = [2**53 + 1] * 1023 + [2**53 - 1023]  # as floats they add up to less than 2 ** 63, which is their sum
    table = ChunkTable.of(
        [record(number, statistics={"large": value, "some": [number, value]}) for number, value in enumerate(values)]
    )
    totals = table.totals()
    assert totals["large"] == pytest.approx(2**63)
    assert totals["some"] == [1024 * 1023 // 2, pytest.approx(2**63)]
    assert isinstance(totals["some"][0], int)


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
        {"withdrawn": (0,)},
        {"max_failures": {"tokens": 3}},
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


def test_the_facts_of_many_chunks_are_views_of_the_file():
    content = memoryview(b"".join(generation(layers={"tokens": ChunkTable.of(map(record, range(1000)))}).encode(None)))
    table = decode_generation(content, "root", "g", None).table("tokens")
    whole = np.frombuffer(content, np.uint8)
    facts = [*table.numbers.values(), *table.digests.values(), *table.statistics.values()]
    assert all(np.shares_memory(values, whole) for values in facts)


def forged(change: Callable[[dict[str, Any], dict[str, Array]], None]) -> bytes:
    """A generation that a stranger wrote: something is changed, and the digest is right."""
    metadata, tensors = unseal(memoryview(b"".join(generation().encode(None))), "root", "g", "generation")
    metadata, tensors = dict(metadata), {name: np.array(array) for name, array in tensors.items()}
    change(metadata, tensors)
    return b"".join(seal(metadata, tensors))


def refused(change: Callable[[dict[str, Any], dict[str, Array]], None]) -> str:
    with pytest.raises(IndexCorrupt) as raised:
        decode_generation(memoryview(forged(change)), "root", "g", None)
    assert "\n" not in raised.value.message
    return raised.value.facts["problem"]


@pytest.mark.parametrize("name", ["../../outside", "a/b", "", "..", "/etc", "a\0b", "a.b", "\ud800", "x" * 200])
@pytest.mark.parametrize("field", ["recipes", "constants", "layers"])
def test_a_layer_name_that_leads_elsewhere_is_refused(field, name):
    def change(metadata, tensors):
        metadata[field] = [*metadata[field], name] if field == "layers" else {**metadata[field], name: "0" * 64}

    assert refused(change).startswith("it is malformed")


@pytest.mark.parametrize("name", ["../../outside", "a/b", "..", "a.b", "-a", "x" * 200])
def test_a_layer_whose_name_leads_elsewhere_is_refused_although_all_else_of_it_is_right(name):
    named = generation()
    layers = {**named.layers, name: named.layers["lune"]}
    with pytest.raises(RecipeInvalid, match="is not published"):
        read_back(generation(recipes={**named.recipes, name: recipe_text(name)}, layers=layers))
    with pytest.raises(RecipeInvalid, match="is not published, because it is malformed"):
        read_back(generation(recipes={**named.recipes, name: recipe_text(name)}))
    changed = {**named.recipes, name: recipe_text(name)}
    assert refused(lambda metadata, tensors: metadata.update({"recipes": changed})).startswith("it is malformed")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", -1), ("number", True), ("number", 1.5), ("number", "3"), ("number", 10**20), ("cache", 5),
        ("cache", "{}"), ("cache", "[" * 100_000), ("cache", '{"format_version":1,"cache_id":"c","base":"../x"}'),
        ("cache", '{"format_version":1,"cache_id":"a b","base":"tokens"}'), ("recipes", []), ("recipes", {}),
        ("recipes", {"tokens": "{}"}), ("recipes", {"tokens": recipe_text("lune")}), ("recipes", -(2**63)),
        ("constants", {"tokens": "zz"}), ("plan", ["x"]), ("plan", {}), ("versions", [1]), ("versions", 3),
        ("layers", ["tokens", "nothing"]), ("layers", "tokens"),
    ],
)  # fmt: skip
def test_metadata_of_another_type_or_value_is_refused(field, value):
    assert refused(lambda metadata, tensors: metadata.update({field: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk", [-5, 2]), ("chunk", [2, 2]), ("chunk", [0, 10**15]),
        ("rows", [0, -1]), ("rows", [2**61, 2**61]), ("rows", [[0], [1]]), ("rows", [0.0, 1.0]), ("rows", [0]),
        ("size", [0, 2**62]), ("head_size", [4096, 10**6]), ("failures", [-1, 0]), ("samples", [0, -1]),
        ("sha256", [[1] * 32, [2] * 32]), ("statistics.tokens", [1]), ("statistics.tokens", [[[1]], [[1]]]),
    ],
)  # fmt: skip
def test_facts_of_another_type_shape_or_range_are_refused(name, value):
    assert refused(lambda metadata, tensors: tensors.update({f"tokens.{name}": np.array(value)}))


def test_layers_that_read_each_other_are_refused():
    def change(metadata, tensors):
        for layer, other in (("tokens", "lune"), ("lune", "tokens")):
            kept = {**msgspec.json.decode(metadata["recipes"][layer]), "dependencies": {f"layer {other}": "f"}}
            metadata["recipes"] = {**metadata["recipes"], layer: msgspec.json.encode(kept).decode()}

    assert "the layers lune, tokens read each other" in refused(change)


def test_a_document_of_a_newer_forebay_says_so():
    def change(metadata, tensors):
        metadata["cache"] = metadata["cache"].replace('"format_version":2', '"format_version":3')

    with pytest.raises(FormatTooNew):
        decode_generation(memoryview(forged(change)), "root", "g", None)
