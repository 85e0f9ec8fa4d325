"""A chat cache in rows of another length, packed when it is read: the rows that a build of that length has."""

import dataclasses
import json
import pickle
import random
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat.stock_templates import CHATML, HARMONY, Stock
from tests.chat.test_chat_builds import documents, model, write_chats

import forebay as fb
from forebay.building.chunk_maker import ChunkSamples
from forebay.chat import PackedView, packed_view, repack, write_sft
from forebay.chat.packed_view import Windows
from forebay.columns import Column
from forebay.errors import ChunkCorrupt, DocumentTooLong, IndexCorrupt, SourceInvalid, StateMismatch
from forebay.preview.peek import PieceNames
from forebay.recipe import ChunkTarget
from forebay.source import Part
from forebay.torch import Ingredient, Loader, Mixture, PackedSelfAttention, Split, Window, document_leaks

Long = Literal["error", "drop", "truncate"]


@pytest.fixture(scope="module", params=[CHATML, HARMONY], ids=lambda stock: stock.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of several chunks, and the same in one; the second template makes several documents of some chats."""
    stock: Stock = request.param
    made = tmp_path_factory.mktemp("view")
    tokenizer, chats = model(made / "model", stock), fb.sources.lines(write_chats(made / "chats.jsonl", 90))
    for name, size in (("cache", 4), ("whole", 1000)):
        recipe = fb.ChatRecipe(tokenizer=tokenizer, sequence_length=512, chunk_size=size)
        fb.build(made / name, chats, recipe, workers=0)
    return made


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert list(one) == list(other)
    for name, column in one.items():
        pairs = [
            (each.values, each.offsets) if isinstance(each, fb.Ragged) else (each,) for each in (column, other[name])
        ]
        for mine, theirs in zip(*pairs, strict=True):
            np.testing.assert_array_equal(mine, theirs, name)
        assert pairs[0][0].dtype == pairs[1][0].dtype


def packed_again(root: Path, chunks: Sequence[int], **fields: Any) -> fb.Rows:
    """What a build makes of some chunks of a cache."""
    source, recipe = repack(root, **fields)
    files = source.files()
    return recipe.make(ChunkSamples(source, [Part(files[at], 0, source.weight(files[at])) for at in chunks]))


@pytest.mark.parametrize("length", [512, 700, 2048])
def test_the_rows_are_those_of_a_build_from_the_conversations(folder: Path, length: int, tmp_path: Path) -> None:
    direct = fb.ChatRecipe(tokenizer=str(folder / "model"), sequence_length=length)
    fb.build(tmp_path / "direct", fb.sources.lines(folder / "chats.jsonl"), direct, workers=0)
    (built,) = fb.open_cache(tmp_path / "direct").chunks()
    view = packed_view(fb.open_cache(folder / "whole"), sequence_length=length)
    same(view.chunk(0), built)
    assert len(view) == len(built["tokens"]) > 2
    assert view.column("tokens").shape == (length,)
    assert (view.documents_cut, view.documents_dropped) == (0, 0)


@pytest.mark.parametrize("long", ["drop", "truncate"])
def test_conversations_that_do_not_fit_are_treated_as_in_a_build(folder: Path, long: Long) -> None:
    cache = fb.open_cache(folder / "cache")
    view = packed_view(cache, sequence_length=110, long=long)
    cut = dropped = 0
    for position, rows in enumerate(view.chunks()):
        made = packed_again(folder / "cache", [position], sequence_length=110, long=long)
        same(rows, made.columns)
        cut += made.statistics["documents_cut"]
        dropped += made.statistics["documents_dropped"]
    assert (view.documents_cut, view.documents_dropped) == (cut, dropped)
    assert cut + dropped
    with pytest.raises(DocumentTooLong, match=r"safetensors#\d+' has \d+ tokens but a row holds 110"):
        packed_view(cache, sequence_length=110)


def test_a_conversation_that_does_not_fit_is_named_by_its_own_chunk_in_every_window(folder: Path) -> None:
    cache = fb.open_cache(folder / "cache")
    lengths = [int(chunk["seq_lens"].values.max()) for chunk in cache.chunks(["seq_lens"])]  # type: ignore[union-attr]
    longest = int(np.argmax(lengths))
    assert longest > 0, "not of the first chunk, whose samples have the same numbers in a window"
    named = []
    for chunks in (1, 100):
        with pytest.raises(DocumentTooLong) as error:
            packed_view(cache, sequence_length=max(lengths) - 1, chunks=chunks)
        named.append(error.value.document)
    assert named[0] == named[1]
    assert named[0].startswith(f"layers/chat/{longest:06}.safetensors#")


@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1, 1500),
    long=st.sampled_from(["drop", "truncate"]),
    chunks=st.integers(1, 12),
    seed=st.integers(0, 1 << 30),
)
def test_any_length_and_window_give_the_rows_of_a_build_in_any_order(
    folder: Path, length: int, long: Long, chunks: int, seed: int
) -> None:
    cache = fb.open_cache(folder / "cache")
    view = packed_view(cache, sequence_length=length, long=long, chunks=chunks)
    positions = range(len(cache.chunk_numbers))
    windows = [positions[at : at + chunks] for at in range(0, len(positions), chunks)]
    made = [
        packed_again(folder / "cache", window, sequence_length=length, long=long, deduplicate=False).columns
        for window in windows
    ]
    assert view.chunk_numbers.tolist() == [window[0] for window in windows]
    assert np.diff(view.chunk_starts).tolist() == [len(each["tokens"]) for each in made]
    for chunk, rows in enumerate(made):
        same(view.chunk(chunk), rows)
    chosen = [random.Random(seed).randrange(len(view)) for _ in range(20)] if len(view) else []
    read = view.read(chosen)
    for at, row in enumerate(chosen):
        chunk = int(np.searchsorted(view.chunk_starts, row, side="right")) - 1
        inside = row - int(view.chunk_starts[chunk])
        for name, values in made[chunk].items():
            np.testing.assert_array_equal(read[name][at], values[inside])
            np.testing.assert_array_equal(view[row][name], values[inside])


def test_no_row_is_an_empty_batch(folder: Path) -> None:
    view = packed_view(fb.open_cache(folder / "cache"), sequence_length=700)
    read = view.read([])
    assert read["tokens"].shape == (0, 700)
    assert len(read["spans"]) == len(read["last_turn"]) == 0
    with pytest.raises(IndexError):
        view.read([len(view)])


@pytest.mark.parametrize("train_on", [("response", "stop"), {"response": 1.0, "header": 0.5}])
def test_batches_are_those_of_a_cache_that_was_built_so(folder: Path, train_on: Any, tmp_path: Path) -> None:
    source, recipe = repack(folder / "whole", sequence_length=700, chunk_size=1000)
    fb.build(tmp_path / "again", source, recipe, workers=0)
    view = packed_view(fb.open_cache(folder / "whole"), sequence_length=700)
    usual: dict[str, Any] = {"global_batch_size": 4, "seed": 3, "train_on": train_on}
    window = packed_view(fb.open_cache(folder / "cache"), sequence_length=700, chunks=1000)  # all chunks
    unit = {"shuffle": "window", "window": Window(rows=8, unit=2), "threads": 1}
    for options in ({"shuffle": None}, {"shuffle": "global", "threads": 2}, unit):
        built = list(Loader(fb.open_cache(tmp_path / "again"), **usual, **options))
        assert len(built) > 2
        for each in (view, window):
            for one, other in zip(Loader(each, **usual, **options), built, strict=True):
                assert one.keys() == other.keys()
                for name in one:
                    assert torch.equal(one[name], other[name]), name


def test_a_loader_resumes_at_the_same_row_and_knows_another_packing(folder: Path) -> None:
    cache = fb.open_cache(folder / "cache")
    packings: list[dict[str, Any]] = [
        *({"sequence_length": length} for length in (700, 701, 1400)),
        *({"sequence_length": 700, "chunks": chunks} for chunks in (2, 3, 100)),
    ]
    for packing in (packings[0], packings[4]):
        loader = Loader(packed_view(cache, **packing), global_batch_size=2, seed=1)
        first = iter(loader)
        for _ in range(3):
            next(first)
        state = json.loads(json.dumps(loader.state_dict()))
        again = Loader(packed_view(fb.open_cache(folder / "cache"), **packing), global_batch_size=2, seed=1)
        again.load_state_dict(state)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one["tokens"], other["tokens"])
        others = [packed_view(cache, **other) for other in packings if other is not packing]
        for other_rows in (cache, *others):
            with pytest.raises(StateMismatch):
                Loader(other_rows, global_batch_size=2, seed=1).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:the .* side of")  # few chunks
@pytest.mark.parametrize("chunks", [1, 2])
def test_shuffles_by_window_and_splits_take_every_row_once(folder: Path, chunks: int) -> None:
    view = packed_view(fb.open_cache(folder / "cache"), sequence_length=700, chunks=chunks)
    window = Loader(view, global_batch_size=1, shuffle="window", window=Window(rows=8, unit=2), identify=["row"])
    assert sorted(int(batch["row"][0]) for batch in window) == list(range(len(view)))
    halves = [
        Loader(view, global_batch_size=1, selection=Split(side, 0.3, by="chunk", chunks=chunks), identify=["row"])
        for side in ("train", "validation")
    ]
    assert sorted(int(batch["row"][0]) for half in halves for batch in half) == list(range(len(view)))


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_window_shuffle_decodes_every_block_once(folder: Path, chunks: int) -> None:
    """All rows of a window are mixed before those of the next, so few chunks must stay decoded."""
    whole = fb.open_cache(folder / "cache")
    decoded = [sum(values.nbytes for values in chunk.values()) for chunk in whole.chunks()]
    cache = fb.open_cache(folder / "cache", memory=3 * chunks * max(decoded))
    assert len(decoded) > 5
    view = packed_view(cache, sequence_length=700, chunks=chunks)
    unit = view.column("tokens").block_rows
    window = Window(rows=unit, unit=unit, chunks=1, lanes=1)
    before = cache.statistics().misses
    loader = Loader(view, global_batch_size=2, shuffle="window", window=window, drop_last=False, threads=0)
    assert sum(len(batch["tokens"]) for batch in loader) >= len(view)
    blocks = sum(-(-int(rows) // whole.column("tokens").block_rows) for rows in np.diff(whole.chunk_starts))
    assert cache.statistics().misses - before == 3 * blocks  # of tokens, spans and last turns


def test_conversations_of_a_row_do_not_see_each_other(folder: Path) -> None:
    view = packed_view(fb.open_cache(folder / "cache"), sequence_length=700)
    batch = next(iter(Loader(view, global_batch_size=2, shuffle=None)))
    assert int((batch["seq_lens"][0] > 0).sum()) > 1
    torch.manual_seed(0)
    embedding, attention = torch.nn.Embedding(1000, 16), PackedSelfAttention(16, 2, backend="dense")

    def run(tokens: torch.Tensor) -> torch.Tensor:
        return attention(embedding(tokens), batch["seq_lens"])

    assert document_leaks(run, batch["tokens"], batch["seq_lens"]) == []


@pytest.mark.parametrize("chunks", [1, 3])
def test_other_processes_and_threads_read_the_same_rows(folder: Path, chunks: int) -> None:
    view = packed_view(fb.open_cache(folder / "cache"), sequence_length=700, chunks=chunks)
    again = pickle.loads(pickle.dumps(view))
    assert isinstance(again, PackedView)
    assert again.content_digest == view.content_digest != view.stored.content_digest
    whole = view.read(np.arange(len(view)))
    same(again.read(np.arange(len(view))), whole)
    orders = [random.Random(seed).sample(range(len(view)), len(view)) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for order, read in zip(orders, pool.map(view.read, orders), strict=True):
            np.testing.assert_array_equal(read["tokens"], whole["tokens"][order])
            for at, row in enumerate(order):
                np.testing.assert_array_equal(read["spans"][at], whole["spans"][row])


@pytest.mark.parametrize("chunks", [1, 3])
def test_little_memory_packs_chunks_again_and_reads_the_same_rows(folder: Path, chunks: int) -> None:
    view = packed_view(fb.open_cache(folder / "cache"), sequence_length=700, chunks=chunks)
    with pytest.warns(UserWarning, match="packed again for every batch; open the cache with memory="):
        poor = packed_view(fb.open_cache(folder / "cache", memory=0), sequence_length=700, chunks=chunks)
    rows = np.arange(len(view))[::-1]
    same(poor.read(rows), view.read(rows))
    assert poor._tables.statistics().bytes == 0
    enough = fb.open_cache(folder / "cache", memory=4 * poor.largest_table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = packed_view(enough, sequence_length=700, chunks=chunks)
    assert kept._tables.statistics().blocks


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_cache_that_grew_is_packed_with_what_is_new(chunks: int, tmp_path: Path) -> None:
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=4)
    fb.build(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "a.jsonl", 40)), recipe, workers=0)
    before = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=700, chunks=chunks)
    grown: list[Any] = []
    usual: dict[str, Any] = {"global_batch_size": 1, "seed": 1, "on_growth": grown.append, "identify": ["row_id"]}
    loaders = [Loader(before, growth=growth, **usual) for growth in ("pinned", "epoch")]
    fb.grow(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "b.jsonl", 20)), workers=0)
    after = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=700, chunks=chunks)
    assert documents(before.at_generation(after.generation.number)) == documents(after)
    assert len(after) > len(before)
    for loader, then in zip(loaders, (before, after), strict=True):
        assert [sum(1 for _ in loader) for _ in range(2)] == [len(before), len(then)]
    assert [(each.old_rows, each.new_rows) for each in grown] == [(len(before), len(after))]


def conversations(cache: fb.Cache, rows: Iterable[int]) -> set[bytes]:
    read = cache.read(list(rows), ["tokens", "seq_lens"])
    return {
        np.asarray(part).tobytes()
        for tokens, lengths in zip(read["tokens"], read["seq_lens"], strict=True)
        for part in np.split(tokens, np.cumsum(lengths))[:-1]
    }


def side(cache: fb.Cache, name: Literal["train", "validation"], chunks: int = 1) -> set[bytes]:
    found = Split(name, 0.6, by="chunk", chunks=chunks).select(cache)
    return conversations(cache, found.rows(np.arange(len(found))).tolist())


@pytest.mark.filterwarnings("ignore:the .* side of")  # few chunks
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_cache_and_its_views_are_split_alike_however_far_it_grows(chunks: int, tmp_path: Path) -> None:
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=3)
    fb.build(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "a.jsonl", 80)), recipe, workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    assert len(cache.chunk_numbers) % 2, "the last window must be one that could get another chunk"
    view = packed_view(cache, sequence_length=1024, chunks=chunks)
    trained, validated = side(view, "train", chunks), side(view, "validation", chunks)
    assert trained
    assert validated
    assert not trained & validated
    for same_rows in (cache, *(packed_view(cache, sequence_length=600, chunks=each) for each in (1, chunks))):
        assert (side(same_rows, "train", chunks), side(same_rows, "validation", chunks)) == (trained, validated)
    named = {name: conversations(view, [row]) for row, name in enumerate(view.row_ids(range(len(view))))}
    fb.grow(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "b.jsonl", 40)), workers=0)
    grown = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=1024, chunks=chunks)
    assert len(grown) > len(view)
    assert trained <= side(grown, "train", chunks)
    assert validated <= side(grown, "validation", chunks)
    again = {name: conversations(grown, [row]) for row, name in enumerate(grown.row_ids(range(len(grown))))}
    assert named.items() <= again.items()


def test_a_split_that_would_cut_a_window_is_refused(folder: Path) -> None:
    view = packed_view(fb.open_cache(folder / "cache"), sequence_length=700, chunks=2)
    for chunks in (1, 3):
        with pytest.raises(ValueError, match=r"use Split\(…, by='chunk', chunks=2\), or a multiple of it, on both"):
            Split("train", 0.5, by="chunk", chunks=chunks).select(view)
    with pytest.raises(ValueError, match="chunks=2 needs by='chunk'"):
        Split("train", chunks=2)
    with pytest.raises(ValueError, match="chunks must be from 1 to"):
        Split("train", by="chunk", chunks=0)
    digests = {Split("train", by="chunk", chunks=chunks).digest for chunks in (1, 2, 4)}
    assert len(digests) == 3
    assert "train of 0.8, seed 0, by chunk" in digests, "states that were saved before name it so"


def test_a_window_waits_for_all_its_chunks_and_then_stays(tmp_path: Path) -> None:
    source = fb.sources.lines(write_chats(tmp_path / "a.jsonl", 90))
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=4)
    fb.build(tmp_path / "cache", source, recipe, workers=0, end_chunk=3)
    with pytest.warns(UserWarning, match="1 of 4 chunks of .* are left out until all of the 3 that are packed"):
        early = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=700, chunks=3)
    assert (early.chunks_left_out, early.chunk_numbers.tolist()) == (1, [0])
    assert pickle.loads(pickle.dumps(early)).chunks_left_out == 1, "and the other process does not warn again"
    loader = Loader(early, global_batch_size=1, seed=1, growth="within", identify=["row_id"])
    batches = iter(loader)
    seen = [tuple(next(batches)["row_id"][0].tolist())]
    state = json.loads(json.dumps(loader.state_dict()))
    fb.build(tmp_path / "cache", source, recipe, workers=0)
    whole = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=700, chunks=3)
    assert whole.chunks_left_out == 0
    same(whole.chunk(0), early.chunk(0))
    again = Loader(whole, global_batch_size=1, seed=1, growth="within", identify=["row_id"])
    again.load_state_dict(state)
    for rest in (batches, iter(again)):
        added = [tuple(batch["row_id"][0].tolist()) for batch in rest]
        assert sorted(seen + added) == [(name.chunk, name.row) for name in whole.row_ids(range(len(whole)))]


def test_a_state_is_of_the_windows_that_its_cache_had(tmp_path: Path) -> None:
    """The same chunks, planned at once or one part after the other, have other windows."""
    write_chats(tmp_path / "chats.jsonl", 60)
    lines = (tmp_path / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:32]))
    (tmp_path / "b.jsonl").write_text("".join(lines[32:]))
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=4)
    both = fb.sources.lines(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    fb.build(tmp_path / "once", both, recipe, workers=0)
    fb.build(tmp_path / "grown", fb.sources.lines(tmp_path / "a.jsonl"), recipe, workers=0)
    fb.grow(tmp_path / "grown", fb.sources.lines(tmp_path / "b.jsonl"), workers=0)
    caches = [fb.open_cache(tmp_path / name) for name in ("once", "grown")]
    views = [packed_view(cache, sequence_length=700, chunks=100) for cache in caches]
    assert [len(view.chunk_numbers) for view in views] == [1, 2]
    assert views[0].content_digest != views[1].content_digest
    cuts = [[(0, 4)], [(0, 2), (2, 4)], [(0, 1), (1, 4)], [(0, 2)], [(0, 3)]]  # of the same chunks; others wait
    windows = [
        Windows(*(np.array(column) for column in ([a for a, _ in cut], *zip(*cut, strict=True)))) for cut in cuts
    ]
    digests = {PackedView(caches[0], views[0].packing, each).content_digest for each in windows}
    assert len(digests) == len(cuts)
    states = [Loader(view, global_batch_size=1, seed=1).state_dict() for view in views]
    for state, view in zip(states, reversed(views), strict=True):
        with pytest.raises(StateMismatch):
            Loader(view, global_batch_size=1, seed=1).load_state_dict(state)


def test_a_window_whose_chunk_was_replaced_is_noticed(tmp_path: Path) -> None:
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=4)
    path = write_chats(tmp_path / "a.jsonl", 60)
    fb.build(tmp_path / "cache", fb.sources.lines(path), recipe, workers=0)
    view = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=700, chunks=2)
    loader = Loader(view, global_batch_size=1, seed=1)
    next(iter(loader))
    state = loader.state_dict()
    path.write_text(path.read_text().replace("text 59 ", "word 59 "))
    fb.refresh(tmp_path / "cache", source=fb.sources.lines(path), workers=0)
    fresh = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=700, chunks=2)
    last = int(view.chunk_numbers[-1])
    with pytest.warns(UserWarning, match=f"chunk {last} of .* was replaced"):
        Loader(fresh, global_batch_size=1, seed=1).load_state_dict(state)


def test_a_plan_that_is_not_that_of_the_generation_is_named(folder: Path, tmp_path: Path) -> None:
    fb.copy(folder / "cache", tmp_path / "copy")
    cache = fb.open_cache(tmp_path / "copy")
    (plan,) = (tmp_path / "copy" / "plan").glob("*.safetensors")
    other = next((folder / "whole" / "plan").glob("*.safetensors"))
    plan.write_bytes(other.read_bytes())
    with pytest.raises(IndexCorrupt, match="it is not the one this generation was published with"):
        packed_view(cache, sequence_length=700, chunks=2)
    assert len(packed_view(cache, sequence_length=700)) > 2, "no window needs the plan"
    plan.unlink()
    with pytest.raises(IndexCorrupt, match="it is not the one this generation was published with"):
        packed_view(fb.open_cache(tmp_path / "copy"), sequence_length=700, chunks=2)


def test_a_chunk_that_no_plan_has_is_refused(tmp_path: Path) -> None:
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=4)
    fb.build(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "a.jsonl", 40)), recipe, workers=0)
    fb.grow(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "b.jsonl", 20)), workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    cache.generation = dataclasses.replace(cache.generation, plan=cache.generation.plan[:1])
    with pytest.raises(IndexCorrupt, match="it lists a chunk without a plan"):
        packed_view(cache, sequence_length=700, chunks=2)


def test_samples_of_a_window_beyond_what_a_column_counts_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = fb.open_cache(folder / "cache")
    most = max(int(chunk["documents"].values[:, 0].max()) for chunk in cache.chunks(["documents"]))  # type: ignore[union-attr]
    monkeypatch.setattr(sys.modules[PackedView.__module__], "MOST_NUMBER", most + 1)
    assert len(packed_view(cache, sequence_length=700)) > 2
    with pytest.raises(ChunkCorrupt, match="its window has a sample number above"):
        packed_view(cache, sequence_length=700, chunks=2)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_bytes_of_a_row_are_estimated_from_the_rows_of_the_view(chunks: int, tmp_path: Path) -> None:
    """Half of the chunks wait for others, and count for nothing."""
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=3)
    source = fb.sources.lines(write_chats(tmp_path / "a.jsonl", 90))
    fb.build(tmp_path / "cache", source, recipe, workers=0, end_chunk=2)
    cache = fb.open_cache(tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        view = packed_view(cache, sequence_length=1024, chunks=chunks)
    assert view.chunks_left_out == (1 if chunks == 2 else 0)
    spans = [chunk["spans"] for chunk in view.chunks(["spans"])]
    mean = sum(each.nbytes for each in spans) / len(view)
    assert abs(view.row_bytes(["spans"]) - mean) < mean / 3
    assert view.row_bytes(["tokens"]) == 2 * 1024


def test_a_verb_that_is_given_a_view_asks_for_the_root_of_its_cache(folder: Path) -> None:
    view: Any = packed_view(fb.open_cache(folder / "cache"), sequence_length=700)
    assert "text 0 1" in view.text(0)[0]
    with pytest.raises(TypeError, match="not PackedView; of an open cache, pass its root"):
        fb.verify(view)


@pytest.mark.parametrize("by", ["auto", "document", "sample"])
def test_a_view_is_split_by_chunk_only(folder: Path, by: Literal["auto", "document", "sample"]) -> None:
    view = packed_view(fb.open_cache(folder / "cache"), sequence_length=700, chunks=2)
    with pytest.raises(ValueError, match=f"by='{by}' would train on .*; use by='chunk' and chunks=2 on both"):
        Loader(view, global_batch_size=1, selection=Split("train", by=by))


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_state_of_an_epoch_and_a_mixture_go_on_where_the_cache_grew(chunks: int, tmp_path: Path) -> None:
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=4)
    fb.build(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "a.jsonl", 40)), recipe, workers=0)
    view = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=700, chunks=chunks)
    usual: dict[str, Any] = {"global_batch_size": 1, "identify": ["row"]}
    loader = Loader(view, seed=1, **usual)
    mixed = Loader(Mixture.of([Ingredient(view, weight=1.0)], seed=0), growth="epoch", **usual)
    first = iter(loader)
    next(first)
    assert sum(1 for _ in mixed) == len(view)
    state = json.loads(json.dumps(loader.state_dict()))
    fb.grow(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "b.jsonl", 20)), workers=0)
    grown = packed_view(fb.open_cache(tmp_path / "cache"), sequence_length=700, chunks=chunks)
    again = Loader(grown, seed=1, **usual)
    again.load_state_dict(state)
    rest = [int(batch["row"][0]) for batch in first]
    assert [int(batch["row"][0]) for batch in again] == rest
    epochs = 3  # each of as many rows as the cache had before
    assert {int(batch["row"][0]) for _ in range(epochs) for batch in mixed} == set(range(len(grown)))


@pytest.mark.parametrize("chunks", [1, 2, 100])
def test_documents_keep_their_numbers_and_names_behind_failed_ones(chunks: int, tmp_path: Path) -> None:
    lines = write_chats(tmp_path / "a.jsonl", 30).read_text().splitlines()
    lines[:3] = ['{"messages": 5}'] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    source = fb.sources.lines(tmp_path / "a.jsonl")
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=4)
    assert fb.build(tmp_path / "cache", source, recipe, workers=0).failures == 3
    cache = fb.open_cache(tmp_path / "cache")
    view = packed_view(cache, sequence_length=700, chunks=chunks)
    names = [
        {piece.text: piece.source for row in shown.shown for piece in row.pieces}
        for shown in (fb.peek(each, len(each), source=source) for each in (cache, view))
    ]
    assert names[0] == names[1]
    assert len(set(names[0].values())) == 27
    assert all(list(names[0].values()))
    numbers = view[0]["documents"][:, 0].tolist()
    known = PieceNames(view, source).of_row(0, numbers)
    assert PieceNames(view, source).of_row(0, numbers[:2]) == {number: known[number] for number in numbers[:2]}
    assert PieceNames(view, None).of_row(0, numbers) == {}
    for position, chunk in enumerate(view.chunks(["documents"])):
        numbers = chunk["documents"].values[:, 0].tolist()
        assert len(set(numbers)) == len(numbers), "of a window, no two have the same"
        assert min(numbers) == (0 if position else 3)


def test_documents_of_conversations_that_were_cut_keep_their_offsets(folder: Path, tmp_path: Path) -> None:
    recipe = fb.ChatRecipe(tokenizer=str(folder / "model"), sequence_length=70, long="truncate", chunk_size=4)
    fb.build(tmp_path / "cut", fb.sources.lines(folder / "chats.jsonl"), recipe, workers=0)
    cache = fb.open_cache(tmp_path / "cut")
    for stored, packed in zip(cache.chunks(), packed_view(cache, sequence_length=700).chunks(), strict=True):
        mine, theirs = (each["documents"] for each in (stored, packed))
        assert isinstance(mine, fb.Ragged)
        assert isinstance(theirs, fb.Ragged)
        assert sorted(mine.values.tolist()) == sorted(theirs.values.tolist())


def test_the_files_of_a_view_are_those_of_its_cache(folder: Path) -> None:
    cache = fb.open_cache(folder / "cache")
    chunks = np.arange(len(cache.chunk_numbers))
    digests, sizes = list(cache.file_digests(chunks, ["tokens"])), cache.chunk_bytes(["tokens"])
    assert len(set(digests)) == len(chunks) > 5
    for together in (1, 2, 3, 100):
        view = packed_view(cache, sequence_length=700, chunks=together)
        windows = [range(len(digests))[at : at + together] for at in chunks[::together].tolist()]
        assert list(view.file_digests(np.arange(len(windows)), ["tokens"])) == digests
        assert list(view.file_digests(np.array([0]), ["spans"])) == digests[: len(windows[0])]
        assert view.chunk_bytes(["tokens"]).tolist() == [int(sizes[window].sum()) for window in windows]
        found = view.content_digests("chat", view.chunk_numbers)
        assert found.shape == (len(windows), 16)
        assert len({each.tobytes() for each in found}) == len(windows)
        with pytest.raises(TypeError, match="has no files"):
            view.record("chat", 0)
        for row, name in enumerate(view.row_ids(range(len(view)))):
            window = windows[view.chunk_numbers.tolist().index(name.chunk)]
            stored = view.samples_of(row)
            assert {chunk for chunk, _ in stored} <= set(window)
            assert len(stored) == len(view[row]["seq_lens"])


def test_the_source_of_a_row_is_that_of_all_its_chunks(tmp_path: Path) -> None:
    for name in "abc":
        write_chats(tmp_path / f"{name}.jsonl", 12)
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_size=2)
    fb.build(tmp_path / "cache", fb.sources.lines(*(tmp_path / f"{name}.jsonl" for name in "abc")), recipe, workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    files = [{Path(file).name for file in cache.origin(row).files} for row in range(len(cache))]
    assert min(map(len, files)) == 1
    view = packed_view(cache, sequence_length=4000, chunks=100)
    assert {Path(file).name for file in view.origin(0).files} == {"a.jsonl", "b.jsonl", "c.jsonl"}
    assert view.origin(0).chunk == 0


def test_a_view_is_shown_written_and_traced_as_a_cache(folder: Path, tmp_path: Path) -> None:
    cache = fb.open_cache(folder / "cache")
    view = packed_view(cache, sequence_length=700)
    assert documents(view) == documents(cache)
    assert view.text(0)[0].strip()
    shown: Any = fb.peek(view, 2)
    assert shown.rows == len(view)
    assert shown.shown[0].pieces[0].spans
    assert {file.rsplit("/")[-1] for file in view.origin(len(view) - 1).files} == {"chats.jsonl"}
    assert write_sft(view, tmp_path / "view.parquet") == write_sft(cache, tmp_path / "cache.parquet")
    assert write_sft(view, tmp_path / "packed.parquet", packed=True) == len(view)
    assert view.recipe("chat").fields["sequence_length"] == 700
    assert view.recipe("chat").fingerprint != cache.recipe("chat").fingerprint


def test_a_keyed_cache_is_checked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fb.copy(folder / "cache", tmp_path / "copy")
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "11" * 32)
    fb.rekey(tmp_path / "copy")
    view = packed_view(fb.open_cache(tmp_path / "copy"), sequence_length=700)
    assert documents(view) == documents(packed_view(fb.open_cache(tmp_path / "copy"), sequence_length=512))


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9])
def test_a_damaged_chunk_is_named(folder: Path, at: float, tmp_path: Path) -> None:
    fb.copy(folder / "cache", tmp_path / "copy")
    path = tmp_path / "copy" / "layers" / "chat" / "000001.safetensors"
    content = bytearray(path.read_bytes())
    data = int.from_bytes(content[:8], "little") + 8
    content[data + int(at * (len(content) - data))] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChunkCorrupt, match="chunk 1 of layer 'chat'"):
        list(packed_view(fb.open_cache(tmp_path / "copy"), sequence_length=700).chunks())


def test_only_a_chat_cache_is_packed_again(folder: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": "Who?", "chosen": "I.", "rejected": "You."}] * 3
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    tokenizer = str(folder / "model")
    recipes: dict[str, Any] = {
        "preferences": fb.PreferenceRecipe(tokenizer=tokenizer, sequence_length=128),
        "tokens": fb.TokenRecipe(tokenizer=f"{tokenizer}/tokenizer.json", sequence_length=64, eos=None),
        "raw": fb.RawRecipe(),
    }
    for kind, recipe in recipes.items():
        fb.build(tmp_path / kind, fb.sources.lines(tmp_path / "pairs.jsonl"), recipe, workers=0)
        with pytest.raises(SourceInvalid, match=f"is a cache of {kind}; only one of chat can be packed again"):
            packed_view(fb.open_cache(tmp_path / kind), sequence_length=64)
    view = packed_view(fb.open_cache(folder / "cache"), sequence_length=700)
    with pytest.raises(SourceInvalid, match="pass the cache that it was made from"):
        packed_view(view, sequence_length=800)


@pytest.mark.parametrize(
    "arguments",
    [
        {"long": "split"},
        *(
            {name: count}
            for name in ("sequence_length", "chunks")
            for count in (0, -1, True, "8", 8.0, 1 << 40, 10**30)
        ),
        {"chunks": None},
    ],
)
def test_a_wrong_argument_is_named(folder: Path, arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=f"^{name} must be"):
        packed_view(fb.open_cache(folder / "cache"), **arguments)


def test_a_length_may_be_a_number_of_numpy(folder: Path) -> None:
    cache = fb.open_cache(folder / "cache")
    view = packed_view(cache, sequence_length=np.int64(700))
    assert view.content_digest == packed_view(cache, sequence_length=700).content_digest


class Forged(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe that says it is of chat, and makes two rows of two documents with something wrong in them."""

    kind: ClassVar[str] = "chat"
    revision: ClassVar[int] = 1

    change: str = ""
    sequence_length: int = 8
    long: str = "truncate"
    pad: int | str = 0

    def columns(self) -> tuple[Column, ...]:
        dtype: Any = "float32" if self.change == "dtype" else "uint16"
        return (
            Column(name="tokens", dtype=dtype, shape=(8,)),
            Column(name="seq_lens", dtype="uint32", ragged=True),
            Column(name="documents", dtype="uint32", shape=(2,), ragged=True),
            Column(name="spans", dtype="uint32", shape=(5,), ragged=True),
            Column(name="last_turn", dtype="uint32", ragged=True),
        )

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=10)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        list(samples)
        lengths = [[3, 2], [4, 4]]
        numbers = [[[0, 0], [1, 0]], [[2, 0], [3, 0]]]
        spans = [[[0, 3, 3, 6, 1], [3, 5, 3, 6, 1]], [[0, 4, 3, 6, 1], [4, 8, 3, 6, 1]]]
        last = [[1, 1], [1, 1]]
        match self.change:
            case "long":
                lengths[0] = [3, 4_000_000_000]
            case "sum":
                lengths[1] = [4, 5]
            case "wrap":
                lengths[1] = [4_294_967_295, 4_294_967_295]
            case "documents":
                numbers[0] = [[0, 0]]
            case "order":
                spans[0] = spans[0][::-1]
            case "stop":
                spans[1][0][1] = 4_294_967_295
            case "start":
                spans[0][1][0] = 4_294_967_295
            case "crossing":
                spans[1][0][1] = 5
            case "backwards":
                spans[1][1][1] = 3
            case "turns":
                last[1] = [1]
            case "before":
                lengths[0], numbers[0], last[0] = [], [], []
        ragged = fb.Ragged.of
        columns: dict[str, Any] = {
            "tokens": np.arange(16).reshape(2, 8).astype(self.columns()[0].array_dtype),
            "seq_lens": ragged([np.array(each, np.uint32) for each in lengths], np.dtype("u4")),
            "documents": ragged([np.array(each, np.uint32).reshape(-1, 2) for each in numbers], np.dtype("u4"), (2,)),
            "spans": ragged([np.array(each, np.uint32) for each in spans], np.dtype("u4"), (5,)),
            "last_turn": ragged([np.array(each, np.uint32) for each in last], np.dtype("u4")),
        }
        return fb.Rows(columns)


