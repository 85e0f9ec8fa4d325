"""What a repair works on, and what it has done: the cache, its copy and source, and a log by key."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.building.layers import reopened, stored_recipe
from forebay.errors import ForebayError
from forebay.kinds import reopen_recipe
from forebay.recipe import AnyRecipe, RecipeDocument, is_same_recipe
from forebay.source import Source
from forebay.store.base import Buffer, Store, is_full


@dataclass(slots=True)
class RepairLog:
    """Repair results so far, by key."""

    restored: list[str] = field(default_factory=list)  # the bytes that were published are back
    replaced: dict[str, str] = field(default_factory=dict)  # why other bytes had to be published
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RepairRun:
    """A cache to repair, its copy and its source."""

    store: Store
    copy: Store | None
    source: Source | None  # as the caller passed it
    recipe: AnyRecipe | None
    allow_network: bool
    log: RepairLog = field(default_factory=RepairLog)

    @property
    def copy_hint(self) -> str:
        """The next copy or source to pass; the copy in use did not help."""
        return "pass a copy (--from COPY)" if self.copy is None else "pass another copy (--from COPY)"

    def write(self, key: str, value: Callable[..., Sequence[Buffer]], *arguments: object) -> bool:
        """Put a file back; a failure is recorded."""
        try:
            self.store.replace(key, value(*arguments))
        except ForebayError as error:
            self.log.failed[key] = error.message
        except IsADirectoryError:
            self.log.failed[key] = "a folder has its name; move it away"
        except OSError as error:
            if is_full(error):
                raise
            self.log.failed[key] = str(error)
        else:
            self.log.restored.append(key)
            return True
        return False

    def recipe_of(self, document: RecipeDocument, with_constants: bool = True) -> AnyRecipe:
        """The recipe of a layer: the one passed, if it is that, or reopened from its document."""
        if self.recipe is not None and self.recipe.kind == document.kind and is_same_recipe(document, self.recipe):
            return self.recipe
        if with_constants:
            return stored_recipe(self.store, document.layer, "repair", self.allow_network)
        return reopen_recipe(document, None, root=self.store.address, verb="repair", allow_network=self.allow_network)

    def sources(self, described: Sequence[Mapping[str, object]]) -> Iterator[Source]:
        """The source that was passed, or those that generations describe, walked."""
        if self.source is not None:
            yield self.source
            return
        for description in described:
            source = reopened(self.allow_network, description) if description else None
            if source is not None:
                yield source.without_gone()
