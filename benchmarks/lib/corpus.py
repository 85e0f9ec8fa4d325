"""Text to build from: JSON lines whose documents are all different."""

import gzip
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

MB = 1_000_000
FILES = 8
FALLBACK_WORDS = 20_000  # without a folder of text


class Document(msgspec.Struct):
    text: str


def documents(folder: Path | None) -> list[str]:
    """The documents of a folder of JSON lines; without one, made-up sentences."""
    if folder is None:
        return list(_made_up(random.Random(0)))
    paths = sorted(folder.glob("*.jsonl*"))
    return [msgspec.json.decode(line, type=Document).text for path in paths for line in _lines(path)]


def _lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()


def _made_up(draw: random.Random) -> Iterator[str]:
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(FALLBACK_WORDS)]
    for _ in range(5000):
        yield ". ".join(" ".join(draw.choices(words, k=draw.randint(5, 25))) for _ in range(draw.randint(3, 60))) + "."


def write_unique(folder: Path, originals: list[str], megabytes: float) -> None:
    """About so much text: each document mixes sentences of others, so none repeats and all words are real."""
    draw, encode = random.Random(0), msgspec.json.Encoder().encode
    sentences = [sentence for text in originals for sentence in text.split(". ") if sentence.strip()]
    lengths = [max(1, text.count(". ") + 1) for text in originals]
    folder.mkdir()
    for number in range(FILES):
        with (folder / f"part-{number}.jsonl").open("wb") as file:
            while file.tell() < megabytes * MB / FILES:
                count = draw.choice(lengths)
                file.write(encode(Document(". ".join(draw.choices(sentences, k=count)))) + b"\n")


def write_unseen_words(folder: Path, megabytes: float) -> None:
    """Text of random letters: no word occurs twice, so an encoder's memory of words is of no use."""
    draw, encode = random.Random(1), msgspec.json.Encoder().encode
    folder.mkdir()
    for number in range(FILES):
        with (folder / f"part-{number}.jsonl").open("wb") as file:
            while file.tell() < megabytes * MB / FILES:
                letters = draw.choices("abcdefghijklmnopqrstuvwxyz      ", k=4000)
                file.write(encode(Document("".join(letters))) + b"\n")


def size(files: list[Path]) -> float:
    """In MB."""
    return sum(file.stat().st_size for file in files) / MB
