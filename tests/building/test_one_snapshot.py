"""A verb reads the newest generation and the plan once, lists chunk files and source once, and passes them on.

Every further read that is counted here is deliberate: publishing reads again what it adds to, since another builder
may have been faster, and, at the end of a build into a folder, the plan, which may have been damaged since; what was
written at the end is read back; what makes chunks reads the plan, or the generation that it is pinned to, by itself,
since it may be another process.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.cli.running import run
from tests.image_caches import SIZES, write_pictures
from tests.image_caches import recipe as image_recipe
from tests.recipes import LengthLayer, ObedientRecipe, order_line, orders, write_orders

import forebay as fb
from forebay.building.planning import HEADS, SAMPLE_PLACES, SourceListing
from forebay.format import layout
from forebay.source import Listing
from forebay.sources import LineSource, image_files, paths
from forebay.store import LocalStore
from forebay.store.base import Entry

PACKED = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64)


class CountingStore(LocalStore):
    """A folder that counts how often a generation and the plan are read, and chunk files are listed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.counts: Counter[str] = Counter()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if start == 0:
            self.counts["generation"] += layout.parse_generation(key) is not None
            self.counts["plan"] += layout.parse_segment(key) == 0
        return super().read(key, start, stop)

    def entries(self, prefix: str) -> Iterator[Entry]:
        self.counts["chunks"] += prefix == "" or prefix.startswith(layout.LAYERS)
        return super().entries(prefix)


class SurveyingRecipe(ObedientRecipe, frozen=True, kw_only=True):
    """Looks at samples of the source before it is planned, as recipes of tokens do."""

    kind: ClassVar[str] = "surveying"

    def settled(self, kept: Mapping[str, Any] | None, survey: Any) -> tuple["SurveyingRecipe", tuple[str, ...]]:
        assert kept is not None or list(survey())
        return self, ()


class Verbs:
    """A cache, its source, and how often a verb reads either."""

    def __init__(self, folder: Path, listed: Counter[str]) -> None:
        self.root, self.raw, self._listed = folder / "cache", folder / "raw", listed
        self.recipes = {"surveying": SurveyingRecipe(), "lengths": LengthLayer()}
        write_orders(self.raw / "a.txt", orders(4))

    @property
    def source(self) -> LineSource:
        return fb.sources.lines(self.raw)

    def count(self, verb: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, int]:
        store = CountingStore(self.root)
        self._listed.clear()
        verb(store, *arguments, **options)
        return {**store.counts, "source": self._listed["source"]}

    def build(self, **options: Any) -> dict[str, int]:
        return self.count(fb.build, self.source, self.recipes["surveying"], workers=0, **options)

    def layer(self) -> dict[str, int]:
        return self.count(fb.build, None, self.recipes["lengths"], workers=0)

    def generations(self) -> int:
        return len(list((self.root / "generations").iterdir()))


@pytest.fixture
def verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verbs:
    listed: Counter[str] = Counter()
    listing = LineSource.listing

    def counted(source: LineSource, apart: str = "") -> Listing:
        listed["source"] += 1
        return listing(source, apart)

    monkeypatch.setattr(LineSource, "listing", counted)
    return Verbs(tmp_path, listed)


def test_a_new_build_lists_its_source_once_although_it_surveys_plans_and_compares_it(verbs: Verbs) -> None:
    assert verbs.build() == {
        "source": 1,
        "generation": 1,  # what was published, read back
        "plan": 2,  # read back after planning; to publish
        "chunks": 2,  # what is there; to publish
    }


def test_a_resumed_build_reads_the_index_once_and_again_to_publish(verbs: Verbs) -> None:
    verbs.build(end_chunk=1)
    assert verbs.build() == {
        "source": 1,
        "generation": 2,  # the snapshot; what was published, read back
        "plan": 2,  # the snapshot; to publish
        "chunks": 2,  # the snapshot; to publish
    }


def test_a_complete_build_reads_the_index_once_and_again_to_publish(verbs: Verbs) -> None:
    verbs.build()
    assert verbs.build() == {"source": 1, "generation": 1, "plan": 2, "chunks": 2}


