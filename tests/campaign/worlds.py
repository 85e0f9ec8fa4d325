"""Small caches whose rows are known, each built once, and a reader that asks for every row.

What the rows of raw lines should be is known from the lines; of other kinds, from reading the cache before anything
happened to it.
"""

import hashlib
import json
import os
import random
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from PIL import Image
from tests.campaign.trial import Ending, run_call, run_verb

import forebay as fb
from forebay.columns import Ragged
from forebay.errors import ForebayError

LINES_PER_FILE = 40
READ_SECONDS = 20.0


@dataclass(frozen=True)
class World:
    """A pristine cache, the command that builds it, and the digests of its rows."""

    name: str
    folder: Path  # cache/, source/
    command: tuple[str, ...]  # of the command line, up to --into
    rows: frozenset[str] = field(repr=False)
    files: dict[str, str] = field(repr=False)  # the SHA-256 of every chunk, by key

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def source(self) -> Path:
        return self.folder / "source"

    def build(self, root: Path, *more: str) -> tuple[str, ...]:
        return ("build", *self.command, "--into", str(root), "--workers", "0", *more)

    def copied(self, root: Path) -> Path:
        shutil.copytree(self.cache, root, symlinks=True)
        return root


def make_worlds(folder: Path, seed: int) -> list[World]:
    """Raw lines under every codec, one of them grown once; images; packed tokens; conversations; preferences."""
    found = [_raw_world(folder, codec, seed) for codec in ("none", "lz4", "zstd")]
    found.append(_grown_world(folder, seed))
    found.append(_image_world(folder, seed))
    found.append(_token_world(folder, seed))
    found.append(_chat_world(folder, seed))
    found.append(_preference_world(folder, seed))
    return found


def lines_of(seed: int, count: int) -> list[bytes]:
    draw = random.Random(seed)
    return [b"%d " % number + draw.randbytes(draw.randrange(60)).hex().encode() for number in range(count)]


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def raw_command(source: Path, codec: str = "zstd") -> tuple[str, ...]:
    small = ("--chunk-bytes", "600", "--rows-per-block", "3", "--codec", codec)
    return ("raw", str(source / "*.txt"), "--unit", "lines", *small)


def _raw_world(folder: Path, codec: str, seed: int) -> World:
    place = folder / f"raw-{codec}"
    for number in range(2):
        write_lines(place / f"source/{number}.txt", lines_of(seed + number, LINES_PER_FILE))
    world = _made(f"raw-{codec}", place, raw_command(place / "source", codec))
    lines = [line.decode() for number in range(2) for line in lines_of(seed + number, LINES_PER_FILE)]
    assert _must(run_call(lambda: _texts(world.cache))).answer == lines, "the pristine rows are not the lines"
    return world


def _texts(root: Path) -> list[str]:
    data = fb.open_cache(root).read(np.arange(2 * LINES_PER_FILE), columns=["data"])["data"]
    return [bytes(data[row]).decode() for row in range(len(data))]


def _grown_world(folder: Path, seed: int) -> World:
    place = folder / "grown"
    write_lines(place / "source/0.txt", lines_of(seed + 10, LINES_PER_FILE))
    command = raw_command(place / "source")
    _must(run_verb("build", *command, "--into", str(place / "cache"), "--workers", "0"))
    shutil.copytree(place / "cache", place / "before")
    write_lines(place / "source/1.txt", lines_of(seed + 11, LINES_PER_FILE))
    _must(run_verb("update", str(place / "cache"), str(place / "source/*.txt"), "--workers", "0"))
    return _made("grown", place, command)


def _image_world(folder: Path, seed: int) -> World:
    place = folder / "images"
    draw = np.random.default_rng(seed)
    (place / "source").mkdir(parents=True)
    for number in range(12):
        pixels = draw.integers(0, 256, (8 + number, 20 - number, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"source/{number:02d}.png")
    return _made("images", place, ("images", str(place / "source"), "--size", "32", "--chunk-bytes", "2000"))


def _token_world(folder: Path, seed: int) -> World:
    place = folder / "tokens"
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(5, 60))) for _ in range(60)]
    write_lines(place / "source/a.jsonl", [b'{"text": "%s"}' % text.encode() for text in texts])
    vocabulary = place / "tokenizer.json"  # loads in no time, as gpt2 does not
    _tokenizer(WORDS).save(str(vocabulary))
    small = ("--sequence-length", "64", "--chunk-rows", "8", "--deduplicate", "--tokenizer", str(vocabulary))
    return _made("tokens", place, ("tokens", str(place / "source/a.jsonl"), *small))


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _chat_world(folder: Path, seed: int) -> World:
    draw = random.Random(seed)
    turns = [[("user", _saying(draw)), ("assistant", _saying(draw))] * draw.randrange(1, 3) for _ in range(30)]
    records = [{"messages": [{"role": role, "content": said} for role, said in turn]} for turn in turns]
    return _templated_world("chat", folder, records)


