"""Repair never makes it worse: double damages, copies that are named late, documents and generations of other caches.

`whole` means that a reader gets the rows and constants from before the damage, and that `verify` finds nothing.
"""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from tests.cli.running import run
from tests.helpers.cache_files import CacheFiles, content, cut, digests, flip
from tests.helpers.layer_recipes import (
    MOOD,
    LengthLayer,
    LineRecipe,
    MoodyRecipe,
    layered_cache,
    number_cache,
    write_lines,
)
from tests.helpers.processes import REPOSITORY, script_environment

import forebay as fb
from forebay.errors import Damaged, ForebayError
from forebay.format import chunk, layout
from forebay.format.tensors import VARIABLE, seal
from forebay.store.base import Buffer

UPDATE = "update"


class Damage:
    """A cache of raw lines with a copy, and what it held before it is damaged."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.folder, self.root, self.copy = folder, folder / "cache", folder / "copy"
        for name in "ab":
            write_texts(folder / f"source/{name}.jsonl", name)
        run("build", *(words or ("raw", "--chunk-bytes", 2000)), folder / "source", "--into", self.root, "-q")
        self.remember()

    def remember(self) -> None:
        run("copy", self.root, self.copy)
        self.content, self.digests, self.id = content(self.root), digests(self.root), cache_id(self.root)
        self.recipe = self.files.recipe().read_bytes()

    @property
    def files(self) -> CacheFiles:
        return CacheFiles(self.root)

    def repair(self, *words: object) -> None:
        """A repair that never claims to be done while something is wrong, and never loses an intact chunk."""
        intact = {key: digest for key, digest in digests(self.root).items() if self.digests.get(key) == digest}
        code = run("repair", self.root, "--workers", 0, *words, code=None).code
        assert {key: digests(self.root).get(key) for key in intact} == intact
        assert cache_id(self.root) == self.id
        sound = run("verify", self.root, "--full", code=None).code == 0
        assert code == 0 or not sound
        if sound:
            assert content(self.root) == self.content

    def assert_whole(self) -> None:
        run("verify", self.root, "--full")
        assert (content(self.root), self.files.recipe().read_bytes()) == (self.content, self.recipe)


def cache_id(root: Path) -> str:
    return str(json.loads(CacheFiles(root).document.read_bytes())["cache_id"])


def write_texts(path: Path, name: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": f"{name} {number} some words of a line, number {number}"}) for number in range(60)]
    path.write_text("\n".join(lines) + "\n")


def vocabulary(path: Path, first: str) -> Path:
    """A tokenizer of whole words that does not need the network."""
    words = [first, "some", "words", "of", "a", "line", "number", "b", "<|endoftext|>"]
    model = {"type": "WordLevel", "vocab": {word: at for at, word in enumerate(words)}, "unk_token": first}
    document = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    for name in ("truncation", "padding", "normalizer", "post_processor", "decoder"):
        document[name] = None
    path.write_text(json.dumps(document))
    return path


def token_damage(folder: Path) -> Damage:
    tokenizer = vocabulary(folder / "tokenizer.json", "unknown")
    return Damage(folder, "tokens", "--tokenizer", tokenizer, "--sequence-length", 64, "--workers", 0)


def test_repair_of_a_sound_cache_changes_nothing(tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    damage.repair()
    damage.repair("--from", damage.copy)
    damage.assert_whole()


@pytest.mark.parametrize("how", ["flipped", "deleted", "foreign"])
def test_repair_without_a_generation_does_not_believe_damaged_constants(tmp_path: Path, how: str) -> None:
    damage = token_damage(tmp_path)
    constants = damage.files.constants()
    if how == "flipped":
        flip(constants, constants.stat().st_size - 40)
    elif how == "deleted":
        constants.unlink()
    else:
        (tmp_path / "other").mkdir()
        other = vocabulary(tmp_path / "other.json", "other")
        run("build", "tokens", tmp_path / "source", "--into", tmp_path / "other", "--tokenizer", other, "-q")
        shutil.copy(CacheFiles(tmp_path / "other").constants(), constants)
    flip(damage.files.generations[-1])
    damage.repair()
    damage.repair("--from", damage.copy)
    damage.assert_whole()


def test_repair_without_a_generation_does_not_publish_deleted_constants_of_a_layer_as_empty(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    before = content(root)
    files = CacheFiles(root)
    files.constants("length").unlink()
    for generation in files.generations:
        flip(generation)
    fb.repair(root, recipe=LengthLayer(), workers=0)
    assert content(root) == before


def test_repair_does_not_replace_the_recipe_of_a_rebuilt_layer_by_the_dropped_one(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    fb.drop(root, "length")
    fb.build(root, None, LengthLayer(times=3), workers=0, max_failures=1.0)
    before, files = content(root), CacheFiles(root)
    recipe = files.recipe("length").read_bytes()
    files.constants("length").unlink()
    for generation in files.generations[-2:]:  # older ones list the layer that was dropped
        flip(generation)
    assert files.key(files.constants("length")) in fb.repair(root, workers=0).failed
    assert files.recipe("length").read_bytes() == recipe
    assert not fb.repair(root, recipe=LengthLayer(times=3), workers=0).failed
    assert content(root) == before


@pytest.mark.parametrize("segment", [0, 1])
def test_repair_of_a_plan_segment_and_a_generation_keeps_the_chunks_of_an_update(tmp_path: Path, segment: int) -> None:
    damage = Damage(tmp_path)
    write_texts(tmp_path / "source/c.jsonl", "c")
    run(UPDATE, damage.root, tmp_path / "source", "--workers", 0, "-q")
    shutil.rmtree(damage.copy)
    damage.remember()
    flip(damage.files.segments[segment])
    flip(damage.files.generations[-1])
    (tmp_path / "source/c.jsonl").unlink()
    damage.repair()
    damage.repair("--from", damage.copy)
    damage.assert_whole()


def test_repair_and_verify_report_an_unlisted_segment_that_does_not_continue_the_plan(tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    write_texts(tmp_path / "source/c.jsonl", "c")
    run(UPDATE, damage.root, tmp_path / "source", "--workers", 0, "-q")
    shutil.rmtree(damage.copy)
    damage.remember()
    damage.files.generations[-1].unlink()
    shutil.copy(damage.files.segments[0], damage.files.segments[1])
    (tmp_path / "source/c.jsonl").unlink()
    assert not fb.verify(damage.root).sound
    assert "plan/000001.safetensors" in fb.repair(damage.root, workers=0).failed
    damage.repair("--from", damage.copy)
    damage.assert_whole()


def test_verify_and_repair_report_a_lost_segment_before_one_that_no_generation_lists(tmp_path: Path) -> None:
    number_cache(tmp_path)
    root, files = tmp_path / "cache", CacheFiles(tmp_path / "cache")
    for name, first in (("c", 50), ("d", 60)):
        write_lines(tmp_path / f"raw/{name}.txt", first, 10)
        grow(root, tmp_path / "raw")
    for generation in files.generations[1:]:
        generation.unlink()
    files.segments[1].unlink()
    assert [problem.key for problem in fb.verify(root).bad] == ["plan/000001.safetensors"]
    assert fb.repair(root, recipe=LineRecipe(), workers=0).failed == {}
    assert fb.verify(root).sound


def wrong_fingerprint(path: Path) -> None:
    """Another first digit of the fingerprint in a recipe."""
    document = json.loads(path.read_bytes())
    digit = "1" if document["fingerprint"][0] == "0" else "0"
    path.write_text(json.dumps({**document, "fingerprint": digit + document["fingerprint"][1:]}))


def wrong_letter(path: Path) -> None:
    """One letter of a field in a recipe."""
    path.write_text(path.read_text().replace('"level": "default"', '"level": "defamlt"', 1))


def wrong_value(path: Path) -> None:
    """Another valid value of a field in a recipe."""
    path.write_text(path.read_text().replace('"level": "default"', '"level": "fast"', 1))


def foreign_recipe(path: Path) -> None:
    """The recipe of a cache from the same source with another codec."""
    folder = path.parents[2]
    run("build", "raw", "--chunk-bytes", 2000, "--codec", "none", folder / "source", "--into", folder / "other", "-q")
    shutil.copy(CacheFiles(folder / "other").recipe(), path)


@pytest.mark.parametrize("edit", [wrong_fingerprint, wrong_letter, wrong_value, foreign_recipe])
def test_repair_from_a_copy_works_after_a_repair_without_one(tmp_path: Path, edit: Callable[[Path], None]) -> None:
    damage = Damage(tmp_path)
    edit(damage.files.recipe())
    flip(damage.files.generations[-1])
    damage.repair()
    damage.repair("--from", damage.copy)
    damage.assert_whole()


def test_repair_does_not_publish_a_layer_as_empty_because_its_recipe_is_foreign(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    before, files = content(root), CacheFiles(root)
    fb.copy(root, tmp_path / "copy")
    shutil.copytree(root, tmp_path / "other")
    fb.drop(tmp_path / "other", "length")
    fb.build(tmp_path / "other", None, LengthLayer(times=3), workers=0)
    shutil.copy(CacheFiles(tmp_path / "other").recipe("length"), files.recipe("length"))
    for generation in files.generations:
        flip(generation)
    assert files.key(files.recipe("length")) in fb.repair(root, recipe=LineRecipe(), workers=0).failed
    assert not fb.repair(root, copy=tmp_path / "copy", recipe=LineRecipe(), workers=0).failed
    assert content(root) == before


@pytest.mark.parametrize("with_copy", [False, True])
@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_repair_does_not_turn_a_cache_into_the_one_of_a_foreign_generation(
    tmp_path: Path, codec: str, with_copy: bool
) -> None:
    damage = Damage(tmp_path)
    other = tmp_path / "other"
    run("build", "raw", "--chunk-bytes", 2000, "--codec", codec, tmp_path / "source", "--into", other, "-q")
    shutil.copy(CacheFiles(other).generations[-1], damage.files.generations[-1])
    words = ("--from", damage.copy) if with_copy else ()
    damage.repair(*words)
    damage.repair("--from", damage.copy)
    damage.assert_whole()


def test_repair_without_cache_json_and_plan_does_not_adopt_a_foreign_generation(tmp_path: Path) -> None:
    damage, other = Damage(tmp_path), tmp_path / "other"
    write_texts(tmp_path / "more/c.jsonl", "c")
    run("build", "raw", "--chunk-bytes", 2000, tmp_path / "more", "--into", other, "-q")
    shutil.copy(CacheFiles(other).generations[0], damage.files.generations[0])
    flip(damage.files.segments[0])
    damage.files.document.unlink()
    with pytest.raises(Damaged, match="pass a copy"):
        fb.repair(damage.root, workers=0)
    assert digests(damage.root) == damage.digests
    fb.repair(damage.root, copy=damage.copy, workers=0)
    damage.assert_whole()


def test_update_does_not_replace_chunks_by_those_of_a_foreign_plan(tmp_path: Path) -> None:
    damage, other = Damage(tmp_path), tmp_path / "other"
    write_texts(tmp_path / "more/c.jsonl", "c")
    run("build", "raw", "--chunk-bytes", 2000, tmp_path / "more", "--into", other, "-q")
    shutil.copy(CacheFiles(other).segments[0], damage.files.segments[0])
    generation = damage.files.generations[-1]
    generation.unlink()
    generation.mkdir()
    assert run(UPDATE, damage.root, tmp_path / "more", "--workers", 0, "-q", code=None).code == 1
    assert digests(damage.root) == damage.digests
    generation.rmdir()
    damage.repair("--from", damage.copy)
    damage.assert_whole()


@pytest.mark.parametrize("has_source", [True, False])
def test_repair_without_generations_reports_a_lost_segment_or_plans_it_again(tmp_path: Path, has_source: bool) -> None:
    damage = Damage(tmp_path)
    write_texts(tmp_path / "source/c.jsonl", "c")
    run(UPDATE, damage.root, tmp_path / "source", "--workers", 0, "-q")
    shutil.rmtree(damage.copy)
    damage.remember()
    damage.files.segments[-1].unlink()
    for generation in damage.files.generations:
        flip(generation)
    if not has_source:
        (tmp_path / "source/c.jsonl").unlink()
    assert run("repair", damage.root, "--workers", 0, code=None).code == (0 if has_source else 1)
    assert (content(damage.root) == damage.content) == has_source
    damage.repair("--from", damage.copy)
    damage.assert_whole()


def test_repair_without_plan_and_generations_plans_again_from_the_source(tmp_path: Path) -> None:
    root, files = tmp_path / "cache", CacheFiles(tmp_path / "cache")
    source = fb.sources.lines(write_lines(tmp_path / "raw/a.txt", 0, 40))
    fb.build(root, source, LineRecipe(), workers=0)
    before, segment = content(root), files.segments[0].read_bytes()
    files.segments[0].unlink()
    flip(files.generations[0])
    assert fb.repair(root, source=source, recipe=LineRecipe(), workers=0).failed == {}
    assert (content(root), files.segments[0].read_bytes()) == (before, segment)


def test_repair_next_to_a_folder_in_place_of_the_plan_reports_it_and_restores_the_rest(tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    flip(damage.files.generations[-1])
    flip(damage.files.chunk(0))
    damage.files.segments[0].unlink()
    damage.files.root.joinpath("plan/000000.safetensors").mkdir()
    with pytest.raises(Damaged, match=r"plan/000000.safetensors': it is gone, and chunk files were made by it"):
        fb.repair(damage.root, workers=0)
    report = fb.repair(damage.root, copy=damage.copy, workers=0)
    assert list(report.failed) == ["plan/000000.safetensors"]
    damage.files.root.joinpath("plan/000000.safetensors").rmdir()
    damage.repair("--from", damage.copy)
    damage.assert_whole()


@pytest.mark.parametrize("with_key", [False, True])
def test_a_repair_from_a_damaged_copy_does_not_advise_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_key: bool
) -> None:
    if with_key:
        monkeypatch.setenv(VARIABLE, "secret")
    damage = Damage(tmp_path)
    for root in (damage.root, damage.copy):
        flip(CacheFiles(root).generations[-1])
        wrong_fingerprint(CacheFiles(root).recipe())
    with pytest.raises(ForebayError, match="pass a copy \\(--from COPY\\)"):
        fb.repair(damage.root, workers=0)
    with pytest.raises(ForebayError, match="pass another copy"):
        fb.repair(damage.root, copy=damage.copy, workers=0)


@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_repair_of_random_damages_loses_nothing_and_a_copy_brings_back_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, with_key: bool
) -> None:
    """One to three damages to any files of a base and an upper layer."""
    if with_key:
        monkeypatch.setenv(VARIABLE, "secret")
    root, chosen = layered_cache(tmp_path), random.Random(seed)
    fb.copy(root, tmp_path / "copy")
    before, published = content(root), digests(root)
    for _ in range(1 + seed % 3):
        path = chosen.choice(sorted(path for path in root.rglob("*.*") if path.is_file()))
        chosen.choice([flip, cut, Path.unlink])(path)
    intact = {key: digest for key, digest in digests(root).items() if published.get(key) == digest}
    with suppress(ForebayError):
        fb.repair(root, recipe=LineRecipe(), workers=0)
    assert {key: digests(root).get(key) for key in intact} == intact
    assert not fb.repair(root, copy=tmp_path / "copy", recipe=LineRecipe(), workers=0).failed
    assert content(root) == before
    assert fb.verify(root).sound


KILLED = """
import os, signal, sys
import forebay as fb
from forebay.format import chunk, layout
from tests.helpers.layer_recipes import LineRecipe

