"""Errors: every one pickles, so that it crosses process pools, data-loader workers and Ray as what it is."""

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from forebay import errors
from forebay.errors import BuildStopped, ChunkCorrupt, ForebayError
from forebay.format.chunk import chunk_corrupt


def all_kinds(kind: type[ForebayError] = ForebayError) -> list[type[ForebayError]]:
    """The root and all below it, as forebay.errors declares them."""
    below = [one for sub in kind.__subclasses__() for one in all_kinds(sub)]
    return [kind, *(one for one in dict.fromkeys(below) if one.__module__ == errors.__name__)]


def corrupt() -> None:
    raise chunk_corrupt("root", "tokens", 3, "its bytes are wrong", column="ids", block=2, span=(1, 2))


def test_error_kinds_are_those_in_the_module_docstring():
    listed = [line for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert len(all_kinds()) + 1 == len(listed) + 1 == 26


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
def test_error_pickles_with_message_hint_and_facts(kind):
    error = kind("it is wrong", hint="run it again", root="cache", chunk=3)
    error.add_note("a note")
    for restored in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(restored) is kind
        assert str(restored) == str(error) == "it is wrong\nhint: run it again"
        assert restored.facts == {"root": "cache", "chunk": 3}
        assert restored.__dict__ == error.__dict__


def test_build_stopped_pickles_with_its_counts():
    restored = pickle.loads(pickle.dumps(BuildStopped("cache", 3, 4)))
    assert (restored.root, restored.done, restored.total) == ("cache", 3, 4)


def test_error_leaves_a_process_pool_as_it_was_raised():
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(ChunkCorrupt, match="block 2 of column 'ids' in chunk 3 of layer 'tokens'") as raised,
    ):
        pool.submit(corrupt).result()
    assert raised.value.facts["chunk"] == 3
    assert raised.value.facts["span"] == (1, 2)
