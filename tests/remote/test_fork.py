"""Processes: the client of a bucket works in spawned and fork-server children, and does not hang in a forked one."""

import multiprocessing
import pickle

import pytest
from tests.remote.servers import SECRET

from forebay.errors import StoreRefused
from forebay.store import open_store


def answer_of_child(store, act, method):
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=act_in_child, args=(store, act, answers))
    child.start()
    try:
        return answers.get(timeout=600)
    finally:
        child.kill()
        child.join()


def act_in_child(store, act, answers):
    try:
        answers.put(repr(act(store)))
    except StoreRefused as error:
        answers.put(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_child_reads_the_bucket(bucket, method):
    store = open_store(f"{bucket}/a")
    store.create("value", [b"bytes"])
    assert answer_of_child(store, read_value, method) == repr(b"bytes")


def read_value(store):
    return store.read("value")


def test_a_pickled_store_has_no_secret(bucket):
    store = open_store(f"{bucket}/a")
    store.create("value", [b"bytes"])
    pickled = pickle.dumps(store)
    assert SECRET.encode() not in pickled
    assert pickle.loads(pickled).read("value") == b"bytes"


def test_the_store_in_memory_is_not_sent_to_another_process():
    with pytest.raises(TypeError, match="lives in one process"):
        pickle.dumps(open_store("memory://here"))


@pytest.mark.parametrize(
    "act",
    [
        lambda store: list(store.entries("")),
        lambda store: store.folders(""),
        lambda store: store.head("value"),
        read_value,
        lambda store: store.view("value"),
        lambda store: list(store.walk("")),
        lambda store: store.create("other", [b""]),
        lambda store: store.replace("value", [b""]),
        lambda store: store.delete("value"),
    ],
    ids=["entries", "folders", "head", "read", "view", "walk", "create", "replace", "delete"],
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_whatever_it_asks_for(bucket, act):
    store = open_store(f"{bucket}/a")
    store.create("value", [b"bytes"])
    answer = answer_of_child(store, act, "fork")
    assert "forked from one that had already used a bucket" in answer
    assert "multiprocessing_context='spawn' or 'forkserver'" in answer
    assert "tier" in answer
