"""Argument checks shared by Loader, CacheDataset and Mixture."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, TypeVar

from forebay.feeding.stream import SelectionRule, Stream
from forebay.read.cache import Cache

Name = TypeVar("Name")
STATE_FIELDS = ("version", "epoch", "position", "stream")


def checked_cache(cache: Cache) -> Cache:
    if not isinstance(cache, Cache):
        raise TypeError(f"expected a cache, not a {type(cache).__name__}: {_advice(cache)}")
    return cache


def checked_source(source: Cache | Stream) -> Cache | Stream:
    if not isinstance(source, Cache | Stream):
        raise TypeError(f"a Loader reads a cache or a Mixture, not a {type(source).__name__}: {_advice(source)}")
    return source


def checked_rule(selection: SelectionRule | None) -> SelectionRule | None:
    if selection is not None and not isinstance(selection, SelectionRule):
        raise TypeError(f"selection is {selection!r}; pass a rule: Split('train'), Split('validation') or Where(…)")
    return selection


def checked_names(option: str, names: Sequence[Name]) -> tuple[Name, ...]:
    """Return a list of names as a tuple; a single string, which is also a sequence, is refused."""
    if isinstance(names, str):
        raise TypeError(f"{option} is {names!r}; pass a list of names: [{names!r}]")
    return tuple(names)


def checked_batch_size(size: int, world_size: int, micro_batches: int = 1) -> int:
    """Return a global batch size that micro-batches and ranks can share evenly."""
    size = checked_whole("global_batch_size", size, "a whole number of rows")
    if size < 1:
        raise ValueError(f"global_batch_size must be at least 1 (got {size})")
    if size % world_size:
        raise ValueError(
            f"global_batch_size must be a multiple of the world size {world_size} (got {size}), so that all ranks take "
            "equal shares"
        )
    if checked_whole("micro_batches", micro_batches) < 1 or size % (world_size * micro_batches):
        raise ValueError(
            f"micro_batches must be at least 1 and divide the rows of a rank, {size // world_size} of "
            f"global_batch_size={size} (got {micro_batches})"
        )
    return size


def checked_whole(option: str, number: int, what: str = "a whole number") -> int:
    try:
        return index(number)
    except TypeError as error:
        raise TypeError(f"{option} is {number!r}; pass {what}") from error


def checked_count(field: str, number: object) -> int:
    """Return a count from a state; `state_dict` writes only non-negative ints, never bools."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"'{field}' of the state is {number!r}; it must be a whole number of at least 0")
    return number


def checked_state(state: Mapping[str, Any], *versions: int) -> Mapping[str, Any]:
    """Return a state that has all fields of these versions, or that is of another version, which the caller refuses."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state is a {type(state).__name__}; pass the dict that state_dict() returned, from JSON: "
            "json.loads(text)"
        )
    fields = STATE_FIELDS if state.get("version") in versions else STATE_FIELDS[:1]
    missing = [field for field in fields if field not in state]
    if missing:
        raise ValueError(f"not the state of a Loader: it lacks {', '.join(missing)}; pass what state_dict() returned")
    if not isinstance(state.get("stream", {}), Mapping):
        found = type(state["stream"]).__name__
        raise TypeError(f"'stream' of the state is a {found}; pass the dict that state_dict() returned")
    return state


def _advice(value: object) -> str:
    root = repr(str(value)) if isinstance(value, str) or hasattr(value, "__fspath__") else "root"
    return f"open one with fb.open_cache({root})"
