"""The text that token benchmarks run on: JSON lines, as they are, or repeated until there is enough of it."""

import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

MB = 1_000_000
FILES = 8  # of a repeated corpus, so that a quarter of it is two files
_LINES_AT_ONCE = 50


class Document(msgspec.Struct):
    text: str


def decompress(folder: Path, into: Path) -> list[Path]:
    """Every `.jsonl.gz` and `.jsonl` of a folder as plain `.jsonl`."""
    into.mkdir()
    made = []
    for path in sorted(folder.glob("*.jsonl*")):
        made.append(into / path.name.removesuffix(".gz"))
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as packed, made[-1].open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    return made


def texts(files: list[Path]) -> Iterator[str]:
    """Every document, in order, parsed by other code than the one that is measured."""
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                yield msgspec.json.decode(line)["text"]


def repeat(files: list[Path], into: Path, megabytes: int) -> list[Path]:
    """Some files of about so much text in all: the documents again and again, each time with another prefix."""
    into.mkdir()
    documents = list(texts(files))
    lines = _prefixed(documents)
    made = [into / f"part-{number}.jsonl" for number in range(FILES)]
    for path in made:
        with path.open("wb") as file:
            while file.tell() < megabytes * MB // FILES:
                file.write(next(lines))
    return made


def _prefixed(documents: list[str]) -> Iterator[bytes]:
    encoder = msgspec.json.Encoder()
    turn = 0
    while True:
        for at in range(0, len(documents), _LINES_AT_ONCE):
            some = documents[at : at + _LINES_AT_ONCE]
            yield encoder.encode_lines([Document(f"{turn}.{at + index} {text}") for index, text in enumerate(some)])
        turn += 1


def beginning(file: Path, into: Path, megabytes: float) -> Path:
    """The first lines of a file, about so much of them."""
    with file.open("rb") as whole, into.open("wb") as part:
        while part.tell() < megabytes * MB and (line := whole.readline()):
            part.write(line)
    return into


def size(files: list[Path]) -> float:
    """In MB."""
    return sum(file.stat().st_size for file in files) / MB