class DeadlyStore(fb.LocalStore):
    left = int(sys.argv[2])

    def create(self, key, data, **options):
        if layout.parse_generation(key) is not None:
            DeadlyStore.left -= 1
            if DeadlyStore.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().create(key, data, **options)

fb.repair(DeadlyStore(sys.argv[1]), recipe=LineRecipe(), workers=0)
"""


def test_repair_that_was_killed_before_it_published_is_finished_by_the_next_one(tmp_path: Path) -> None:
    number_cache(tmp_path)
    root = tmp_path / "cache"
    (tmp_path / "raw/c.txt").write_bytes(b"".join(b"%06d\n" % number for number in range(50, 60)))
    grow(root, tmp_path / "raw")
    before = content(root)
    shutil.copytree(root, tmp_path / "pristine")
    for publication in (1, 2, 3):
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "pristine", root)
        files = CacheFiles(root)
        flip(files.generations[-1])
        flip(files.chunk(max(files.chunks())))
        arguments = [sys.executable, "-c", KILLED, str(root), str(publication)]
        ended = subprocess.run(arguments, env=script_environment(), cwd=REPOSITORY, timeout=600, check=False)
        assert ended.returncode in (0, -signal.SIGKILL)
        fb.repair(root, recipe=LineRecipe(), workers=0)
        assert content(root) == before


def grow(root: Path, source: Path) -> None:
    getattr(fb, UPDATE)(root, fb.sources.lines(source), recipe=LineRecipe(), workers=0)


def test_reading_a_generation_whose_layer_was_cleaned_away_does_not_advise_a_repair(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    pinned = fb.open_cache(root)
    fb.drop(root, "length")
    fb.clean(root, keep_generations=1)
    with pytest.raises(ForebayError) as caught:
        pinned.read([0], ["length"])
    assert not isinstance(caught.value, Damaged)
    assert "repair" not in f"{caught.value}"


def test_build_does_not_publish_rows_of_a_file_that_was_swapped_and_swapped_back(tmp_path: Path) -> None:
    source = tmp_path / "raw"
    for number, name in enumerate("abc"):
        path = source / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(b"%06d\n" % (100 * number + row) for row in range(8)))
    right, swapped = (source / "b.txt").read_bytes(), b"".join(b"%06d\n" % (900 + row) for row in range(8))
    times = (source / "b.txt").stat().st_mtime_ns

    def swap(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done in (2, 4):
            (source / "b.txt").write_bytes(swapped if progress.done == 2 else right)
            os.utime(source / "b.txt", ns=(times, times))

    with suppress(ForebayError):
        fb.build(tmp_path / "cache", fb.sources.lines(source), LineRecipe(), workers=0, on_progress=swap)
    cache = fb.open_cache(tmp_path / "cache")
    assert not set(cache.read(range(len(cache)))["number"].tolist()) & set(range(900, 908))


def test_status_and_verify_report_a_source_file_edited_under_its_old_size_and_time(tmp_path: Path) -> None:
    Damage(tmp_path)
    path = tmp_path / "source/b.jsonl"
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"words", b"wards"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run("verify", tmp_path / "cache", code=None).code == 1
    assert "b.jsonl" in run("status", tmp_path / "cache", code=None).out


def test_repair_rejects_a_copy_of_another_cache_even_without_cache_json(tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    other = tmp_path / "other"
    run("build", "raw", "--chunk-bytes", 2000, tmp_path / "source", "--into", other, "-q")
    damage.files.document.unlink()
    before = every_file(damage.root)
    with pytest.raises(ForebayError, match="is of another cache"):
        fb.repair(damage.root, copy=other, workers=0)
    assert every_file(damage.root) == before
    damage.repair("--from", damage.copy)
    damage.assert_whole()


def every_file(root: Path) -> dict[str, bytes]:
    return {CacheFiles(root).key(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["document", "recipe", "generation"])
def test_repair_writes_nothing_into_a_cache_of_a_newer_format(tmp_path: Path, name: str) -> None:
    damage = Damage(tmp_path)
    damage.files.chunk(0).unlink()
    if name == "generation":
        newer = seal({"format_version": layout.FORMAT_VERSION + 1, "type": "generation"}, {})
        (damage.root / "generations/000001.safetensors").write_bytes(b"".join(newer))
    else:
        path = damage.files.document if name == "document" else damage.files.recipe()
        path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 3'))
    before = every_file(damage.root)
    with pytest.raises(fb.errors.FormatTooNew):
        fb.repair(damage.root, copy=damage.copy, workers=0)
    assert every_file(damage.root) == before


class BusyStore(fb.LocalStore):
    """A builder publishes a chunk just before this store creates its first generation."""

    other: Callable[[], object] | None = None

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        if layout.parse_generation(key) is not None and BusyStore.other is not None:
            other, BusyStore.other = BusyStore.other, None
            other()
        return super().create(key, data, durable=durable)


def test_repair_keeps_what_a_builder_publishes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "secret")  # with a key, repair does not list unlisted files again
    source = fb.sources.lines(tmp_path / "raw")
    write_lines(tmp_path / "raw/a.txt", 0, 40)
    root, copy = tmp_path / "cache", tmp_path / "copy"
    fb.build(root, source, LineRecipe(), workers=0, end_chunk=2)
    shutil.copytree(root, copy)
    fb.build(copy, source, LineRecipe(), workers=0, end_chunk=3)
    BusyStore.other = lambda: fb.build(root, source, LineRecipe(), workers=0, start_chunk=5, end_chunk=6)
    fb.repair(BusyStore(root), recipe=LineRecipe(), copy=copy, workers=0)
    assert BusyStore.other is None
    assert [record.chunk for _, record in fb.open_cache(root).generation.chunks()] == [0, 1, 2, 3, 5, 6]


class FailingStore(fb.LocalStore):
    """The first generation cannot be read again once another one was created."""

    has_created = False

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        self.has_created |= layout.parse_generation(key) is not None
        return super().create(key, data, durable=durable)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if self.has_created and layout.parse_generation(key) == 0:
            raise PermissionError(errno.EACCES, "the server does not answer as before")
        return super().read(key, start, stop)


def test_repair_leaves_a_generation_that_cannot_be_read_again(tmp_path: Path) -> None:
    number_cache(tmp_path)
    files = CacheFiles(tmp_path / "cache")
    flip(files.generations[0])
    with suppress(OSError):  # checking the whole cache at the end fails too
        report = fb.repair(FailingStore(files.root), recipe=LineRecipe(), workers=0)
        assert files.key(files.generations[0]) in report.failed
    assert len(files.generations) == 2
    fb.repair(files.root, recipe=LineRecipe(), workers=0)
    assert len(files.generations) == 1
    assert fb.verify(files.root).sound


def test_a_chunk_that_would_be_made_with_other_content_stays_listed_as_damaged(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 12)
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), MoodyRecipe(), workers=0)
    flip(CacheFiles(root).chunk(1))
    before, generations = digests(root), CacheFiles(root).generations
    MOOD["add"] = 5
    try:
        report = fb.repair(root, recipe=MoodyRecipe(), workers=0)
    finally:
        MOOD["add"] = 0
    assert list(report.failed) == [CacheFiles(root).key(CacheFiles(root).chunk(1))]
    assert "--reuse" in next(iter(report.failed.values()))
    assert (digests(root), CacheFiles(root).generations) == (before, generations)
    assert fb.open_cache(root)[0]["number"] == 0
    with pytest.raises(fb.errors.ChunkCorrupt):
        fb.open_cache(root)[4]
    assert fb.repair(root, recipe=MoodyRecipe(), workers=0).failed == {}


UPDATING = """
import sys
import forebay as fb
from tests.helpers.layer_recipes import LineRecipe

