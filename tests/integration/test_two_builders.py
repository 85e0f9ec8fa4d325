"""Several builders on one cache at once: together they make every chunk once."""

from collections import Counter
from pathlib import Path

import pytest
from tests.helpers.builders import chunk_count, chunk_digests, ending, start_builder, wait_until
from tests.helpers.obedient_recipes import ObedientRecipe, makes, orders, write_orders

import forebay as fb


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
    assert sum(report["built"] for report in reports) == 30
    assert all(report["built"] + report["present"] == 30 for report in reports)
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
    assert all(report["built"] + report["present"] == 3 for report in reports)


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
