"""The spool removes only scratch folders of forebay, and nothing through a link."""

import os
from pathlib import Path

import pytest
from tests.hub.data_sets import documents, shard
from tests.sources.recipes import TextRecipe

import forebay as fb
from forebay.hub import RetryPolicy, model_files, scratch_folder, sweep
from forebay.sources.hub_datasets import SHARDS_FOLDER, leave_nothing
from forebay.sources.hub_datasets import hub as hub_source
from forebay.store.owners import this_host

SHARD = shard(documents(40, "s"))
QUICK = RetryPolicy(retries=2, timeout=5, first_wait=0.01)


def a_folder_in_use(folder: Path) -> dict[str, bytes]:
    """A folder with all that a user may keep in it, as names and contents."""
    folder.mkdir()
    (folder / "photos").mkdir()
    for name in ("thesis.tex", "old.part", "notes.lock", "a" * 64, "b" * 40 + ".part", "photos/cat.jpg"):
        (folder / name).write_bytes(name.encode())
        os.utime(folder / name, (1e9, 1e9))
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("verb", ["estimate", "build"])
def test_a_spool_that_is_a_folder_in_use_keeps_every_file(hub, tmp_path, verb):
    hub.add("org/set", {"a.parquet": SHARD})
    before = a_folder_in_use(tmp_path / "home")
    source = hub_source("org/set", endpoint=hub.address, spool=tmp_path / "home")
    if verb == "estimate":
        fb.estimate(source, TextRecipe())
    else:
        fb.build(tmp_path / "cache", source, TextRecipe(chunk_rows=10), workers=0)
    leave_nothing()
    assert contents(tmp_path / "home") == before


def test_sweep_removes_only_scratch_folders_of_dead_processes(tmp_path):
    before = a_folder_in_use(tmp_path / SHARDS_FOLDER)
    (tmp_path / SHARDS_FOLDER / f".tmp-{this_host()}-1-7-beefbeef").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.tex").touch()
    dead = tmp_path / SHARDS_FOLDER / f".tmp-{this_host()}-2-7-beefbeef"
    dead.mkdir()
    with scratch_folder(str(tmp_path / SHARDS_FOLDER)) as scratch:
        sweep(str(tmp_path / SHARDS_FOLDER))
        assert Path(scratch).is_dir()
    assert not dead.exists()
    assert contents(tmp_path / SHARDS_FOLDER) == before
    assert (tmp_path / "elsewhere" / "thesis.tex").exists()


def test_a_model_folder_is_linked_anew_where_it_leads_elsewhere(hub, tmp_path):
    commit = hub.add("org/model", {"config.json": b"{}"}, "models")
    kept = str(tmp_path / "kept")
    found = model_files("org/model", "", (".json",), folder=kept, endpoint=hub.address, patience=QUICK)
    assert os.path.basename(found) == commit
    (tmp_path / "other.json").write_bytes(b"evil")
    place = Path(found, "config.json")
    place.unlink()
    place.symlink_to(tmp_path / "other.json")
    model_files("org/model", "", (".json",), folder=kept, endpoint=hub.address, patience=QUICK)
    assert place.read_bytes() == b"{}"
    assert (tmp_path / "other.json").read_bytes() == b"evil"
