"""A tokenizer that would make texts explode is refused before it is run."""

import base64
import subprocess
import sys

import msgspec
import pytest
from tests.tokens.vocabularies import added, byte_level, written

from forebay.errors import ModelUnusable
from forebay.tokens.encoders import open_encoder
from forebay.tokens.expansion import expansion_problem
from forebay.tokens.vocabulary import TokenizerFile, load_vocabulary


def replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: object) -> dict[str, object]:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(*texts: bytes) -> str:
    trie = b"\0" * 1024
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + b"\0".join(texts) + b"\0").decode()


DOUBLE = replace({"String": "a"}, "aa")
BOMBS = {
    "doubles forty times": {"normalizer": sequence(*[DOUBLE] * 40)},
    "doubles in sequences of sequences": {"normalizer": sequence(*[sequence(DOUBLE, DOUBLE)] * 8)},
    "one letter becomes a book": {"normalizer": replace({"String": "e"}, "e" * 2_000_000)},
    "a book between all letters": {"normalizer": replace({"Regex": ""}, "e" * 2_000)},
    "a run of none": {"normalizer": replace({"Regex": "a{0,}"}, "e" * 2_000)},
    "a short run": {"normalizer": replace({"Regex": "a{2,}"}, "e" * 2_000)},
    "an empty text replaced": {"normalizer": replace({"String": ""}, "e" * 2_000)},
    "a map of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"x" * 5000)}},
    "a book before every text": {"normalizer": {"type": "Prepend", "prepend": "e" * 5_000}},
    "the text a thousand times": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {},
        }
    },
    "a step without a type": {"normalizer": {"pattern": {"String": "e"}, "content": "e" * 5_000}},
    "steps without types": {"normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 40}},
    "a step without a type in a sequence": {"normalizer": sequence({"pattern": {"String": "e"}, "content": "e" * 99})},
    "the text a thousand times, without a type": {
        "post_processor": {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000, "pair": [], "special_tokens": {}}
    },
    "a long token": {"model": {"type": "BPE", "vocab": {"e" * 2000: 0}, "merges": []}},
    "a long added token": {"added_tokens": [added("<eos>", 256), added("e" * 2000, 257)]},
    "when it is read back": {"decoder": replace({"String": "e"}, "e" * 5_000)},
}
SOUND = {
    "llama": {"normalizer": sequence({"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁"))},
    "t5": {
        "normalizer": sequence(
            replace({"Regex": " {2,}"}, "▁"), {"type": "Precompiled", "precompiled_charsmap": charsmap(b"fi", b"1/2")}
        )
    },
    "albert": {"normalizer": sequence(replace({"String": "``"}, '"'), {"type": "NFKD"}, {"type": "Lowercase"})},
    "t5, xlm-r and albert": {  # U+FDFA becomes 33 bytes in the map of SentencePiece
        "normalizer": sequence(
            {"type": "Precompiled", "precompiled_charsmap": charsmap(b"x" * 33)}, replace({"Regex": " {2,}"}, "▁")
        )
    },
    "none": {},
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("encoder", ["tokenizers", "fastokens"])
def test_a_tokenizer_that_makes_texts_explode_is_refused(tmp_path, name, encoder):
    vocabulary = load_vocabulary(written(tmp_path, byte_level(**BOMBS[name])))
    with pytest.raises(
        ModelUnusable, match=r"times as long|before or after a text|a step without a type|a token of 2,000 characters"
    ):
        open_encoder(encoder, vocabulary)


@pytest.mark.parametrize("name", SOUND)
def test_what_tokenizers_in_use_do_is_accepted(name):
    document = msgspec.convert({"model": {}, **SOUND[name]}, TokenizerFile)
    assert expansion_problem(document) is None


def test_a_bomb_ends_a_build_with_a_sentence_and_little_memory(tmp_path):
    (tmp_path / "a.txt").write_text("a few words " * 1000)
    bomb = written(tmp_path, byte_level(**BOMBS["doubles forty times"]))
    command = ["build", "tokens", "a.txt", "--into", "cache", "--tokenizer", bomb, "--workers", "0"]
    script = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30,) * 2)\nfrom forebay.cli.main import main\nimport sys; sys.argv[1:] = {command!r}\nmain()"  # noqa: E501
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "times as long" in ran.stderr
    assert "Traceback" not in ran.stderr
