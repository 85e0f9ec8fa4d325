"""Data sets of the hub on the command line, against a hub on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.running import Ran, run, run_process, story, write_documents
from tests.hub.data_sets import README, shard
from tests.hub.server import HubServer

import forebay as fb

pytestmark = pytest.mark.slow

SMALL = ["--sequence-length", 64, "--chunk-rows", 8, "--workers", 1]
STORIES = [story(number) for number in range(60)]
FILES = {"README.md": README.encode()} | {
    f"sample/{part}.parquet": shard(STORIES[20 * part : 20 * part + 20]) for part in range(2)
}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add("org/stories", FILES)
        yield server


@pytest.fixture(scope="module")
def root(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that was built from the hub."""
    folder = tmp_path_factory.mktemp("stories")
    asking(hub, folder, "build", "tokens", "hub:org/stories", "--subset", "sample", "--into", folder / "cache", *SMALL)
    return folder / "cache"


def asking(hub: HubServer, tmp_path: Path, *words: object, code: int = 0) -> Ran:
    """A command of a user whose hub is this one."""
    places = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    return run_process(*words, code=code, env={**os.environ, **places})


def texts_of(root: Path) -> list[str]:
    rows = run("peek", root, "--rows", 999, "--json").json["shown"]
    return sorted(piece["text"] for row in rows for piece in row["pieces"])


def test_a_data_set_is_built_and_grows_by_a_newer_revision(hub: HubServer, tmp_path: Path):
    hub.add("org/growing", FILES)
    (tmp_path / "hub.toml").write_text(
        '[source]\npaths = ["hub:org/growing"]\nsubset = "sample"\ndownload_timeout = 20\nspool = "spool"\n'
        '[recipe]\nkind = "tokens"\n[build]\ninto = "cache"\nworkers = 0\n'
    )
    asking(hub, tmp_path, "build", tmp_path / "hub.toml")
    assert texts_of(tmp_path / "cache") == sorted(STORIES[:40])
    assert (tmp_path / "spool").is_dir()
    hub.add("org/growing", {**FILES, "sample/2.parquet": shard(STORIES[40:])})
    asking(hub, tmp_path, "update", tmp_path / "cache", "hub:org/growing", "--workers", 0, "--download-retries", 2)
    assert texts_of(tmp_path / "cache") == sorted(STORIES)


def test_an_estimate_needs_no_download(hub: HubServer, tmp_path: Path):
    asked = len(hub.requests)
    found = asking(hub, tmp_path, "estimate", "tokens", "hub:org/stories", "--subset", "sample", "--json")
    assert found.json["rows"] > 0
    assert all(request.range for request in hub.requests[asked:] if request.path.endswith(".parquet"))


def test_rows_need_no_hub_once_they_are_made(hub: HubServer, root: Path):
    asked = len(hub.requests)
    assert texts_of(root) == sorted(STORIES[:40])
    assert "of the chunk · " in run("peek", root).out
    assert len(hub.requests) == asked


def test_the_rows_are_those_of_the_same_files_on_disk(root: Path, tmp_path: Path):
    for name in ("sample/0.parquet", "sample/1.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(FILES[name])
    run("build", "tokens", tmp_path / "sample", "--into", tmp_path / "local", *SMALL)
    one, other = fb.open_cache(root), fb.open_cache(tmp_path / "local")
    assert [row["tokens"].tolist() for row in one] == [row["tokens"].tolist() for row in other]


def test_a_cache_of_a_data_set_grows_by_that_data_set_only(root: Path, tmp_path: Path):
    for source in ("hub:org/others", write_documents(tmp_path / "data", ["x"])):
        assert (
            "is updated with a newer revision of it\nhint: pass hub:org/stories"
            in run("update", root, source, code=2).err
        )
