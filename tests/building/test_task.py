"""A build's task is a JSON document that any worker opens to the same job, or it is refused with what to do."""

import json
import shutil
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import pytest
from tests.helpers.obedient_recipes import ObedientRecipe, orders, write_orders

import forebay as fb
from forebay.building.chunk_maker import ChunkJob
from forebay.building.task import BuildTask, open_build, source_document
from forebay.cache.catalog import load_generation
from forebay.cache.plan import load_plan
from forebay.engine.base import TaskDocument
from forebay.errors import BuildFailed, EngineUnusable, LibraryMissing, RecipeInvalid
from forebay.kinds import recipe_class, reopen_source
from forebay.store import LocalStore
from forebay.teachers.built_in import known_teacher


@pytest.fixture
def source(tmp_path):
    return fb.sources.lines(write_orders(tmp_path / "source.txt", orders(3)))


@pytest.fixture
def base(tmp_path, source):
    fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)
    store = LocalStore(tmp_path / "cache")
    digests = load_plan(store).digests
    return ChunkJob(store, "obedient", ObedientRecipe(), fb.fingerprint(ObedientRecipe()), source, digests)


def opened(job):
    document = TaskDocument.decode(BuildTask(job).document().encode())
    assert document.opener == "forebay.building.task:open_build"
    return document.open()


def test_jobs_are_opened_from_their_documents_as_they_were(base):
    record = load_generation(base.store).table("obedient").record(1)
    now = {"source.txt": base.source.files()[0]}
    jobs = [
        replace(base, existing=frozenset({3, 5})),
        replace(base, now=now, planned=("a", "b")),
        replace(base, layer="lengths", source=None, generation=3),
        replace(base, repairs={1: record}),
    ]
    for job in jobs:
        assert replace(opened(job), store=base.store) == job


def test_a_document_is_json_with_the_address_of_the_cache_and_no_pickle(base, monkeypatch):
    monkeypatch.chdir(base.store.address)
    text = BuildTask(replace(base, store=LocalStore("."))).document().encode()
    body = json.loads(text)["body"]
    del body["recipe"]["inner"]
    assert body["store"] == {"class": "forebay.store.local:LocalStore", "arguments": [str(base.store.address)]}
    assert body["recipe"] == {
        "class": "tests.helpers.obedient_recipes:ObedientRecipe",
        "fields": {"codec": "lz4", "rows": 2, "seconds": 0.0},
    }


IMPORTS = {"class": "antigravity:fly", "opener": "antigravity:fly", "inner": {"teacher": "antigravity:fly"}}


def test_a_cache_cannot_name_what_a_worker_imports(tmp_path):
    """Import paths in a document come from the objects of this process; a cache only chooses among known kinds."""
    source = reopen_source({"kind": "lines", "root": str(tmp_path), "patterns": ["*"], **IMPORTS})
    assert source_document(source)["class"].startswith("forebay.")
    for kind in IMPORTS["class"], "antigravity", "os", "forebay.building.task:open_build":
        with pytest.raises(LibraryMissing):
            reopen_source({"kind": kind, **IMPORTS})
        with pytest.raises(LibraryMissing):
            recipe_class(kind)
        with pytest.raises(LibraryMissing):
            known_teacher({"kind": kind, **IMPORTS})
    with pytest.raises(RecipeInvalid, match="has a field of the wrong type"):
        known_teacher({"kind": "t5", "model": "x", **IMPORTS})
    assert "antigravity" not in sys.modules


def test_a_whole_number_in_a_field_of_floats_stays_one(base):
    recipe = ObedientRecipe(seconds=2)
    again = opened(replace(base, recipe=recipe)).recipe
    assert fb.recipe.fingerprint(again) == fb.recipe.fingerprint(recipe)


def test_a_worker_that_sees_another_cache_refuses_it(base, source, tmp_path):
    document = BuildTask(base).document()
    shutil.move(tmp_path / "cache", tmp_path / "elsewhere")
    with pytest.raises(EngineUnusable, match="is not the cache that the build was started for"):
        open_build(document.body)
    fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)
    with pytest.raises(EngineUnusable, match="every machine mounts"):
        open_build(document.body)


def test_classes_that_cannot_be_imported_by_name_are_refused_and_can_be_built_in_this_process(tmp_path, source):
    class Local(ObedientRecipe, frozen=True):
        kind: ClassVar[str] = "local"

    with pytest.raises(RecipeInvalid, match=r"(?s)defined inside a function.*workers=0"):
        fb.build(tmp_path / "cache", source, Local(), workers=1)
    assert fb.build(tmp_path / "cache", source, Local(), engine="inline").built == 3


@dataclass(frozen=True)
class Held(fb.sources.LineSource):
    """A source with a field that JSON does not have."""

    kind: ClassVar[str] = "held"
    live: object = None


def test_a_source_that_json_cannot_hold_is_refused(base, source):
    held = Held(source.root, source.patterns, live=object())
    with pytest.raises(RecipeInvalid, match=r"Held cannot be sent to worker processes as a document"):
        BuildTask(replace(base, source=held)).document()


class Forgetful(ObedientRecipe, frozen=True):
    """A recipe that reads back as another one."""

    kind: ClassVar[str] = "forgetful"

    def __post_init__(self):
        msgspec.structs.force_setattr(self, "rows", self.rows + 1)


def test_a_recipe_that_reads_back_as_another_is_refused(base):
    with pytest.raises(RecipeInvalid, match="what is opened from its fields has others"):
        BuildTask(replace(base, recipe=Forgetful())).document()


@pytest.mark.slow
def test_a_recipe_that_a_worker_cannot_import_is_named(tmp_path, source, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "short_lived.py").write_text(
        "import forebay as fb\nclass Gone(fb.RawRecipe, frozen=True):\n    kind = 'gone'\n"
    )
    monkeypatch.syspath_prepend(folder)
    import short_lived  # noqa: PLC0415

    shutil.rmtree(folder)
    with pytest.raises(BuildFailed, match="ModuleNotFoundError: No module named 'short_lived'"):
        fb.build(tmp_path / "cache", source, short_lived.Gone(), workers=1)
    del sys.modules["short_lived"]


@pytest.mark.slow
def test_an_engine_is_chosen_by_name(tmp_path, source):
    seen = []
    fb.build(tmp_path / "a", source, ObedientRecipe(), engine="inline", on_progress=seen.append)
    assert {now.workers for now in seen if now.phase == "building"} == {1}
    fb.build(tmp_path / "b", source, ObedientRecipe(), engine="local", workers=2)
    with pytest.raises(ValueError, match=r"engine must be 'inline', 'local', 'ray' or an Engine"):
        fb.build(tmp_path / "c", source, ObedientRecipe(), engine="cloud")