def test_a_further_layer_reads_the_index_once_and_again_to_publish(verbs: Verbs) -> None:
    verbs.build()
    assert verbs.layer() == {
        "source": 0,
        "generation": 4,  # the snapshot; the pinned one; the begun layer and its chunks, read back
        "plan": 2,  # the snapshot; to publish
        "chunks": 2,  # the snapshot; to publish
    }
    assert verbs.layer() == {"source": 0, "generation": 2, "plan": 2, "chunks": 2}


def test_status_and_gaps_read_everything_once(verbs: Verbs) -> None:
    verbs.build()
    verbs.layer()
    assert verbs.count(fb.status) == {"source": 0, "generation": 1, "plan": 1, "chunks": 1}
    assert verbs.count(fb.gaps) == {"source": 0, "generation": 1, "plan": 1, "chunks": 1}


def test_verify_reads_each_generation_and_the_plan_once(verbs: Verbs) -> None:
    verbs.build(end_chunk=1)
    verbs.build()
    assert verbs.count(fb.verify) == {"source": 0, "generation": verbs.generations(), "plan": 1, "chunks": 1}


def test_a_repair_with_nothing_to_do_reads_the_index_before_and_after(verbs: Verbs) -> None:
    verbs.build(end_chunk=1)
    verbs.build()
    assert verbs.count(fb.repair, workers=0) == {
        "source": 0,
        "generation": 2 * verbs.generations(),  # before; after, where nothing that is left goes unsaid
        "plan": 3,  # to repair it; as it is then; after
        "chunks": 1,
    }


def test_growing_lists_the_source_once(verbs: Verbs) -> None:
    verbs.build()
    write_orders(verbs.raw / "b.txt", orders(2))
    assert verbs.count(fb.grow, verbs.source, recipe=verbs.recipes["surveying"], workers=0) == {
        "source": 1,
        "generation": 3,  # the snapshot; the chunks, read back; what was appended
        "plan": 2,  # the snapshot; to publish
        "chunks": 2,  # the snapshot; to publish
    }
    assert verbs.count(fb.grow, verbs.source, recipe=verbs.recipes["surveying"], workers=0) == {
        "source": 1,
        "generation": 2,  # the snapshot; what was appended
        "plan": 2,
        "chunks": 2,
    }


