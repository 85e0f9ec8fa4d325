"""Functions to be sources, importable by worker processes."""

import os
from collections.abc import Iterator
from pathlib import Path

CALLS: list[int] = []
FOLDER: list[Path] = []


def numbered(slice_number: int) -> Iterator[str]:
    CALLS.append(slice_number)
    for index in range(slice_number % 4 + 1):
        yield f"document {index} of slice {slice_number} " + "é" * index


def changing(slice_number: int) -> list[str]:
    return [os.environ.get("FOREBAY_TEST_TEXT", "first")]


def mixed(slice_number: int) -> list[object]:
    return ["fine", None, 5, b"bytes", "", "half \ud800", ["a"], "fine too"]


def lines_of_folder(slice_number: int) -> Iterator[str]:
    """The lines of one file of a folder, byte for character."""
    path = sorted(FOLDER[-1].iterdir())[slice_number]
    *finished, rest = path.read_bytes().decode("latin-1").split("\n")
    yield from finished
    if rest:
        yield rest


def one_text(slice_number: int) -> str:
    return "one document, not in a list"


def failing(slice_number: int) -> Iterator[str]:
    yield "fine"
    if slice_number == 7:
        raise ValueError("no such day")


def unreachable(slice_number: int) -> Iterator[str]:
    raise ConnectionResetError("the archive hung up")


class Books:
    @staticmethod
    def pages(slice_number: int) -> list[str]:
        return [f"page {slice_number}"]


nameless = lambda slice_number: ["a"]  # noqa: E731