def _preference_world(folder: Path, seed: int) -> World:
    draw = random.Random(seed)
    records = [{"prompt": _saying(draw), "chosen": _saying(draw), "rejected": _saying(draw)} for _ in range(30)]
    return _templated_world("preferences", folder, records)


def _templated_world(kind: str, folder: Path, records: list[dict[str, Any]]) -> World:
    place = folder / kind
    write_lines(place / "source/a.jsonl", [json.dumps(record).encode() for record in records])
    (place / "tokenizer").mkdir(exist_ok=True)
    learned = _tokenizer(WORDS)
    learned.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    learned.save(str(place / "tokenizer/tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (place / "tokenizer/tokenizer_config.json").write_text(json.dumps(config))
    small = ("--sequence-length", "128", "--chunk-rows", "8", "--tokenizer", str(place / "tokenizer"))
    return _made(kind, place, (kind, str(place / "source/a.jsonl"), *small))


WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away")


def _saying(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randrange(2, 12)))


def _tokenizer(words: Iterable[str]) -> tokenizers.Tokenizer:
    """Byte pairs learned from a few words."""
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    learned.train_from_iterator(words, trainer)
    return learned


def _made(name: str, place: Path, command: tuple[str, ...]) -> World:
    cache = place / "cache"
    if not cache.exists():
        _must(run_verb("build", *command, "--into", str(cache), "--workers", "0", seconds=120))
    reading = run_call(lambda: read_rows(cache), seconds=READ_SECONDS)
    answer = _must(reading).answer
    assert not answer["errors"], answer
    return World(name, place, command, frozenset(answer["rows"]), chunk_digests(cache))


def _must(ending: Ending) -> Ending:
    if ending.code != 0:
        raise RuntimeError(f"a world could not be made: {ending.output}")
    return ending


def chunk_digests(root: Path) -> dict[str, str]:
    """The SHA-256 of every chunk file, by its key."""
    found = sorted(path for path in (root / "layers").glob("*/[0-9]*.safetensors") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


MOST_ROWS = 1_000_000


def read_rows(root: Path | str, tier: Path | None = None) -> dict[str, Any]:
    """Every row of a cache, asked for by itself and then all at once: digests, and the errors that were met.

    Only `ForebayError` counts as an answer; anything else is raised.
    """
    rows: list[str] = []
    errors: list[str] = []
    try:
        cache = fb.open_cache(root, tier=tier)
        draw = np.random.default_rng(0)
        # A crafted generation may promise more rows than there is memory to number them.
        numbers = draw.permutation(len(cache)) if len(cache) < MOST_ROWS else draw.integers(len(cache), size=100)
        for number in numbers.tolist():
            try:
                rows += _digests(cache.read([number]))
            except ForebayError as error:
                errors.append(type(error).__name__)
        if not errors:
            together = _digests(cache.read(numbers)) if len(numbers) else []
            if together != rows:
                rows.append("rows read together differ from rows read one by one")
    except ForebayError as error:
        errors.append(type(error).__name__)
    return {"rows": rows, "errors": errors}


def _digests(columns: dict[str, Any]) -> list[str]:
    """A digest per row over all columns, in the order of their names."""
    names = sorted(columns)
    count = len(columns[names[0]]) if names else 0
    return [_digest([_row_bytes(columns[name], row) for name in names]) for row in range(count)]


def _row_bytes(column: Any, row: int) -> bytes:
    value = column[row] if isinstance(column, Ragged) else np.asarray(column)[row]
    return bytes(np.ascontiguousarray(value).tobytes())


def _digest(pieces: list[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


class Canary:
    """A tree beside the cache that nothing may touch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("000000.safetensors", "recipe.json", "thesis.txt", "deep/000001.safetensors", "deep/note"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"this is {name} of somebody else")
        os.utime(folder / "thesis.txt", (0, 0))
        self._before = self._state()

    def changes(self) -> list[str]:
        now = self._state()
        return sorted(name for name in now.keys() | self._before.keys() if now.get(name) != self._before.get(name))

    def _state(self) -> dict[str, tuple[int, str]]:
        return {
            str(path.relative_to(self.folder)): (path.stat().st_mtime_ns, _content(path))
            for path in sorted(self.folder.rglob("*"))
        }


class Doorbell:
    """A port that a crafted cache names as the address of a hub: nobody may call there."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._socket.setblocking(False)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def calls(self) -> list[str]:
        """What was sent there since the last look."""
        found: list[str] = []
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return found
            with connection:
                connection.settimeout(1.0)
                try:
                    found.append(connection.recv(2000).decode("utf-8", "replace"))
                except OSError:
                    found.append("a connection")


@cache
def doorbell() -> Doorbell:
    return Doorbell()


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
