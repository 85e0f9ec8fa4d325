"""Have the workers of an engine find the identities of samples, where a recipe leaves out duplicates: that reads all.

The draft of the plan and what is found in each chunk are kept beside the plan until it is written.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forebay.building.dedup import ChunkIdentities, chunk_question
from forebay.building.kept_results import KeptResults
from forebay.building.planning import OnCut
from forebay.building.task import open_recipe, open_source, open_store_document, recipe_document, source_document
from forebay.cache.segment import Segment, decode_segment
from forebay.engine.base import Died, Done, Engine, Failed, TaskDocument
from forebay.errors import ForebayError
from forebay.recipe import Identity, Recipe, fingerprint, identity_of
from forebay.source import Source
from forebay.store.base import Store

POLL_SECONDS = 0.5
MOST_DEATHS = 10  # of workers, before the chunks that are left are read by the builder itself


@dataclass(frozen=True, slots=True)
class Census:
    """Finds the identities of chunks; what a worker opens."""

    store: Store
    source: Source
    recipe: Recipe
    segment: Segment
    digest: str

    def begin(self, chunk: int) -> Callable[[], None]:
        found = ChunkIdentities.read(self.source, self._identity(), self.segment, chunk).encode()
        return lambda: KeptResults(self.store).keep(found, *self.question(chunk))

    def question(self, chunk: int) -> tuple[Any, ...]:
        return chunk_question(fingerprint(self.recipe), self.digest, chunk)

    def document(self) -> TaskDocument:
        body = {
            "store": dict(self.store.document()),
            "source": source_document(self.source),
            "recipe": recipe_document(self.recipe),
            "segment": self.digest,
        }
        return TaskDocument(opener="forebay.building.census:open_census", body=body)

    def _identity(self) -> Identity:
        identity = identity_of(self.recipe)
        assert identity is not None
        return identity


def open_census(body: Mapping[str, Any]) -> Census:
    store, digest = open_store_document(body["store"]), body["segment"]
    draft = KeptResults(store).find("draft", digest)
    segment, found = decode_segment(memoryview(draft or b""), store.address, "the draft of the plan")
    if found != digest:
        raise ForebayError(f"the draft of the plan is not at '{store.address}' as it is seen here")
    recipe: Any = open_recipe(body["recipe"])
    return Census(store, open_source(body["source"]), recipe, segment, digest)


@dataclass(frozen=True, slots=True)
class CensusTakers:
    """An engine that reads chunks for the planner. What it cannot read the planner reads itself, and says why."""

    engine: Engine
    slots: int
    store: Store
    source: Source
    recipe: Recipe
    on_cut: OnCut

    def __call__(self, segment: Segment, kept: KeptResults) -> None:
        if not kept.is_used or self.slots < 2:
            return
        task = Census(self.store, self.source, self.recipe, segment, segment.digest())
        missing = [chunk for chunk in range(len(segment)) if kept.find(*task.question(chunk)) is None]
        kept.keep(b"".join(map(bytes, segment.encode())), "draft", task.digest)
        try:
            self.engine.start(task, self.slots)
        except (ForebayError, TypeError):  # no document can be made of it
            return
        try:
            self._read(segment, deque(missing))
        finally:
            self.engine.stop()

    def _read(self, segment: Segment, waiting: deque[int]) -> None:
        total, weights, passed, running, deaths = len(waiting), segment.weights(), 0, 0, 0
        while (waiting or running) and deaths < MOST_DEATHS:
            for slot in self.engine.idle():
                if waiting:
                    self.engine.submit(slot, waiting.popleft())
                    running += 1
            for event in self.engine.poll(POLL_SECONDS):
                match event:
                    case Died():
                        deaths += 1
                        lost = {*event.lost, *(() if event.chunk is None else (event.chunk,))}
                        running -= len(lost)
                        waiting.extend(lost)
                    case Done() | Failed():
                        running -= 1
                        passed += int(weights[event.chunk])
            done = segment.file_count * (total - len(waiting) - running) // max(1, total)
            self.on_cut(done, segment.file_count, passed)
