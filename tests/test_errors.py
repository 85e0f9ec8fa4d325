"""Errors: every one pickles, so that it crosses process pools, data-loader workers and Ray as what it is."""

import copy
import inspect
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from forebay import errors
from forebay.errors import ChunkCorrupt, ForebayError

VALUES = {
    "Sequence[str]": ("a", "b"),
    "Sequence[int]": (3, 4, 5, 6),
    "Mapping[str, str]": {"a": "x"},
    "Mapping[int, str]": {3: "x"},
    "Mapping[str, tuple[object, object]]": {"a": (1, 2)},
    "Mapping[str, tuple[object, int, object]]": {"a": (1, 2, 3)},
    "tuple[int, ...]": (2, 3),
    "tuple[int, ...] | None": (2, 3),
    "tuple[int, int] | None": (2, 3),
    "int": 7,
    "int | None": 7,
    "float": 0.5,
    "float | None": 0.5,
    "bool": True,
    "str": "text",
    "str | None": "text",
    "object": "text",
    "Exception": ValueError("x"),
}


def all_kinds(kind: type[ForebayError] = ForebayError) -> list[type[ForebayError]]:
    """The root and all below it, as forebay.errors declares them."""
    below = [found for one in kind.__subclasses__() for found in all_kinds(one)]
    return [kind, *(one for one in dict.fromkeys(below) if one.__module__ == errors.__name__)]


KINDS: list[type[BaseException]] = [*all_kinds(), errors.BuildStopped]


def made(kind: type[BaseException]) -> BaseException:
    if "__init__" not in {name for one in kind.__mro__[:-3] for name in vars(one)}:
        return kind("a text")
    arguments: dict[str, Any] = {}
    for parameter in list(inspect.signature(kind.__init__).parameters.values())[1:]:
        written = parameter.annotation
        text = written if isinstance(written, str) else inspect.formatannotation(written)
        arguments[parameter.name] = VALUES[text.replace("collections.abc.", "")]
    return kind(**arguments)


def corrupt() -> None:
    raise ChunkCorrupt("root", "tokens", 3, "its bytes are wrong", column="ids", block=2, span=(1, 2))


def test_there_are_as_many_kinds_as_the_table_at_the_top_names():
    named = [line for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert len(KINDS) == len(named) + 1 > 50


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_pickles_with_its_message_and_its_attributes(kind):
    error = made(kind)
    error.add_note("a note")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error) != ""
        assert again.args == error.args
        assert again.__dict__ == error.__dict__


def test_an_error_comes_out_of_a_process_pool_as_it_was_raised():
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(ChunkCorrupt, match="block 2 of column 'ids' in chunk 3 of layer 'tokens'") as raised,
    ):
        pool.submit(corrupt).result()
    assert (raised.value.chunk, raised.value.span) == (3, (1, 2))
