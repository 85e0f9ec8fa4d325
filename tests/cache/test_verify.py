"""Verifying: every published byte held against its digest, and whatever else is not as it should be."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import xxhash
from tests.helpers.cache_files import chunk_key, chunk_path, layer_path, real_key, recipe_path
from tests.helpers.layer_recipes import LengthLayer, LineRecipe, flip, layered_cache, number_cache, tree, write_lines

import forebay as fb
from forebay.errors import CacheNotFound, ChunkCorrupt, IndexCorrupt, KeyRefused
from forebay.format.chunk_file import ChunkFile
from forebay.format.layout import FORMAT_VERSION
from forebay.format.tensors import VARIABLE, seal


def test_a_sound_cache_is_sound(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    seen: list[fb.Progress] = []
    report = fb.verify(root, full=True, on_progress=seen.append)
    assert report.sound
    assert (report.generation, report.chunks, report.source_checked) == (1, 10, True)
    assert report.checked_bytes == sum(path.stat().st_size for path in (root / "layers").rglob("0*"))
    assert (report.bad, report.missing, report.gaps, report.foreign, report.stale) == ((), {}, {}, (), {})
    assert (seen[-1].done, seen[-1].total) == (10, 10)
    assert seen[-1].read_bytes == report.checked_bytes


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("layer", "column", "block"),
    [("numbers", "number", 1), ("numbers", "vector", 0), ("numbers", "text", 1), ("length", "times", 1)],
)
def test_a_flipped_byte_is_reported_with_layer_column_block_and_range(
    tmp_path: Path, layer: str, column: str, block: int, full: bool
) -> None:
    root = layered_cache(tmp_path)
    path = chunk_path(root, layer, 2)
    start, stop = ChunkFile(memoryview(path.read_bytes()), "").block_bounds(column)[block : block + 2].tolist()
    flip(path, stop - 1)
    report = fb.verify(root, full=full)
    assert not report.sound
    (bad,) = report.bad
    assert (bad.key, bad.layer, bad.chunk) == (chunk_key(root, layer, 2), layer, 2)
    assert (bad.column, bad.block, bad.start, bad.stop) == (column, block, start, stop)
    assert "do not match" in bad.problem


def test_damage_to_several_blocks_and_chunks_is_reported_one_by_one(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    path = chunk_path(root, "numbers", 1)
    bounds = ChunkFile(memoryview(path.read_bytes()), "").block_bounds("number").tolist()
    for position in (bounds[0], bounds[1]):
        flip(path, position)
    flip(chunk_path(root, "numbers", 3), 20)
    found = [(bad.chunk, bad.column, bad.block) for bad in fb.verify(root).bad]
    assert found == [(1, "number", 0), (1, "number", 1), (3, "", -1)]


@pytest.mark.parametrize("cut", [0, 5, 4096, -1])
def test_a_truncated_chunk_says_both_sizes(tmp_path: Path, cut: int) -> None:
    root = number_cache(tmp_path)
    path = chunk_path(root, "numbers", 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    (bad,) = fb.verify(root).bad
    assert f"{len(whole):,}" in bad.problem
    assert (bad.start, bad.stop) == (len(whole[:cut]), len(whole))


def test_missing_chunks_gaps_and_foreign_files_are_told_apart(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.build(root, None, LengthLayer(), workers=0, end_chunk=1)
    chunk_path(root, "numbers", 1).unlink()
    chunk_path(root, "numbers", 3).unlink()
    chunk_path(root, "length", 0).unlink()
    (root / "notes.txt").write_text("mine")
    (layer_path(root, "numbers") / "copy of 000001.safetensors").write_bytes(b"")
    report = fb.verify(root)
    assert not report.sound
    assert report.bad == ()
    assert report.missing == {"numbers": (1, 3), "length": (0,)}
    assert report.gaps == {"length": 3}
    assert set(report.foreign) == {
        "notes.txt",
        f"{layer_path(root, 'numbers').relative_to(root)}/copy of 000001.safetensors",
    }


@pytest.mark.parametrize(
    "key",
    ["cache.json", "recipes/numbers.json", "layers/length/constants.safetensors", "plan/000000.safetensors"],
)
def test_index_files_that_are_gone_or_others_are_reported(tmp_path: Path, key: str) -> None:
    root = layered_cache(tmp_path)
    key = real_key(root, key)
    flip(root / key, 30)
    (bad,) = fb.verify(root).bad
    assert bad.key == key
    (root / key).unlink()
    (bad,) = fb.verify(root).bad
    assert (bad.key, bad.problem) == (key, "it is gone")
    assert fb.verify(root).foreign == ()


@pytest.mark.parametrize(("damaged", "checked"), [(0, 1), (1, 0)])
def test_damaged_generations_are_reported_and_the_newest_sound_one_is_checked(
    tmp_path: Path, damaged: int, checked: int
) -> None:
    root = layered_cache(tmp_path)
    flip(root / f"generations/{damaged:06d}.safetensors", 4500)
    report = fb.verify(root)
    assert report.generation == checked
    assert [bad.key for bad in report.bad] == [f"generations/{damaged:06d}.safetensors"]


def test_where_no_generation_can_be_read_the_newest_is_named(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    flip(root / "generations/000000.safetensors", 4500)
    with pytest.raises(IndexCorrupt, match=r"generations/000000.safetensors.*no generation can be read"):
        fb.verify(root)


def test_nothing_to_verify_is_said(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        fb.verify(tmp_path)
    root = number_cache(tmp_path)
    (root / "generations/000000.safetensors").unlink()
    with pytest.raises(CacheNotFound):
        fb.verify(root)


def test_a_source_that_changed_or_is_gone_is_stale(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (tmp_path / "raw/a.txt").write_bytes(b"999999\n" * 10)
    (tmp_path / "raw/b.txt").unlink()
    report = fb.verify(root)
    assert not report.sound
    assert report.stale == {"a.txt": "has other content than was planned", "b.txt": "is gone"}


def test_full_finds_a_chunk_whose_content_digest_is_wrong(tmp_path: Path) -> None:
    """A chunk published by a builder that lied: its SHA-256 is the published one, its content is not what it says."""
    root = tmp_path / "cache"
    store = fb.LocalStore(root)
    write_lines(tmp_path / "raw/a.txt", 0, 4)
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)
    path = chunk_path(root, "numbers", 0)
    text = path.read_bytes()
    content = ChunkFile(memoryview(text), "").meta.content
    path.write_bytes(text.replace(content.encode(), content[::-1].encode(), 1))
    publish_as_it_is(store, path)
    assert fb.verify(root).sound
    report = fb.verify(root, full=True)
    assert [(bad.layer, bad.chunk) for bad in report.bad] == [("numbers", 0)]
    assert "content" in report.bad[0].problem


def publish_as_it_is(store: fb.LocalStore, path: Path) -> None:
    """A generation that lists a chunk with whatever digests its bytes have now."""
    generation = fb.open_cache(store).generation
    view = memoryview(path.read_bytes())
    record = generation.table("numbers").record(0)
    head = ChunkFile(view, "").head_size
    forged = type(record)(
        **{name: getattr(record, name) for name in record.__struct_fields__}
        | {
            "sha256": hashlib.sha256(view).digest(),
            "head": xxhash.xxh3_128_digest(view[:head]),
            "size": len(view),
            "head_size": head,
        }
    )
    layers = {"numbers": generation.table("numbers").with_records([forged])}
    newer = type(generation)(
        1, generation.cache, generation.recipes, generation.constants, generation.plan, generation.versions, layers
    )
    store.create("generations/000001.safetensors", newer.encode(None))


def memory_key(store: fb.Store, layer: str, chunk: int) -> str:
    keys = [entry.key for entry in store.entries(f"layers/{layer}.")]
    return next(key for key in keys if key.endswith(f"/{chunk:06d}.safetensors"))


def test_a_memory_store_is_verified_and_repaired_too(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 12)
    store, source, recipe = fb.MemoryStore(), fb.sources.lines(tmp_path / "raw"), LineRecipe()
    fb.build(store, source, recipe, workers=0)
    fb.build(store, None, LengthLayer(), workers=0)
    assert fb.verify(store, full=True).sound
    key = memory_key(store, "numbers", 1)
    whole = store.read(key)
    store.replace(key, [whole[:-1]])
    lost = memory_key(store, "length", 2)
    store.delete(lost)
    report = fb.verify(store)
    assert ([bad.key for bad in report.bad], report.missing) == ([key], {"length": (2,)})
    assert fb.repair(store, recipe=recipe, workers=0).restored == (key,)
    assert fb.repair(store, recipe=LengthLayer(), workers=0).restored == (lost,)
    assert store.read(key) == whole
    assert fb.verify(store, full=True).sound
    assert fb.open_cache(store, layers=["length"]).read([9])["times"].tolist() == [18]


# With a key


def test_another_key_and_no_key_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "secret")
    root = number_cache(tmp_path)
    assert fb.open_cache(root)[3]["number"] == 3
    assert fb.info(root).tagged
    assert fb.verify(root).sound
    monkeypatch.setenv(VARIABLE, "Secret")
    with pytest.raises(KeyRefused, match="was not made with the key in FOREBAY_HMAC_KEY"):
        fb.open_cache(root)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(KeyRefused, match="it is tagged"):
        fb.open_cache(root)


def test_no_byte_of_a_chunk_depends_on_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_root = layered_cache(tmp_path / "a")
    monkeypatch.setenv(VARIABLE, "secret")
    shutil.copytree(tmp_path / "a/raw", tmp_path / "b/raw", copy_function=shutil.copy2)
    keyed = tmp_path / "b/cache"
    fb.build(keyed, fb.sources.lines(tmp_path / "b/raw"), LineRecipe(), workers=0)
    fb.build(keyed, None, LengthLayer(), workers=0)
    assert tree(keyed / "layers") == tree(open_root / "layers")
    assert fb.open_cache(keyed).generation.tagged


def test_a_keyed_reader_finds_what_no_block_sum_covers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that differs only where no row is: without a key it reads, with one it is refused when mapped."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_bytes(b"000001\nnone\n000002\n")
    source = fb.sources.lines(tmp_path / "raw")
    for name, key in (("open", ""), ("keyed", "secret")):
        monkeypatch.setenv(VARIABLE, key) if key else monkeypatch.delenv(VARIABLE, raising=False)
        fb.build(tmp_path / name, source, LineRecipe(), workers=0)
        path = chunk_path(tmp_path / name, "numbers", 0)
        flip(path, path.stat().st_size - 4)
    with pytest.raises(ChunkCorrupt, match="its SHA-256 is not the one in the tagged generation"):
        fb.open_cache(tmp_path / "keyed")[0]
    monkeypatch.delenv(VARIABLE)
    assert fb.open_cache(tmp_path / "open")[0]["number"] == 1


# Files of other kinds and versions, each with words of its own


TOO_NEW = f"has format version {FORMAT_VERSION + 1}; this forebay reads up to {FORMAT_VERSION}"


def newer(kind: str) -> bytes:
    return b"".join(seal({"format_version": FORMAT_VERSION + 1, "type": kind}, {}))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "it is empty"),
        (b"abc", "it has only 3 bytes"),
        (b"x" * 5000, "it is not a forebay safetensors file"),
        ((4088).to_bytes(8, "little") + b"{", r"it ends inside its header \(9 of at least 4,096 bytes\)"),
        ((4088).to_bytes(8, "little") + b"[]".ljust(4088), "its header cannot be read"),
        (newer("generation"), TOO_NEW),
        (b"".join(seal({"format_version": FORMAT_VERSION, "type": "plan"}, {})), "it is a plan, not a generation"),
        (b"".join(seal({"format_version": FORMAT_VERSION, "type": "generation"}, {})), "missing required field"),
    ],
)  # fmt: skip
def test_a_generation_that_is_none_says_what_it_is(tmp_path: Path, value: bytes, said: str) -> None:
    root = number_cache(tmp_path)
    (root / "generations/000000.safetensors").write_bytes(value)
    with pytest.raises(fb.errors.Damaged, match=said):
        fb.open_cache(root)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "cache.json' of the cache at .* is corrupt: it cannot be read"),
        (b"\xff\xfe", "it cannot be read"),
        (b"[]", "it cannot be read"),
        (b'{"format_version": 2}', "it cannot be read: .*cache_id"),
        (b'{"format_version": "x", "cache_id": "", "base": ""}', "it cannot be read"),
        (b'{"format_version": 3, "cache_id": "", "base": "", "new": 1}', TOO_NEW),
    ],
)
def test_a_cache_json_that_is_none_says_what_it_is(tmp_path: Path, value: bytes, said: str) -> None:
    root = number_cache(tmp_path)
    (root / "cache.json").write_bytes(value)
    for call in (fb.status, fb.clean):
        with pytest.raises(fb.errors.Damaged, match=said):
            call(root)
    assert fb.open_cache(root)[3]["number"] == 3, "a reader needs only the generation"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "it cannot be read"),
        (b"{}", "it cannot be read: .*format_version"),
        (b'{"format_version": 3}', "has format version 3; this forebay reads up to 2"),
    ],
)
def test_a_recipe_json_that_is_none_says_what_it_is(tmp_path: Path, value: bytes, said: str) -> None:
    root = number_cache(tmp_path)
    (root / "generations/000000.safetensors").unlink()
    (recipe_path(root, "numbers")).write_bytes(value)
    with pytest.raises(fb.errors.Damaged, match=said):
        fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)


def test_of_a_damaged_plan_the_note_says_what_is_damaged_and_what_to_do(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    flip(root / "plan/000000.safetensors", 4200)
    note = fb.verify(root).source_note
    assert note.startswith("the source was not checked: 'plan/000000.safetensors' of the cache")
    assert note.endswith("its bytes do not match its digest")
    (root / "plan/000000.safetensors").unlink()
    assert "it is gone" in fb.verify(root).source_note


def test_a_pipe_in_place_of_a_segment_is_to_be_moved_away(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (root / "generations/000000.safetensors").unlink()
    (root / "plan/000000.safetensors").unlink()
    os.mkfifo(root / "plan/000000.safetensors")
    with pytest.raises(fb.errors.Damaged) as error:
        fb.verify(root)
    assert error.value.hint == "move it away, then run `forebay repair` on the cache"
