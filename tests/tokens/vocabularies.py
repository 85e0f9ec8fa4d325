"""Small tokenizers of several makes, made on the spot."""

import json
from pathlib import Path
from typing import Any

from forebay.tokens.vocabulary import Vocabulary, gpt2_json


def byte_level(**changes: Any) -> bytes:
    """A tokenizer of single bytes, with the special token `<eos>` and a few words."""
    document = json.loads(gpt2_json())
    vocabulary = {token: number for token, number in document["model"]["vocab"].items() if number < 256}
    document["model"] |= {"vocab": vocabulary, "merges": []}
    document["added_tokens"] = [added("<eos>", 256)]
    return json.dumps(document | changes).encode()


def added(content: str, number: int, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": special}


def changed_model(**changes: Any) -> bytes:
    document = json.loads(gpt2_json())
    document["model"] |= changes
    return json.dumps(document).encode()


def written(folder: Path, data: bytes, name: str = "tokenizer.json") -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


ENDLESS = {"Regex": r"(?:[\s\S]|[\s\S][\s\S]?){1,12}(?![\s\S]|$)"}  # half a million steps at every character


def with_endless_pattern(part: str) -> Vocabulary:
    """A tokenizer that takes minutes for a page of text: to encode it, or to decode its last token."""
    split = {"type": "Split", "pattern": ENDLESS, "behavior": "Isolated", "invert": False}
    replace = {"type": "Replace", "pattern": ENDLESS, "content": "x"}
    document = json.loads(byte_level(pre_tokenizer=split) if part == "pre_tokenizer" else byte_level(decoder=replace))
    document["added_tokens"] = []
    document["model"]["vocab"]["ab " * 300] = 256
    return Vocabulary("hostile", json.dumps(document).encode())
