"""Which tokenizer a name stands for, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.helpers.builders import script_environment
from tests.tokens.vocabularies import added, byte_level, changed_model, written

from forebay.errors import ModelUnusable
from forebay.tokens import vocabulary
from forebay.tokens.encoders import in_time, load_fast, reference_tokenizer
from forebay.tokens.vocabulary import Vocabulary, load_vocabulary


def test_gpt2_needs_no_hub_and_is_the_published_one():
    vocabulary = load_vocabulary("gpt2")
    assert vocabulary.size == 50257
    assert vocabulary.ids["<|endoftext|>"] == vocabulary.end_of_document() == 50256
    assert vocabulary.special == ("<|endoftext|>",)
    assert vocabulary.sha256 == "de98a1409b0ea3bd303d6a8039a2f03b9f66f1cf5842454893cb1863688d873f"


def test_a_gpt2_file_with_another_byte_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "encoder.json").write_text("{}")
    monkeypatch.setattr(vocabulary, "GPT2_FILES", tmp_path)
    with pytest.raises(ModelUnusable, match="SHA-256"):
        vocabulary.gpt2_json()


def test_a_file_or_its_folder_can_be_named(tmp_path):
    path = written(tmp_path, byte_level())
    assert load_vocabulary(path) == load_vocabulary(str(tmp_path))
    assert load_vocabulary(path).size == 257


def test_the_same_bytes_are_loaded_once_and_errors_have_the_name_of_their_own():
    one, other = Vocabulary("one", byte_level()), Vocabulary("other", byte_level())
    assert reference_tokenizer(one) is reference_tokenizer(other)
    assert load_fast(one) is load_fast(other)
    assert reference_tokenizer(one) is not reference_tokenizer(load_vocabulary("gpt2"))
    for name in ("one", "other"):
        with pytest.raises(ModelUnusable, match=f"'{name}'"):
            reference_tokenizer(Vocabulary(name, b'{"model": {"type": "none", "vocab": {}}}'))


def test_a_file_that_changed_is_read_again(tmp_path):
    path = written(tmp_path, byte_level())
    before = load_vocabulary(path).sha256
    written(tmp_path, byte_level(added_tokens=[added("<eos>", 256), added("<pad>", 257)]))
    assert load_vocabulary(path).sha256 != before
    assert load_vocabulary(path).padding() == 257


@pytest.mark.parametrize("name", ["nowhere.json", "./nowhere", "gpt3", "/no/such/file"])
def test_a_name_that_is_nothing_is_refused_without_asking_a_hub(name):
    with pytest.raises(ModelUnusable, match="there is no such file"):
        load_vocabulary(name)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "tokenizer.json is invalid"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `model`"),
        (b'{"model": 5}', r"Expected `object`, got `int` - at `\$\.model`"),
        (b'{"model": {"vocab": {"a": "b"}}}', r"Expected `int`, got `str` - at `\$\.model\.vocab"),
        (b'{"model": {}, "added_tokens": [{"content": "x"}]}', "missing required field `id`"),
        (b"\xff", "tokenizer.json is invalid"),
        (changed_model(dropout=0.1), "uses random merges"),
    ],
)
def test_a_file_that_is_no_tokenizer_says_why(data, problem):
    with pytest.raises(ModelUnusable, match=problem):
        Vocabulary("it", data).ids  # noqa: B018 — asking is the test


def test_the_end_of_a_document_is_what_publishers_call_it():
    assert Vocabulary("it", byte_level()).end_of_document() == 256
    unknown = Vocabulary("it", byte_level(added_tokens=[added("<stop>", 256)]))
    with pytest.raises(ModelUnusable, match="eos="):
        unknown.end_of_document()
    assert unknown.id_of("<stop>", "eos") == unknown.id_of(256, "eos") == 256


@pytest.mark.parametrize("token", ["<nothing>", -1, 257])
def test_an_id_must_fit_the_vocabulary(token):
    with pytest.raises(ModelUnusable, match="no token"):
        Vocabulary("it", byte_level()).id_of(token, "pad")


def test_a_unigram_model_numbers_its_pieces_by_place():
    document = json.loads(byte_level())
    document["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
    assert Vocabulary("it", json.dumps(document).encode()).ids["a"] == 1


def test_gpt2_is_the_vocabulary_also_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert load_vocabulary("gpt2").size == 50257
    written(tmp_path / "gpt2", byte_level())
    assert load_vocabulary("gpt2").size == 50257
    assert load_vocabulary("./gpt2").size == 257


def test_a_bare_name_of_a_folder_says_how_to_write_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    written(tmp_path / "mine", byte_level())
    with pytest.raises(ModelUnusable, match=r"write '\./mine'"):
        load_vocabulary("mine")
    written(tmp_path, byte_level())
    assert load_vocabulary("tokenizer.json").size == 257


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(ModelUnusable, match=r"the folder has no tokenizer\.json"):
        load_vocabulary(str(tmp_path))


def test_a_file_that_is_far_too_large_is_not_read(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelUnusable, match="at most 268,435,456"):
        load_vocabulary(str(tmp_path))


def test_a_named_pipe_in_place_of_constants_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "constants.safetensors")
    script = "import sys; from forebay.tokens.vocabulary import vocabulary_in; assert not vocabulary_in(sys.argv[1])"
    command = [sys.executable, "-c", script, str(tmp_path / "constants.safetensors")]
    assert subprocess.run(command, env=script_environment(), timeout=600).returncode == 0


def test_a_call_that_is_interrupted_has_ended_when_the_process_does() -> None:
    """A thread that comes back from a library while the interpreter ends aborts it: exit code 134 instead of 130."""
    ended = threading.Event()

    def call() -> None:
        time.sleep(0.1)  # so that the caller waits for the answer
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        in_time("gpt2", "encode", 1, call)
    assert ended.is_set()