FORGED = {
    "long": "a row has documents of more than 8 tokens",
    "sum": "a row has documents of more than 8 tokens",
    "wrap": "a row has documents of more than 8 tokens",
    "documents": "its rows have not as many lengths as documents",
    "order": "its spans are not in the order of tokens",
    "start": "its spans are not in the order of tokens",
    "stop": "a span that crosses documents",
    "crossing": "a span that crosses documents",
    "backwards": "its spans are not in the order of tokens|a span that crosses documents",
    "turns": "fewer last turns than documents",
}


def forged(tmp_path: Path, **fields: Any) -> fb.Cache:
    (tmp_path / "one.txt").write_text("one\n")
    fb.build(tmp_path / "forged", fb.sources.lines(tmp_path / "one.txt"), Forged(**fields), workers=0)
    return fb.open_cache(tmp_path / "forged")


@pytest.mark.parametrize("length", [5, 16])
@pytest.mark.parametrize("change", ["", *FORGED])
def test_impossible_numbers_of_a_forged_cache_are_refused(change: str, length: int, tmp_path: Path) -> None:
    cache = forged(tmp_path, change=change)
    if not change:
        assert packed_view(cache, sequence_length=16).chunk(0)["seq_lens"].values.tolist() == [3, 2, 4, 4]
        return
    with pytest.raises(ChunkCorrupt, match=FORGED[change]):
        packed_view(cache, sequence_length=length).chunk(0)