def test_a_refresh_lists_the_source_once_and_reads_the_index_again_after_what_it_made(verbs: Verbs) -> None:
    verbs.build()
    (verbs.raw / "a.txt").write_bytes(b"".join(order_line(number, "other") for number in range(8)))
    assert verbs.count(fb.refresh, source=verbs.source, recipes=verbs.recipes, workers=0) == {
        "source": 1,
        "generation": 4,  # the snapshot; to publish at the end; for layers; report
        "plan": 3,  # the snapshot; to publish; for the layers above
        "chunks": 3,  # to number revisions; what is there under the amended plan; to publish at the end
    }


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The patterns whose files were looked for."""
    walked: list[str] = []
    matching = paths._matching

    def counted(pattern: str) -> Iterator[paths.FoundFile]:
        walked.append(pattern)
        return matching(pattern)

    monkeypatch.setattr(paths, "_matching", counted)
    return walked


def test_one_walk_finds_the_files_of_a_source_and_counts_those_it_does_not_read(
    tmp_path: Path, walked: list[str]
) -> None:
    for name in ("raw/a.txt", "raw/b.csv"):
        write_orders(tmp_path / name, orders(1))
    source = fb.sources.files(tmp_path / "raw", suffixes=[".txt"])
    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)
    assert "1 file was not read: .csv 1" in report.notes
    assert len(walked) == 1


def test_one_walk_finds_images_and_the_tags_of_all(tmp_path: Path, walked: list[str]) -> None:
    (tmp_path / "raw").mkdir()
    source = fb.sources.images(write_pictures(tmp_path / "raw", 3))
    report = fb.build(tmp_path / "cache", source, image_recipe(tags=None), workers=0)
    assert report.rows == 3
    assert len(walked) == 1


def test_one_walk_is_enough_to_show_what_would_be_built(tmp_path: Path, walked: list[str]) -> None:
    (tmp_path / "raw").mkdir()
    source = write_pictures(tmp_path / "raw", 3)
    run("build", "images", source, "--into", tmp_path / "cache", "--size", "8", "--dry-run")
    assert len(walked) == 1


def test_the_same_walk_finds_the_files_whose_line_ends_are_noted(tmp_path: Path, walked: list[str]) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_bytes(b"one\r\n---\r\ntwo\r\n")
    source = fb.sources.text(tmp_path / "raw", separator="\n---\n")
    report = fb.build(tmp_path / "cache", source, PACKED, workers=0)
    assert any("has Windows line ends" in note for note in report.notes)
    assert len(walked) == 1


def test_no_file_is_opened_for_the_notes_of_a_source_that_is_not_walked(tmp_path: Path, walked: list[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n---\r\ntwo\r\n")
    source = fb.sources.text(tmp_path, separator="\n---\n")
    fb.build(tmp_path / "cache", source, PACKED, workers=0)
    store = LocalStore(tmp_path / "cache")
    walked.clear()
    assert SourceListing(source, store).notes
    assert SourceListing(source.unwalked(), store).notes == ()
    assert len(walked) == 1


def test_a_file_is_opened_once_to_try_and_once_to_make_and_looked_at_as_often_as_something_is_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build looks when it lists, after planning, before and after a chunk and at the end: docs/architecture.md.

    The first samples of `HEADS` files are also read to compare encoders.
    """
    (tmp_path / "raw").mkdir()
    for number in range(30):
        (tmp_path / f"raw/{number:02}.txt").write_bytes(b"%d words\n" % number * 20)
    calls = Counter[str]()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return call(*arguments, **options)

        return counting

    monkeypatch.setattr(import_module("forebay.sources.text"), "open_file", counted("open", paths.open_file))
    monkeypatch.setattr(paths, "look", counted("look", paths.look))
    root, source, recipe = tmp_path / "cache", fb.sources.text(tmp_path / "raw"), PACKED

    def calls_of(verb: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, int]:
        calls.clear()
        verb(*arguments, **options)
        return dict(calls)

    build = partial(fb.build, root, source, recipe, workers=0)
    assert calls_of(fb.estimate, source, recipe) == {"look": 30, "open": HEADS + SAMPLE_PLACES}
    assert calls_of(build) == {"look": 5 * 30, "open": HEADS + 2 * 30}
    assert calls_of(build) == {"look": 30, "open": HEADS}
    assert calls_of(fb.status, root) == {"look": 30}
    assert calls_of(fb.verify, root) == {"look": 30}


@pytest.mark.parametrize("has_sidecars", [True, False])
def test_an_image_is_looked_at_as_often_as_any_file_also_with_a_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_sidecars: bool
) -> None:
    """To find the tags of all, every sidecar is opened, and the images that are tried have theirs opened again."""
    calls = Counter[str]()

    def looked(*arguments: Any) -> Any:
        calls["look"] += 1
        return look(*arguments)

    def opened(root: str, name: str, *arguments: Any) -> bytes:
        calls["sidecar" if name.endswith(".json") else "image"] += 1
        return first_bytes(root, name, *arguments)

    look, first_bytes = image_files._look, image_files._first_bytes
    monkeypatch.setattr(image_files, "_look", looked)
    monkeypatch.setattr(image_files, "_first_bytes", opened)
    (tmp_path / "raw").mkdir()
    source, recipe = fb.sources.images(write_pictures(tmp_path / "raw")), image_recipe(tags=None)
    count = len(SIZES)
    for sidecar in () if has_sidecars else (tmp_path / "raw").glob("*.json"):
        sidecar.unlink()
    opens = Counter(image=count, sidecar=2 * count if has_sidecars else 0)
    fb.estimate(source, recipe, workers=0)
    assert calls == Counter(look=count) + opens
    calls.clear()
    fb.build(tmp_path / "cache", source, recipe, workers=0)
    made = Counter(image=count, sidecar=count if has_sidecars else 0)
    assert calls == Counter(look=5 * count) + opens + made
