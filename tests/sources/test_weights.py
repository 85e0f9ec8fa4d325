"""What a stream weighs is judged for little, and does not depend on who asks."""

import bz2
import gzip
import lzma
import os
import random
from collections.abc import Callable
from functools import cache, partial

import pytest
import zstandard
from tests.sources.written import write

import forebay as fb

WORDS = [os.urandom(3).hex() for _ in range(3000)]


@cache
def text_of(size: int, seed: int = 0) -> bytes:
    """Lines of words, compressed about as text is."""
    chosen = random.Random(seed).choices(WORDS, k=size // 7)
    return b"\n".join(" ".join(chosen[at : at + 12]).encode() for at in range(0, len(chosen), 12)) + b"\n"


def unsized(content: bytes) -> bytes:
    """A Zstandard frame that does not say how much it holds."""
    return zstandard.ZstdCompressor(level=3, write_content_size=False).compress(content)


def in_pieces(compress: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """A file of many members or frames."""
    return lambda text: b"".join(compress(text[at : at + 300_000]) for at in range(0, len(text), 300_000))


LAYOUTS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gz, one member": (".gz", gzip.compress),
    "gz, many members": (".gz", in_pieces(gzip.compress)),
    "gz, a short last member": (".gz", lambda text: gzip.compress(text[:-100]) + gzip.compress(text[-100:])),
    "gz, padded with zeros": (".gz", lambda text: gzip.compress(text) + bytes(512)),
    "zst, sized": (".zst", zstandard.compress),
    "zst, unsized": (".zst", unsized),
    "zst, many frames": (".zst", in_pieces(zstandard.compress)),
    "bz2": (".bz2", bz2.compress),
    "xz": (".xz", partial(lzma.compress, preset=1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [20_000, 3_000_000])
def test_a_stream_is_judged_close_to_what_it_holds(tmp_path, layout, size):
    ending, stored = LAYOUTS[layout]
    text = text_of(size)
    (tmp_path / f"a.txt{ending}").write_bytes(stored(text))
    source = fb.sources.lines(tmp_path)
    (file,) = source.files()
    assert 0.8 < source.weight(file) / len(text) < 1.2


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("content", [b"", b"\n", b"a\n"])
def test_next_to_nothing_weighs_next_to_nothing(tmp_path, ending, content):
    source = fb.sources.lines(write(tmp_path, f"a.txt{ending}", content))
    assert 0 <= source.weight(source.files()[0]) <= len(content)
