"""The spool deletes and overwrites only names that forebay made, and nothing through a link."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hub.data_sets import documents, shard
from tests.hub.recipes import DocumentRecipe
from tests.hub.server import HubServer

import forebay as fb
from forebay.hub import HubFile, Repository, RetryPolicy, acquire, clear, model_files, sweep
from forebay.sources.hub_datasets import SHARDS_FOLDER, leave_nothing
from forebay.sources.hub_datasets import hub as hub_source

SHARD = shard(documents(40, "s"))
HASH = hashlib.sha256(SHARD).hexdigest()
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
        fb.estimate(source, DocumentRecipe())
    else:
        fb.build(tmp_path / "cache", source, DocumentRecipe(rows=10), workers=0)
    leave_nothing()
    assert contents(tmp_path / "home") == before


@pytest.mark.parametrize("remove", [sweep, clear])
def test_only_names_that_the_spool_writes_are_removed(tmp_path, remove):
    before = a_folder_in_use(tmp_path / SHARDS_FOLDER)
    (tmp_path / SHARDS_FOLDER / ("c" * 64)).mkdir()
    (tmp_path / SHARDS_FOLDER / ("D" * 64)).write_bytes(b"upper case")
    remove(str(tmp_path / SHARDS_FOLDER))
    ours = {"a" * 64, "b" * 40 + ".part"} if remove is sweep else {"a" * 64}
    assert contents(tmp_path / SHARDS_FOLDER) == {
        **{name: content for name, content in before.items() if name not in ours},
        "D" * 64: b"upper case",
    }
    assert (tmp_path / SHARDS_FOLDER / ("c" * 64)).is_dir()


@pytest.mark.parametrize("suffix", ["", ".part", ".lock"])
def test_nothing_is_written_or_removed_through_a_link(hub, tmp_path, suffix):
    hub.add("org/set", {"a.parquet": SHARD})
    thesis = tmp_path / "thesis.tex"
    thesis.write_bytes(b"x" * 10)
    os.utime(thesis, (1e9, 1e9))
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / (HASH + suffix)).symlink_to(thesis)
    sweep(str(spool))
    clear(str(spool))
    assert os.path.islink(spool / (HASH + suffix))
    if suffix == "":
        taken(hub, tmp_path).release()
        assert (spool / HASH).read_bytes() == SHARD
    else:
        with pytest.raises(OSError, match="link"):
            taken(hub, tmp_path)
    assert (thesis.read_bytes(), thesis.stat().st_mtime) == (b"x" * 10, 1e9)


def test_a_folder_of_the_spool_that_is_a_link_is_refused(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    before = a_folder_in_use(tmp_path / "home")
    (tmp_path / "spool").symlink_to(tmp_path / "home")
    clear(str(tmp_path / "spool"))
    sweep(str(tmp_path / "spool"))
    with pytest.raises(NotADirectoryError, match="is a link"):
        taken(hub, tmp_path)
    assert contents(tmp_path / "home") == before


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
    place.unlink()
    place.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        model_files("org/model", "", (".json",), folder=kept, endpoint=hub.address, patience=QUICK)
    assert place.read_bytes() == b"mine"


def taken(hub: HubServer, tmp_path: Path):
    owner = replace(Repository("org/set", "dataset", hub.address, str(tmp_path / "kept")), patience=QUICK)
    commit = owner.commit()
    file = owner.listing(commit).file("a.parquet")
    assert file is not None
    return acquire(HubFile(owner, commit, file), str(tmp_path / "spool"))
