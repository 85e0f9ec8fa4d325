"""What the command line must know about a kind of data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from forebay.cli.options import Decorator
from forebay.kinds import recipe_class
from forebay.source import Source


class SourceSettings(Protocol):
    """What `[source]` of a settings file holds: a frozen struct that opens as a source."""

    paths: tuple[str, ...]

    def open(self) -> Source: ...


RecipeFields = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of data as a subcommand of `build` and `estimate`.

    Every option is named as the field of the source settings or of the recipe that it sets, so that flags and settings
    files have the same words. `recipe_fields` makes what a user wrote into the fields of the recipe.
    """

    name: str
    summary: str
    details: str
    example: str  # what follows `forebay build`, without --into
    source: type[Any]
    options: tuple[Decorator, ...]
    recipe_fields: RecipeFields = dict

    @property
    def recipe(self) -> type[Any]:
        return recipe_class(self.name)
