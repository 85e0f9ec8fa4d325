"""Where duplicates are left out, workers read the source for the planner: the same plan, and nothing is read twice."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest

import forebay as fb
from forebay.building import dedup
from forebay.building.dedup import ChunkIdentities
from forebay.engine import LocalEngine
from forebay.engine.base import Task
from forebay.errors import SourceUnreadable
from forebay.format import layout

RECIPE = fb.TokenRecipe(tokenizer="gpt2", deduplicate=True, chunk_size=4, encoder="tokenizers")


class NotedEngine(LocalEngine):
    """Notes the kind of every task, and the chunks that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self.submitted: list[tuple[str, int]] = []

    def start(self, task: Task, slots: int) -> None:
        self.kinds.append(type(task).__name__)
        super().start(task, slots)

    def submit(self, slot: int, chunk: int) -> None:
        self.submitted.append((self.kinds[-1], chunk))
        super().submit(slot, chunk)


@pytest.fixture
def source(tmp_path: Path, monkeypatch) -> fb.Source:
    monkeypatch.setattr(dedup, "LEAST_WEIGHT", {"bytes": 1, "samples": 1})
    lines = [json.dumps({"text": f"sentence {number % 300} of a few words " * 5}) for number in range(900)]
    (tmp_path / "source.jsonl").write_text("\n".join(lines))
    return fb.sources.jsonl(tmp_path / "source.jsonl")


def plan_of(root: Path) -> bytes:
    return (root / layout.plan_segment(0)).read_bytes()


def test_a_plan_without_duplicates_is_the_same_whoever_read_the_source(tmp_path, source):
    fb.build(tmp_path / "alone", source, RECIPE, workers=0)
    engine, root = NotedEngine(), tmp_path / "cache"
    report = fb.build(root, source, RECIPE, engine=engine, workers=2)
    assert engine.kinds == ["Census", "BuildTask"]
    assert {chunk for kind, chunk in engine.submitted if kind == "Census"} == set(range(report.chunks))
    assert plan_of(root) == plan_of(tmp_path / "alone")
    assert report.statistics["duplicates"] == 600
    assert not (root / "planning").exists()


def test_a_planning_that_was_stopped_continues_with_the_chunks_that_were_not_read(tmp_path, source):
    root = tmp_path / "cache"

    def stop(progress: fb.Progress) -> None:
        if progress.phase == "planning" and len(list(root.glob("planning/*.bin"))) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.build(root, source, RECIPE, engine=LocalEngine(), workers=2, on_progress=stop)
    left = len(list(root.glob("planning/*.bin")))
    assert left >= 2
    engine = NotedEngine()
    report = fb.build(root, source, RECIPE, engine=engine, workers=2)
    assert sum(kind == "Census" for kind, _ in engine.submitted) <= report.chunks - (left - 1)
    fb.build(tmp_path / "alone", source, RECIPE, workers=0)
    assert plan_of(root) == plan_of(tmp_path / "alone")


def test_what_was_found_by_another_recipe_is_not_used(tmp_path, source):
    """Of another recipe, the same text may have another identity."""
    root = tmp_path / "cache"

    def stop(progress: fb.Progress) -> None:
        if progress.phase == "planning" and len(list(root.glob("planning/*.bin"))) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.build(root, source, RECIPE, workers=0, on_progress=stop)
    other = msgspec.structs.replace(RECIPE, pad=7)
    engine = NotedEngine()
    report = fb.build(root, source, other, engine=engine, workers=2)
    assert sum(kind == "Census" for kind, _ in engine.submitted) == report.chunks


def test_what_workers_cannot_read_is_the_error_of_the_planner(tmp_path, source):
    text = (tmp_path / "source.jsonl").read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(text)[:-400])
    with pytest.raises(SourceUnreadable, match=r"cut\.jsonl\.gz"):
        fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "*.jsonl*"), RECIPE, workers=2)
    assert not (tmp_path / "cache").exists()


def test_identities_that_were_kept_are_whole_or_not_used():
    found = ChunkIdentities(7, b"\1\0\1", bytes(range(32)))
    assert ChunkIdentities.decode(found.encode()) == found
    assert list(found) == [bytes(range(16)), None, bytes(range(16, 32))]
    for wrong in (b"", found.encode()[:-1], found.encode() + b"x", found.encode().replace(b"\1\0\1", b"\1\2\1")):
        assert ChunkIdentities.decode(wrong) is None