fb.update(sys.argv[1], fb.sources.lines(sys.argv[2]), recipe=LineRecipe(), workers=0)
"""


def test_build_next_to_an_update_ends_well_and_leaves_its_chunks(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 40)
    root, source = tmp_path / "cache", fb.sources.lines(tmp_path / "raw")
    fb.build(root, source, LineRecipe(), workers=0, end_chunk=3)
    write_lines(tmp_path / "raw/b.txt", 40, 40)
    updates: list[int] = []

    def update_meanwhile(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done >= 5 and not updates:
            command = [sys.executable, "-c", UPDATING, str(root), str(tmp_path / "raw")]
            updates.append(subprocess.run(command, env=script_environment(), cwd=REPOSITORY, timeout=100).returncode)
            assert len(fb.open_cache(root).generation.plan) == 2

    report = fb.build(root, source, LineRecipe(), workers=0, on_progress=update_meanwhile)
    assert (updates, report.failed) == ([0], {})
    assert len(fb.open_cache(root).generation.plan) == 2, "the plan that an update made longer stays listed"
    assert sorted(row for row in fb.open_cache(root).read(range(80))["number"].tolist()) == list(range(80))
    assert fb.verify(root).sound


def test_a_sound_file_with_the_listed_content_in_other_bytes_is_listed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 12)
    recipe, source = LineRecipe(), fb.sources.lines(tmp_path / "raw")
    root, other = tmp_path / "cache", tmp_path / "other"
    fb.build(root, source, recipe, workers=0)
    original = chunk.compressor
    zstd = zstandard.ZstdCompressor(write_checksum=True).compress  # other bytes, as of another library version
    monkeypatch.setattr(chunk, "compressor", lambda codec, level: zstd if codec == "zstd" else original(codec, level))
    fb.build(other, source, recipe, workers=0)
    before = content(root)
    shutil.copy(CacheFiles(other).chunk(1), CacheFiles(root).chunk(1))
    placed = digests(root)
    assert not fb.verify(root).sound
    (tmp_path / "raw/a.txt").unlink()
    report = fb.repair(root, recipe=recipe, workers=0)
    assert (list(report.replaced), report.failed, report.restored) == ([key_of(root, 1)], {}, ())
    assert (content(root), digests(root)) == (before, placed)
    assert fb.verify(root).bad == ()


def key_of(root: Path, number: int) -> str:
    return CacheFiles(root).key(CacheFiles(root).chunk(number))