@pytest.mark.parametrize("change", FORGED)
def test_spans_of_a_forged_cache_that_is_cut_stay_in_their_rows(change: str, tmp_path: Path) -> None:
    try:
        rows = packed_view(forged(tmp_path, change=change), sequence_length=3).chunk(0)
    except ChunkCorrupt:
        return
    spans = rows["spans"]
    assert isinstance(spans, fb.Ragged)
    assert (spans.values[:, 0] <= spans.values[:, 1]).all()
    assert spans.values[:, 1].max(initial=0) <= 3


def test_a_span_before_the_first_document_of_a_forged_cache_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChunkCorrupt, match="a span before its first document"):
        packed_view(forged(tmp_path, change="before"), sequence_length=3)


@pytest.mark.parametrize("fields", [{"change": "dtype"}, {"pad": "x"}, {"pad": -1}, {"pad": 1 << 16}])
def test_a_forged_recipe_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SourceInvalid, match=r"no column 'tokens' as a chat cache has it|is not a token"):
        packed_view(forged(tmp_path, **fields), sequence_length=16)


class Reshaped(Forged, frozen=True, kw_only=True):
    """The same with values of other lengths in two columns."""

    sides: dict[str, int] = {}

    def columns(self) -> tuple[Column, ...]:
        declared = Forged.columns(self)
        return tuple(
            msgspec.structs.replace(each, shape=(self.sides[each.name],)) if each.name in self.sides else each
            for each in declared
        )

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        made = dict(Forged.make(self, samples).columns)
        for name, side in self.sides.items():
            ragged = made[name]
            assert isinstance(ragged, fb.Ragged)
            made[name] = fb.Ragged(np.resize(ragged.values, (len(ragged.values), side)), ragged.offsets)
        return fb.Rows(made)


@pytest.mark.parametrize(("name", "side"), [("documents", 1), ("documents", 3), ("spans", 2), ("spans", 6)])
def test_a_column_of_another_shape_is_refused(name: str, side: int, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one\n")
    recipe = Reshaped(sides={name: side})
    fb.build(tmp_path / "forged", fb.sources.lines(tmp_path / "one.txt"), recipe, workers=0)
    with pytest.raises(SourceInvalid, match=f"no column '{name}' as a chat cache has it"):
        packed_view(fb.open_cache(tmp_path / "forged"), sequence_length=16)
