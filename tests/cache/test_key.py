"""What a key is worth: whatever is tampered with is refused, and nothing that no tag covers is ever signed."""

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.cache_files import chunk_path, constants_path, recipe_path
from tests.helpers.layer_recipes import LineRecipe, flip, number_cache, tree, write_lines

import forebay as fb
from forebay.errors import Damaged, ForebayError, KeyRefused, StateMismatch
from forebay.format.chunk import encode_chunk
from forebay.format.chunk_file import ChunkFile
from forebay.format.generation import decode_generation
from forebay.format.tensors import VARIABLE
from forebay.recipe import fingerprint

KEY = "a secret"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tagged cache of the numbers 0 to 19, with two generations."""
    write_lines(tmp_path / "raw/a.txt", 0, 10)
    write_lines(tmp_path / "raw/b.txt", 10, 10)
    fb.build(tmp_path / "cache", source(tmp_path), LineRecipe(), workers=0, end_chunk=2)
    fb.build(tmp_path / "cache", source(tmp_path), LineRecipe(), workers=0)
    return tmp_path / "cache"


def source(folder: Path) -> fb.Source:
    return fb.sources.lines(folder / "raw")


def build(root: Path) -> object:
    return fb.build(root, source(root.parent), LineRecipe(), workers=0)


def repair(root: Path) -> object:
    return fb.repair(root, source=source(root.parent), recipe=LineRecipe(), workers=0)


def forge(path: Path, number: int = 999) -> None:
    """Exchange a chunk for one with other rows that is sound by all its own sums."""
    file = ChunkFile(memoryview(path.read_bytes()), "")
    columns = {name: file.decode(name) for name in file.columns}
    columns["number"] = np.full(file.rows, number)
    meta = file.meta
    forged = encode_chunk(
        columns,
        LineRecipe().columns(),
        layer=meta.layer,
        chunk=meta.chunk,
        fingerprint=fingerprint(LineRecipe()),
        samples=meta.samples,
        statistics=meta.statistics,
        sample_ids="text",
        source_sums=file.source_sums(),
    )
    path.write_bytes(b"".join(forged.buffers))


def chunk(root: Path, number: int) -> Path:
    return chunk_path(root, "numbers", number)


def signed_numbers(root: Path) -> set[int]:
    """Every number in every row of every generation that the key accepts and that can be read."""
    found: set[int] = set()
    for path in sorted((root / "generations").glob("*.safetensors")):
        try:
            cache = fb.open_cache(root, generation=int(path.stem))
        except ForebayError:
            continue
        for row in range(len(cache)):
            try:
                found.add(int(cache[row]["number"]))
            except ForebayError:
                continue
    return found


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def stripped(path: Path) -> None:
    """The same generation without its tag, with a digest that is right."""
    generation = decode_generation(memoryview(path.read_bytes()), "", "", KEY.encode())
    path.write_bytes(b"".join(generation.encode(None)))


TAMPERING: dict[str, Callable[[Path], object]] = {
    "chunk flipped": lambda root: flip(chunk(root, 1), 4300),
    "chunk forged": lambda root: forge(chunk(root, 1)),
    "chunk exchanged": lambda root: shutil.copyfile(chunk(root, 0), chunk(root, 1)),
    "chunk gone": lambda root: chunk(root, 1).unlink(),
    "cache.json": lambda root: replace_text(root / "cache.json", '"base"', '"base" '),
    "recipe": lambda root: replace_text(recipe_path(root, "numbers"), "0.5", "0.25"),
    "constants": lambda root: flip(constants_path(root, "numbers"), 4100),
    "plan": lambda root: flip(root / "plan/000000.safetensors", 4200),
    "newest generation flipped": lambda root: flip(root / "generations/000001.safetensors", 4500),
    "newest generation stripped": lambda root: stripped(root / "generations/000001.safetensors"),
    "newest generation tagged by a guess": lambda root: (root / "generations/000001.safetensors").write_bytes(
        b"".join(fb.open_cache(root).generation.encode(b"guess"))
    ),
    "older generation put back as newest": lambda root: shutil.copyfile(
        root / "generations/000000.safetensors", root / "generations/000002.safetensors"
    ),
    "older generation stripped": lambda root: stripped(root / "generations/000000.safetensors"),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_whatever_is_tampered_with_is_found_and_nothing_wrong_is_read_or_signed(root: Path, name: str) -> None:
    TAMPERING[name](root)
    with contextlib.suppress(Damaged, KeyRefused):
        assert not fb.verify(root).sound
    assert signed_numbers(root) <= set(range(20))
    with contextlib.suppress(Damaged, KeyRefused):
        repair(root)
    assert signed_numbers(root) <= set(range(20))


@pytest.mark.parametrize("name", [name for name in TAMPERING if "newest" not in name])
def test_below_a_newest_generation_that_the_key_accepts_a_repair_puts_all_right(root: Path, name: str) -> None:
    before = tree(root / "layers")
    TAMPERING[name](root)
    repair(root)
    assert fb.verify(root, full=True).sound
    assert tree(root / "layers") == before
    assert fb.open_cache(root).read(range(20))["number"].tolist() == list(range(20))


@pytest.mark.parametrize("how", ["stripped", "forged"])
def test_repair_goes_back_to_the_newest_generation_with_a_right_tag(root: Path, how: str) -> None:
    """Whoever may write could otherwise block a cache for good with one byte."""
    newest = root / "generations/000001.safetensors"
    if how == "stripped":
        stripped(newest)
    else:
        flip(newest, newest.stat().st_size - 5)
    with pytest.raises(KeyRefused):
        fb.open_cache(root)
    assert "generations/000001.safetensors" in repair(root).replaced
    assert fb.open_cache(root).generation.tagged
    assert fb.verify(root).sound


def test_the_key_must_cover_the_newest_generation(root: Path) -> None:
    stripped(root / "generations/000001.safetensors")
    for call in (fb.open_cache, fb.verify, fb.info, fb.clean, build):
        with pytest.raises(KeyRefused, match="it has no tag"):
            call(root)


def test_with_every_generation_flipped_a_repair_signs_nothing(root: Path) -> None:
    """It was an oracle: what proves itself by sums that anyone can compute was listed, and signed."""
    forge(chunk(root, 1))
    for path in (root / "generations").iterdir():
        flip(path, 4500)
    before = tree(root)
    with pytest.raises(KeyRefused, match=r"--from COPY"):
        repair(root)
    assert tree(root) == before


def test_repair_of_a_cache_without_any_tag_does_not_advise_to_run_repair(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    root = number_cache(tmp_path)
    monkeypatch.setenv(VARIABLE, "k" * 40)
    with pytest.raises(KeyRefused, match="no generation has a right tag") as caught:
        fb.repair(root, workers=0)
    assert "returns to the newest" not in str(caught.value)


def test_a_copy_under_the_same_key_brings_the_cache_back(root: Path, tmp_path: Path) -> None:
    fb.copy(root, tmp_path / "copy")
    forge(chunk(root, 1))
    for path in (root / "generations").iterdir():
        flip(path, 4500)
    assert fb.repair(root, copy=tmp_path / "copy", workers=0).failed == {}
    assert fb.verify(root, full=True).sound
    assert signed_numbers(root) == set(range(20))


def test_a_damaged_newest_generation_falls_back_to_what_a_tag_covers(root: Path) -> None:
    """Chunks that only it listed are made again and compared by the next build, not adopted."""
    forge(chunk(root, 4))
    flip(root / "generations/000001.safetensors", 4500)
    repair(root)
    assert fb.open_cache(root).generation.table("numbers").chunks.tolist() == [0, 1, 2]
    build(root)
    assert signed_numbers(root) == set(range(20))


def test_an_unlisted_chunk_is_made_again_and_never_signed_as_it_was_found(tmp_path: Path) -> None:
    donor = number_cache(tmp_path / "donor")
    forge(chunk(donor, 3))
    write_lines(tmp_path / "raw/a.txt", 0, 10)
    write_lines(tmp_path / "raw/b.txt", 10, 10)
    root = tmp_path / "cache"
    fb.build(root, source(tmp_path), LineRecipe(), workers=0, end_chunk=1)
    for number in (2, 3):
        shutil.copyfile(chunk(donor, number), chunk(root, number))
    fb.build(root, source(tmp_path), LineRecipe(), workers=0, end_chunk=1)
    assert fb.open_cache(root).generation.table("numbers").chunks.tolist() == [0, 1]
    build(root)
    assert fb.open_cache(root).read(range(20))["number"].tolist() == list(range(20))
    assert fb.verify(root, full=True).sound


def test_a_recipe_that_changed_on_disk_stays_out_of_every_later_generation(root: Path) -> None:
    text = fb.open_cache(root).generation.recipes["numbers"]
    (recipe_path(root, "numbers")).write_text(text.replace("0.5", "0.25"))
    flip(root / "generations/000000.safetensors", 4500)
    fb.repair(root, recipe=LineRecipe(), workers=0)
    assert fb.open_cache(root).generation.recipes["numbers"] == text


def test_a_plan_that_no_tag_covers_is_planned_again_and_compared(tmp_path: Path) -> None:
    """As a build that died before it published leaves it, or as somebody else put it there."""
    root = number_cache(tmp_path)
    shutil.rmtree(root / "generations")
    build(root)
    assert fb.verify(root).sound
    other = number_cache(tmp_path / "other", rows=40)
    shutil.rmtree(root / "generations")
    shutil.copyfile(other / "plan/000000.safetensors", root / "plan/000000.safetensors")
    with pytest.raises(ForebayError):
        build(root)
    assert not (root / "generations").exists()


def test_a_segment_that_no_tag_covers_is_planned_again_by_grow(root: Path) -> None:
    write_lines(root.parent / "raw/c.txt", 20, 4)
    fb.update(root, source(root.parent), recipe=LineRecipe(), workers=0)
    for path in sorted((root / "generations").iterdir())[2:]:
        path.unlink()
    fb.update(root, source(root.parent), recipe=LineRecipe(), workers=0)
    assert signed_numbers(root) == set(range(24))


def test_what_a_cache_keeps_is_not_built_by_before_a_tag_covers_it(root: Path) -> None:
    shutil.rmtree(root / "generations")
    with pytest.raises(KeyRefused, match="nothing is published yet"):
        fb.update(root, source(root.parent), workers=0)


@pytest.mark.slow
def test_two_builders_with_the_key_share_the_work(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 200)
    code = (
        "import sys; from tests.helpers.layer_recipes import LineRecipe; import forebay as fb\n"
        "print(fb.build(sys.argv[1], fb.sources.lines(sys.argv[2]), LineRecipe(), workers=0).built)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "cache"), str(tmp_path / "raw")]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(2)]
    made = [int(one.communicate(timeout=600)[0]) for one in both]
    assert 50 <= sum(made) < 100
    assert signed_numbers(tmp_path / "cache") == set(range(200))


# Pins: what a key alone cannot tell


def test_another_cache_under_the_same_key_is_refused_by_its_id(root: Path, tmp_path: Path) -> None:
    other = number_cache(tmp_path / "other")
    mine, theirs = (fb.info(one).cache_id for one in (root, other))
    assert len(fb.open_cache(root, cache_id=mine)) == 20
    with pytest.raises(StateMismatch, match=f"its cache_id is {theirs}, expected {mine}"):
        fb.open_cache(other, cache_id=mine)


def test_a_cache_that_was_rolled_back_is_refused_by_its_number(root: Path) -> None:
    assert fb.open_cache(root, min_generation=1).generation.number == 1
    (root / "generations/000001.safetensors").unlink()
    with pytest.raises(StateMismatch, match="its generation is 0, expected at least 1"):
        fb.open_cache(root, min_generation=1)


def test_any_other_generation_is_refused_by_its_digest(root: Path) -> None:
    old, new = (fb.open_cache(root, generation=number).generation.digest for number in (0, 1))
    assert new == fb.verify(root).digest == fb.info(root).digest
    assert fb.open_cache(root, digest=new.upper()).generation.number == 1
    with pytest.raises(StateMismatch, match=f"its digest is {new}, expected {old}"):
        fb.open_cache(root, digest=old)


def test_a_cache_sent_to_another_process_pins_the_digest(root: Path) -> None:
    sent = pickle.dumps(fb.open_cache(root))
    assert pickle.loads(sent).generation.number == 1
    number = fb.open_cache(root, generation=0).generation.numbered(1)
    (root / "generations/000001.safetensors").write_bytes(b"".join(number.encode(KEY.encode())))
    with pytest.raises(StateMismatch, match="digest"):
        pickle.loads(sent)
