"""What is given to loaders, datasets and mixtures, refused where it is something else than they take.

A mistake is told where it is made, in the words of the call, not later by whatever first stumbles over it.
"""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, TypeVar

from forebay.feeding.stream import SelectionRule, Stream
from forebay.read.cache import Cache

Given = TypeVar("Given")
STATE_FIELDS = ("version", "epoch", "position", "stream")


def checked_cache(cache: Cache) -> Cache:
    if not isinstance(cache, Cache):
        raise TypeError(f"a cache is expected, not a {type(cache).__name__}: {_opened(cache)}")
    return cache


def checked_source(source: Cache | Stream) -> Cache | Stream:
    if not isinstance(source, Cache | Stream):
        raise TypeError(f"a Loader reads a cache or a Mixture, not a {type(source).__name__}: {_opened(source)}")
    return source


def checked_rule(selection: SelectionRule | None) -> SelectionRule | None:
    if selection is not None and not isinstance(selection, SelectionRule):
        raise TypeError(f"selection is {selection!r}; give a rule: Split('train'), Split('validation') or Where(…)")
    return selection


def checked_names(option: str, names: Sequence[Given]) -> tuple[Given, ...]:
    """Names in a list; one text would be taken for the list of its letters."""
    if isinstance(names, str):
        raise TypeError(f"{option} is {names!r}; give a list of names: [{names!r}]")
    return tuple(names)


def checked_batch_size(size: int, world_size: int) -> int:
    """The size of global batches, each of which all ranks share evenly."""
    size = checked_whole("global_batch_size", size, "a whole number of rows")
    if size < 1:
        raise ValueError(f"global_batch_size is {size}; a batch has at least one row")
    if size % world_size:
        raise ValueError(
            f"global_batch_size {size} is no multiple of the world size {world_size}; choose one that {world_size} "
            "ranks can share evenly"
        )
    return size


def checked_whole(option: str, number: int, what: str = "a whole number") -> int:
    try:
        return index(number)
    except TypeError as error:
        raise TypeError(f"{option} is {number!r}; give {what}") from error


def checked_count(field: str, number: object) -> int:
    """A number of a state: what is no whole number, or a truth value, was not written by `state_dict`."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"'{field}' of the state is {number!r}; a whole number that counts from 0 is expected")
    return number


def checked_state(state: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    """A state as this version has them, or of another version, which the caller refuses."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state is a {type(state).__name__}; give the dict that state_dict() gave, of JSON: json.loads(text)"
        )
    fields = STATE_FIELDS if state.get("version") == version else STATE_FIELDS[:1]
    missing = [field for field in fields if field not in state]
    if missing:
        raise ValueError(f"this is no state of a Loader: it has no {', '.join(missing)}; give what state_dict() gave")
    if not isinstance(state.get("stream", {}), Mapping):
        found = type(state["stream"]).__name__
        raise TypeError(f"'stream' of the state is a {found}; pass the dict that state_dict() returned")
    return state


def _opened(given: object) -> str:
    root = repr(str(given)) if isinstance(given, str) or hasattr(given, "__fspath__") else "root"
    return f"open one with fb.open_cache({root})"
