"""Files that forebay did not write, named like its own or in place of them: none counts, none makes it wait."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.layer_recipes import LengthLayer, LineRecipe, layered_cache, number_cache, write_lines

import forebay as fb
from forebay.cache import catalog
from forebay.cache import publish as publishing
from forebay.cache.claims import read_claims
from forebay.cache.records import BuildReport
from forebay.errors import Damaged, ForebayError, IndexCorrupt, NotForebay, RecipeInvalid, StoreRefused
from forebay.format import layout
from forebay.recipe import Rows
from forebay.store import LocalStore, MemoryStore
from forebay.store.base import wait_until_listed

STRAYS = [
    "generations/0000001.safetensors", "generations/00000١.safetensors", "generations/old/000009.safetensors",
    "generations/000009.safetensors.bak", "plan/0000001.safetensors", "plan/old/000001.safetensors",
    "layers/numbers/backup/000003.safetensors", "layers/numbers/0000003.safetensors", "claims/numbers/notes.txt",
    "claims/numbers/000000.1.json.swp", "claims/.DS_Store", "layers/x/y/recipe.json", "layers/a.b/recipe.json",
]  # fmt: skip


def build(root: Path) -> BuildReport:
    return fb.build(root, fb.sources.lines(root.parent / "raw"), LineRecipe(), workers=0)


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_name_neither_counts_nor_is_removed(tmp_path, stray):
    root = number_cache(tmp_path)
    rows = len(fb.open_cache(root))
    (root / "layers/numbers/000003.safetensors").unlink()
    (root / "generations/000000.safetensors").unlink()
    (root / stray).parent.mkdir(parents=True, exist_ok=True)
    (root / stray).write_bytes(b"mine")
    report = build(root)
    assert (report.made, report.rows) == (1, rows)
    assert fb.verify(root).sound
    assert fb.verify(root).foreign == (stray,)
    fb.clean(root, keep_generations=1, lease_seconds=0)
    assert fb.repair(root, recipe=LineRecipe(), workers=0).failed == {}
    assert (root / stray).read_bytes() == b"mine"
    assert fb.status(root).complete


@pytest.mark.parametrize("kind", ["folder", "dangling", "link", "fifo"])
@pytest.mark.parametrize(
    "key",
    ["cache.json", "generations/000000.safetensors", "plan/000000.safetensors", "layers/numbers/recipe.json",
     "layers/numbers/000001.safetensors", "claims/numbers/000001.1.json"],
)  # fmt: skip
def test_what_is_not_a_file_in_place_of_one_is_an_error_at_once(tmp_path, key, kind):
    root = number_cache(tmp_path)
    outside = tmp_path / "outside"
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        shutil.move(path, outside)
    else:
        outside.write_bytes(b"{}")
        (root / "layers/numbers/000001.safetensors").unlink()
        shutil.rmtree(root / "generations")
    content = outside.read_bytes()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    for act in (
        build, fb.status, fb.gaps, fb.summarize, lambda root: fb.verify(root, full=True),
        lambda root: fb.clean(root, lease_seconds=0), lambda root: fb.copy(root, MemoryStore()),
        lambda root: fb.open_cache(root).read(range(8)), lambda root: fb.repair(root, recipe=LineRecipe(), workers=0),
    ):  # fmt: skip
        with suppress(ForebayError):
            act(root)
    assert outside.read_bytes() == content


def test_a_build_passes_over_a_folder_under_the_name_of_its_next_generation(tmp_path):
    root = number_cache(tmp_path)
    shutil.rmtree(root / "generations")
    (root / "generations/000000.safetensors").mkdir(parents=True)
    assert build(root).generation == 1
    assert (root / "generations/000000.safetensors").is_dir()


def test_a_generation_that_is_there_but_never_listed_is_not_waited_for_without_end(tmp_path, monkeypatch):
    """What a network file system may do: the name is taken, and the listing does not have it."""
    root = number_cache(tmp_path)
    store = LocalStore(root)
    listed = store.entries
    monkeypatch.setattr(
        store, "entries", lambda prefix: (one for one in listed(prefix) if "generations" not in one.key)
    )
    monkeypatch.setattr("forebay.store.base._LISTING_PAUSES", (0.0, 0.0))
    assert publishing.publish(store, {}, {}).number == 1
    with pytest.raises(StoreRefused, match=r"'generations/000000\.safetensors' exists but is not in the listing"):
        wait_until_listed(store, layout.generation(0))
    wait_until_listed(store, layout.generation(7))  # removed meanwhile: whoever tries again can have it


@pytest.mark.parametrize("name", ["layers/numbers", "generations", "plan", "claims", "layers"])
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
        lambda root: fb.grow(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0),
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
    store.create(layout.claim("numbers", 0, 1), [text])
    store.create("claims/numbers/notes.txt", [b"mine"])
    ((key, claim),) = read_claims(store, "numbers").items()
    assert (key, claim.state) == ("claims/numbers/000000.1.json", "working")
    assert len(fb.status(root).claims) == 1
    fb.clean(root, lease_seconds=0)
    assert [entry.key for entry in store.entries("claims/")] == ["claims/numbers/notes.txt"]


def test_a_bug_in_a_decoder_does_not_delete_a_chunk(tmp_path, monkeypatch):
    root = number_cache(tmp_path)
    chunk = root / "layers/numbers/000001.safetensors"
    (root / "generations/000000.safetensors").unlink()

    def buggy(*_: object) -> None:
        raise KeyError("a typing mistake")

    monkeypatch.setattr(catalog, "adopt_chunk", buggy)
    with pytest.raises(KeyError, match="a typing mistake"):
        build(root)
    assert chunk.exists()


def test_a_chunk_whose_statistics_cannot_be_listed_does_not_stop_the_others(tmp_path, monkeypatch):
    """As a forebay that did not look would have written it."""
    root = number_cache(tmp_path)
    (root / "generations/000000.safetensors").unlink()
    (root / "layers/numbers/000001.safetensors").unlink()
    made = LineRecipe.make

    def wide(self, samples):
        rows = made(self, samples)
        return Rows(rows.columns, rows.failures, {"sum": [1, 2, 3]})

    with monkeypatch.context() as patched:
        patched.setattr(LineRecipe, "make", wide)
        with pytest.raises(ForebayError, match="the statistic 'sum' has different lengths"):
            build(root)
    assert build(root).made == 1
    assert fb.verify(root).sound
    assert len(fb.open_cache(root)) == 20


def test_a_cache_without_a_plan_says_so(tmp_path):
    root = number_cache(tmp_path)
    shutil.rmtree(root / "plan")
    with pytest.raises(Damaged, match=r"plan/000000\.safetensors"):
        fb.grow(root, fb.sources.lines(root.parent / "raw"), recipe=LineRecipe(), workers=0)
    assert len(fb.open_cache(root)) == 20


def test_a_cache_json_of_any_size_is_not_read_into_memory(tmp_path):
    root = number_cache(tmp_path)
    with open(root / "cache.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises((NotForebay, IndexCorrupt)):
        fb.status(root)
    with open(root / "generations/000000.safetensors", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(IndexCorrupt):
        fb.open_cache(root)


def test_a_recipe_that_could_not_be_read_back_is_never_kept(tmp_path, monkeypatch):
    root = number_cache(tmp_path)
    twice = LengthLayer().columns()[:1] * 2
    monkeypatch.setattr(LengthLayer, "columns", lambda self: twice)
    with pytest.raises(RecipeInvalid, match="'length' cannot be kept: it has two columns with one name"):
        fb.build(root, None, LengthLayer(), workers=0)
    assert not (root / "layers/length").exists()


@pytest.mark.parametrize("text", [b"{}", b"", b"\xff", b"[" * 100_000])
def test_a_layer_folder_that_is_not_sound_and_not_published_is_foreign_and_hides_no_other(tmp_path, text):
    root = layered_cache(tmp_path)
    strays = ("layers/evil/000000.safetensors", "layers/evil/recipe.json")
    (root / "layers/evil").mkdir()
    (root / strays[0]).write_bytes(b"mine")
    (root / strays[1]).write_bytes(text)
    status = fb.status(root)
    assert [layer.layer for layer in status.layers] == ["length", "numbers"]
    assert status.complete
    assert status.foreign == fb.verify(root).foreign == strays
    assert fb.verify(root).sound
    assert [one.layer for one in fb.gaps(root)] == ["length", "numbers"]
    assert [one.layer for one in fb.summarize(root).layers] == ["length", "numbers"]
    assert fb.repair(root, recipe=LineRecipe(), workers=0).failed == {}
    assert build(root).made == 0
    assert all((root / key).exists() for key in strays)
    shown = run("status", root).out
    assert all(key in shown for key in strays)


def test_a_layer_that_is_published_and_whose_recipe_is_damaged_is_not_foreign(tmp_path):
    root = layered_cache(tmp_path)
    (root / "layers/length/recipe.json").write_text("{}")
    with pytest.raises(IndexCorrupt, match=r"'layers/length/recipe.json' of the cache .* run `forebay repair"):
        fb.status(root)
    assert fb.verify(root).foreign == ()


def test_the_damaged_recipe_of_a_cache_that_is_not_published_is_still_an_error(tmp_path):
    root = number_cache(tmp_path)
    shutil.rmtree(root / "generations")
    (root / "layers/numbers/recipe.json").write_text("{}")
    with pytest.raises(IndexCorrupt, match=r"'layers/numbers/recipe.json'"):
        fb.status(root)


def test_chunk_files_that_are_not_planned_are_foreign(tmp_path):
    root = number_cache(tmp_path)
    strays = ("layers/numbers/000005.safetensors", "layers/numbers/000777.r2.safetensors")
    for stray in strays:
        shutil.copyfile(root / "layers/numbers/000001.safetensors", root / stray)
    assert fb.verify(root).foreign == strays
    assert fb.status(root).foreign == strays
    assert fb.status(root).complete
    (root / "plan/000000.safetensors").write_bytes(b"")
    assert fb.verify(root).foreign == (), "without a plan, none is known not to be planned"
