"""Several builders on one cache at once: together they make every chunk once."""

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from tests.builders import chunk_count, chunk_digests, ending, start_builder, wait_until
from tests.recipes import ObedientRecipe, makes, orders, write_orders
from tests.warm_process import WarmProcess

import forebay as fb
from forebay.format import layout
from forebay.store import LocalStore
from forebay.store.base import Entry


@pytest.fixture
def notes(tmp_path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("modes", [("forward", "inverse"), ("forward", "forward", "inverse")])
def test_builders_started_together_make_every_chunk_once_between_them(tmp_path, notes, modes):
    source, root = write_orders(tmp_path / "source.txt", orders(30)), tmp_path / "cache"
    builders = [start_builder(root, source, notes, {"seconds": 0.05}, workers=1, mode=mode) for mode in modes]
    reports = [ending(builder)["report"] for builder in builders]
    assert sum(report["made"] for report in reports) == 30
    assert all(report["made"] + report["present"] == 30 for report in reports)
    assert Counter(chunk for _, chunk in makes(notes)) == Counter(range(30))
    fb.build(tmp_path / "alone", fb.sources.lines(source), ObedientRecipe(seconds=0.05), workers=0, end_chunk=5)
    assert chunk_digests(root).items() >= chunk_digests(tmp_path / "alone").items()
    status = fb.status(root)
    assert (status.complete, status.claims) == (True, ())


def test_a_builder_that_comes_late_waits_for_what_another_holds_and_then_is_done(tmp_path, notes):
    source, root = write_orders(tmp_path / "source.txt", orders(3)), tmp_path / "cache"
    slow = start_builder(root, source, notes, {"seconds": 2.0}, workers=1)
    wait_until(lambda: len(makes(notes)) == 1)
    late = start_builder(root, source, notes, {"seconds": 2.0}, workers=2)
    reports = [ending(builder)["report"] for builder in (slow, late)]
    assert sorted(chunk for _, chunk in makes(notes)) == [0, 1, 2]
    assert all(report["made"] + report["present"] == 3 for report in reports)


def test_the_chunks_of_a_killed_builder_are_taken_over_without_waiting_for_its_lease(tmp_path, notes):
    source, root = write_orders(tmp_path / "source.txt", orders(40)), tmp_path / "cache"
    first = start_builder(root, source, notes, {"seconds": 0.2}, workers=1, lease_seconds=3600)
    wait_until(lambda: chunk_count(root) >= 1)
    second = start_builder(root, source, notes, {"seconds": 0.2}, workers=1, lease_seconds=3600)
    wait_until(lambda: len({pid for pid, _ in makes(notes)}) == 2)
    first.kill()
    first.communicate()
    assert "report" in ending(second)
    assert fb.status(root).complete
    assert not list(root.glob("claims/*/*"))


def test_the_claim_of_a_builder_that_was_killed_behind_its_chunk_is_gone_after_the_next_build(tmp_path):
    source, root = write_orders(tmp_path / "source.txt", orders(3)), tmp_path / "cache"
    fb.build(root, fb.sources.lines(source), ObedientRecipe(), workers=0, end_chunk=0)
    script = (
        "import os, signal, sys; from forebay.cache.claims import Claims; from forebay.store import LocalStore\n"
        "assert Claims(LocalStore(sys.argv[1]), 'obedient', 'here').take(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    WarmProcess("-c", script, str(root)).communicate()
    assert [path.name for path in root.glob("claims/*/*")] == ["000000.1.json"]
    fb.build(root, fb.sources.lines(source), ObedientRecipe(), workers=0)
    assert not list(root.glob("claims/*/*"))


class AskedStore(LocalStore):
    """Counts how often it is asked whether a chunk is there, until chunks are read, to be adopted."""

    asked, adopts = 0, False

    def head(self, key: str) -> Entry | None:
        self.asked += layout.parse_chunk(key) is not None and not self.adopts
        return super().head(key)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.adopts = self.adopts or layout.parse_chunk(key) is not None
        return super().read(key, start, stop)


def test_a_builder_that_meets_chunks_of_others_lists_what_is_there_instead_of_asking_for_each(tmp_path):
    (tmp_path / "lines.txt").write_text("".join(f"line {number:06d}\n" for number in range(300)))
    source, recipe = fb.sources.lines(tmp_path / "lines.txt"), fb.RawRecipe(chunk_bytes=12, codec="none")
    assert fb.build(tmp_path / "whole", source, recipe, workers=0).made == 300
    store = AskedStore(str(tmp_path / "cache"))

    def bring(progress: fb.Progress) -> None:
        """All chunks but the first are there at once, as if many others had made them."""
        if progress.phase == "building" and progress.done == 1:
            for chunk in tmp_path.glob("whole/layers/*/*.safetensors"):
                with suppress(FileExistsError):
                    os.link(chunk, tmp_path / "cache" / chunk.relative_to(tmp_path / "whole"))

    assert fb.build(store, source, recipe, workers=0, on_progress=bring).made == 1
    assert store.asked < 20
    assert chunk_digests(tmp_path / "cache") == chunk_digests(tmp_path / "whole")
