"""Small tokenizers with the control tokens of a template, in folders as model repositories have them."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TRAINING = (
    "The quick brown fox jumps over the lazy dog. Who are you? I am a small model; how can I help you today?\n\n"
    "assistant user system tool think Hello hello world answer question one two three four five 1 2 3 4 5\n"
) * 4


@lru_cache(maxsize=32)
def byte_level(special: tuple[str, ...], ordinary: tuple[str, ...] = (), nfc: bool = False) -> str:
    """A byte-level BPE model of 400 tokens with added tokens, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TRAINING], trainer)
    return _with_tokens(tokenizer, special, ordinary)


@lru_cache(maxsize=32)
def sentence_piece(special: tuple[str, ...], prefix: bool = True, metaspace: str = "") -> str:
    """A BPE model as SentencePiece has it: `▁` for a space, bytes for the unknown, perhaps a leading space.

    With `metaspace`, the pre-tokenizer adds it by that scheme, as in newer files.
    """
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzHITWQ.,?"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("l", "l"), ("H", "e"), ("He", "ll"), ("Hell", "o"), ("▁", "Hello")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *(one + other for one, other in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix else [replace])
    if metaspace:
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_tokens(tokenizer, special, ())


def _with_tokens(tokenizer: Tokenizer, special: Sequence[str], ordinary: Sequence[str]) -> str:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ordinary])
    return tokenizer.to_str()


def write_folder(folder: Path, tokenizer: str, template: str, tokens: dict[str, str], *, as_file: bool = False) -> str:
    """A folder with tokenizer.json, tokenizer_config.json and the template in it, or in a file by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer)
    config: dict[str, object] = dict(tokens)
    if as_file:
        (folder / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)
