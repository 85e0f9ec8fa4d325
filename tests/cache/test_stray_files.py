"""Files that forebay did not write, named like its own or in place of them: none counts, none makes it wait."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from tests.helpers.builders import chunk_digests, every_file
from tests.helpers.cache_files import chunk_key, chunk_path, layer_path, real_key
from tests.helpers.layer_recipes import LengthLayer, LineRecipe, number_cache, write_lines

import forebay as fb
from forebay.cache.claims import read_claims
from forebay.cache.reports import BuildReport
from forebay.errors import Damaged, ForebayError, IndexCorrupt, RecipeInvalid
from forebay.store import LocalStore, MemoryStore

STRAYS = [
    "generations/0000001.safetensors", "generations/00000١.safetensors", "generations/old/000009.safetensors",
    "generations/000009.safetensors.bak", "plan/0000001.safetensors", "plan/old/000001.safetensors",
    "layers/numbers/backup/000003.safetensors", "layers/numbers/0000003.safetensors", "claims/numbers/notes.txt",
    "claims/numbers/000000.json.swp", "claims/.DS_Store", "layers/x/y/recipe.json", "layers/a.b/recipe.json",
]  # fmt: skip


def build(root: Path) -> BuildReport:
    return fb.build(root, fb.sources.lines(root.parent / "raw"), LineRecipe(), workers=0)


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_name_neither_counts_nor_is_removed(tmp_path, stray):
    root = number_cache(tmp_path)
    rows = len(fb.open_cache(root))
    (chunk_path(root, "numbers", 3)).unlink()
    (root / "generations/000000.safetensors").unlink()
    (root / stray).parent.mkdir(parents=True, exist_ok=True)
    (root / stray).write_bytes(b"mine")
    report = build(root)
    assert (report.built, report.rows) == (1, rows)
    assert fb.verify(root).sound
    assert fb.verify(root).foreign == (stray,)
    fb.clean(root, keep_generations=1, lease_seconds=0)
    assert fb.repair(root, recipe=LineRecipe(), workers=0).failed == {}
    assert (root / stray).read_bytes() == b"mine"
    assert fb.status(root).complete


@pytest.mark.parametrize("kind", ["folder", "dangling", "link", "fifo"])
@pytest.mark.parametrize(
    "key",
    ["cache.json", "generations/000000.safetensors", "plan/000000.safetensors", "recipes/numbers.json",
     "layers/numbers/000001.safetensors", "claims/numbers/000001.json"],
)  # fmt: skip
def test_what_is_not_a_file_in_place_of_one_is_an_error_at_once(tmp_path, key, kind):
    root = number_cache(tmp_path)
    outside = tmp_path / "outside"
    path = root / real_key(root, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        shutil.move(path, outside)
    else:
        outside.write_bytes(b"{}")
        (chunk_path(root, "numbers", 1)).unlink()
        shutil.rmtree(root / "generations")
    content = outside.read_bytes()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    for act in (
        build, fb.status, fb.info, lambda root: fb.verify(root, full=True),
        lambda root: fb.clean(root, lease_seconds=0), lambda root: fb.copy(root, MemoryStore()),
        lambda root: fb.open_cache(root).read(range(8)), lambda root: fb.repair(root, recipe=LineRecipe(), workers=0),
    ):  # fmt: skip
        with suppress(ForebayError):
            act(root)
    assert outside.read_bytes() == content


def update(root: Path) -> BuildReport:
    return fb.update(root, fb.sources.lines(root.parent / "raw"), recipe=LineRecipe(), workers=0)


def replace_by(kind: str, path: Path, outside: Path) -> None:
    """Replace a file by something with its name that is not a file."""
    shutil.move(path, outside)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "link" else outside.parent / "nowhere")


@pytest.mark.parametrize("kind", ["folder", "dangling", "link", "fifo"])
@pytest.mark.parametrize(
    "verb", [build, update, lambda root: fb.clean(root, keep_generations=1, unpublished=True, lease_seconds=0)]
)
def test_a_generation_that_is_not_a_file_stops_writing_verbs_before_they_write(tmp_path, kind, verb):
    root = number_cache(tmp_path)
    replace_by(kind, root / "generations/000000.safetensors", tmp_path / "outside")
    write_lines(tmp_path / "raw/c.txt", 20, 20)
    before = (every_file(root), chunk_digests(root))
    with pytest.raises(Damaged, match=r"generations/000000\.safetensors"):
        verb(root)
    assert (every_file(root), chunk_digests(root)) == before


@pytest.mark.parametrize("kind", ["folder", "dangling", "link", "fifo"])
def test_verify_reports_a_newest_generation_that_is_not_a_file(tmp_path, kind):
    root = number_cache(tmp_path)
    write_lines(tmp_path / "raw/c.txt", 20, 20)
    assert update(root).generation == 1
    replace_by(kind, root / "generations/000001.safetensors", tmp_path / "outside")
    assert [bad.key for bad in fb.verify(root).bad] == ["generations/000001.safetensors"]


@pytest.mark.parametrize("kind", ["folder", "dangling", "link", "fifo"])
def test_repair_publishes_above_a_generation_that_is_not_a_file_and_leaves_it(tmp_path, kind):
    root = number_cache(tmp_path)
    rows = len(fb.open_cache(root))
    path = root / "generations/000000.safetensors"
    replace_by(kind, path, tmp_path / "outside")
    report = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert report.failed == {}
    assert os.path.lexists(path)
    assert path.is_symlink() or not path.is_file()
    assert fb.verify(root).sound
    assert (build(root).built, len(fb.open_cache(root))) == (0, rows)


@pytest.mark.parametrize("name", ["generations", "plan", "claims", "layers"])
def test_nothing_is_written_or_deleted_behind_a_link(tmp_path, name):
    root, outside = number_cache(tmp_path), tmp_path / "outside"
    (root / "claims/numbers").mkdir(parents=True, exist_ok=True)
    shutil.move(root / name, outside)
    (root / name).symlink_to(outside)
    for extra in (".tmp-0123456789ab-1-1-abcdabcd", "000099.1.json", "thesis.txt"):
        (outside / extra).write_bytes(b"mine")
        os.utime(outside / extra, (0, 0))
    write_lines(tmp_path / "raw/c.txt", 20, 20)

    def snapshot() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in outside.rglob("*") if path.is_file()}

    before = snapshot()
    for act in (
        build, fb.status, fb.verify, lambda root: fb.repair(root, recipe=LineRecipe(), workers=0),
        lambda root: fb.clean(root, keep_generations=1, lease_seconds=0),
        lambda root: fb.update(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0),
    ):  # fmt: skip
        with suppress(ForebayError):
            act(root)
    assert snapshot() == before


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b'{"owner":[],"host":["x"],"pid":"7"}', b"[" * 100_000, b'{"owner":"\xff"}', b'"\\ud800"',
     b'{"owner":"x-\xc2\xb2-\xc2\xb2","host":"h","pid":1}', b'{"owner":"0123456789ab-1-1","host":1,"pid":1}'],
)  # fmt: skip
def test_a_claim_of_any_content_is_a_claim_of_somebody_unknown(tmp_path, text):
    root = number_cache(tmp_path)
    store = LocalStore(root)
    store.create(real_key(root, "claims/numbers/000000.json"), [text])
    store.create("claims/numbers/notes.txt", [b"mine"])
    assert len(read_claims(store)) == 1
    assert len(fb.status(root).claims) == 1
    fb.clean(root, lease_seconds=0)
    assert [entry.key for entry in store.entries("claims/")] == ["claims/numbers/notes.txt"]


def test_a_cache_json_of_any_size_is_not_read_into_memory(tmp_path):
    root = number_cache(tmp_path)
    with open(root / "cache.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Damaged):
        fb.status(root)
    with open(root / "generations/000000.safetensors", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(IndexCorrupt):
        fb.open_cache(root)


def test_a_recipe_that_could_not_be_read_back_is_never_kept(tmp_path, monkeypatch):
    root = number_cache(tmp_path)
    twice = LengthLayer().columns()[:1] * 2
    monkeypatch.setattr(LengthLayer, "columns", lambda self: twice)
    with pytest.raises(RecipeInvalid, match="'length' cannot be stored: it has two columns with one name"):
        fb.build(root, None, LengthLayer(), workers=0)
    assert not (layer_path(root, "length")).exists()


def test_chunk_files_that_are_not_planned_are_foreign(tmp_path):
    root = number_cache(tmp_path)
    strays = (chunk_key(root, "numbers", 5), chunk_key(root, "numbers", 777))
    for stray in strays:
        shutil.copyfile(chunk_path(root, "numbers", 1), root / stray)
    assert fb.verify(root).foreign == strays
    assert fb.status(root).foreign == strays
    assert fb.status(root).complete
    (root / "plan/000000.safetensors").write_bytes(b"")
    assert fb.verify(root).foreign == (), "without a plan, none is known not to be planned"
