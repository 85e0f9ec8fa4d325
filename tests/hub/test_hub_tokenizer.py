"""The tokenizer of a model on the hub: checked, kept, and there without the network once it was seen."""

import pytest
from tests.hub.server import Drop, Flip, HubServer, Status

from forebay.errors import SourceNotFound, SourceUnreadable, StoreUnavailable
from forebay.hub import RetryPolicy, tokenizer_json

TOKENIZER = b'{"version": "1.0", "model": {"type": "BPE"}}' * 100
QUICK = RetryPolicy(retries=2, timeout=5, first_wait=0.01)


def ask(hub: HubServer, tmp_path, revision=None, name="org/model"):
    return tokenizer_json(name, revision, folder=str(tmp_path), endpoint=hub.address, patience=QUICK)


def test_it_is_downloaded_once_and_checked(hub, tmp_path):
    hub.add("org/model", {"tokenizer.json": TOKENIZER, "config.json": b"{}"}, "models")
    hub.spoil("tokenizer.json", Drop(after=100), Status(429, {"Retry-After": "0"}))
    assert ask(hub, tmp_path) == TOKENIZER
    assert len(hub.asked("tokenizer.json")) == 3
    assert ask(hub, tmp_path) == TOKENIZER
    assert len(hub.asked("tokenizer.json")) == 3


def test_a_new_commit_brings_its_own_and_an_old_one_can_still_be_named(hub, tmp_path):
    old = hub.add("org/model", {"tokenizer.json": TOKENIZER}, "models")
    assert ask(hub, tmp_path) == TOKENIZER
    hub.add("org/model", {"tokenizer.json": TOKENIZER + b" "}, "models")
    assert ask(hub, tmp_path) == TOKENIZER + b" "
    assert ask(hub, tmp_path, old) == TOKENIZER


def test_without_the_hub_the_one_that_was_seen_last_is_used(tmp_path, hub):
    commit = hub.add("org/model", {"tokenizer.json": TOKENIZER}, "models")
    ask(hub, tmp_path)
    asked = len(hub.requests)
    hub.spoil("org/model", *[Status(503)] * 20)
    assert ask(hub, tmp_path) == TOKENIZER
    assert len(hub.requests) == asked + 1
    assert ask(hub, tmp_path, commit) == TOKENIZER
    assert len(hub.requests) == asked + 1


def test_offline_mode_of_the_hubs_own_library_is_kept(tmp_path, hub, monkeypatch):
    hub.add("org/model", {"tokenizer.json": TOKENIZER}, "models")
    ask(hub, tmp_path)
    asked = len(hub.requests)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert ask(hub, tmp_path) == TOKENIZER
    with pytest.raises(StoreUnavailable, match=r"(?s)'org/other'.*offline mode.*local files"):
        ask(hub, tmp_path, name="org/other")
    assert len(hub.requests) == asked


def test_a_model_never_seen_needs_the_hub_and_the_error_names_the_ways_out(tmp_path):
    with pytest.raises(StoreUnavailable, match=r"(?s)the model 'org/model'.*3 attempts.*HF_ENDPOINT.*local files"):
        tokenizer_json("org/model", folder=str(tmp_path), endpoint="http://127.0.0.1:9", patience=QUICK)


def test_a_model_without_one_is_said_to_have_none(hub, tmp_path):
    hub.add("org/model", {"config.json": b"{}"}, "models")
    with pytest.raises(SourceNotFound, match=r"no file 'tokenizer\.json'\nhint: save one.*path"):
        ask(hub, tmp_path)
    with pytest.raises(SourceNotFound, match=r"(?s)'org/none'.*check the name"):
        ask(hub, tmp_path, name="org/none")


def test_one_that_never_matches_is_corrupt(hub, tmp_path):
    hub.add("org/model", {"tokenizer.json": TOKENIZER}, "models")
    hub.spoil("tokenizer.json", *[Flip(at=3)] * 3)
    with pytest.raises(SourceUnreadable, match=r"'tokenizer\.json' of the model 'org/model'"):
        ask(hub, tmp_path)
