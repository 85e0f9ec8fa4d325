"""A build killed while it plans: every verb says the same about what is there, and the same build finishes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.helpers.processes import PythonProcess

import forebay as fb

# Ends without a trace before the n-th document is created.
KILLED_BUILD = """
import os, sys
import forebay as fb
from forebay.store.local import LocalStore

folder, left = sys.argv[1], int(sys.argv[2])
create = LocalStore.create

def counted(store, key, *arguments, **options):
    global left
    left -= key.startswith(("cache.json", "recipes/", "plan/", "layers/"))
    if left < 0:
        os._exit(9)
    return create(store, key, *arguments, **options)

LocalStore.create = counted
fb.build(f"{folder}/cache", f"{folder}/lines.txt", fb.RawRecipe(chunk_bytes=64), workers=0, progress=False)
"""
STATES = {
    0: "planning of the cache at '{}' was interrupted: nothing is planned",  # only a claim and a heartbeat
    1: "planning of the cache at '{}' was interrupted: nothing is planned",  # cache.json
    2: "planning of the cache at '{}' was interrupted: nothing is planned",  # and the recipe
    3: "the cache at '{}' has no generation",  # and the plan
}
VERBS: dict[str, Callable[[Path], object]] = {
    "info": fb.info,
    "open": fb.open_cache,
    "verify": fb.verify,
    "peek": lambda root: fb.peek(root),
    "repair": fb.repair,
    "copy": lambda root: fb.copy(root, root.with_name("copy")),
    "drop": lambda root: fb.drop(root, "raw"),
    "update": lambda root: fb.update(root, str(root.with_name("lines.txt"))),
}


@pytest.fixture(params=STATES)
def killed(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The cache of a build that was killed, and what is to be said of it."""
    (tmp_path / "lines.txt").write_text("".join(f"line {number}\n" for number in range(50)))
    process = PythonProcess("-c", KILLED_BUILD, str(tmp_path), str(request.param))
    process.communicate()
    assert process.returncode == 9
    return tmp_path / "cache", STATES[request.param].format(tmp_path / "cache")


def test_after_a_kill_during_planning_all_verbs_agree(killed: tuple[Path, str]) -> None:
    root, message = killed
    status = fb.status(root)
    assert (status.generation, status.complete) == (None, False)
    assert [builder.state for builder in status.builders] == ["abandoned"]
    assert status.source_note.startswith(message) == ("interrupted" in message)
    for name, verb in VERBS.items():
        if name == "update" and "interrupted" not in message:
            continue  # it finishes the build
        with pytest.raises(fb.errors.CacheNotFound) as raised:
            verb(root)
        assert raised.value.message == message, name


def test_after_a_kill_during_planning_the_same_build_finishes(killed: tuple[Path, str]) -> None:
    root, _ = killed
    report = fb.build(root, str(root.with_name("lines.txt")), fb.RawRecipe(chunk_bytes=64), workers=0)
    assert report.rows == len(fb.open_cache(root)) == 50
    assert fb.status(root).complete


def test_after_a_kill_during_planning_clean_removes_what_the_planner_left(killed: tuple[Path, str]) -> None:
    root, message = killed
    assert fb.clean(root).claims
    if (root / "cache.json").exists():
        with pytest.raises(fb.errors.CacheNotFound) as raised:
            fb.info(root)
        assert raised.value.message == message
    else:
        with pytest.raises(fb.errors.CacheNotFound, match="there is no cache"):
            fb.status(root)


def test_after_a_kill_before_the_first_chunk_repair_says_that_nothing_is_published(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("a line\n" * 50)
    tokens = KILLED_BUILD.replace("fb.RawRecipe(chunk_bytes=64)", "fb.TokenRecipe(sequence_length=16)")
    PythonProcess("-c", tokens, str(tmp_path), "4").communicate()  # after the plan and the constants
    root = tmp_path / "cache"
    assert [path.name for path in root.glob("layers/*/*")] == ["constants.safetensors"]
    for verb in (fb.verify, fb.repair):
        with pytest.raises(fb.errors.CacheNotFound, match="has no generation"):
            verb(root)


@pytest.mark.parametrize("killed", [0, 1, 2], indirect=True)
def test_after_a_kill_during_planning_build_of_the_folder_says_so_too(killed: tuple[Path, str]) -> None:
    root, message = killed
    said = run("build", root, "--mode", "inverse", code=1)
    assert said.err.startswith(f"error: {message}\nhint: run the same build again")
