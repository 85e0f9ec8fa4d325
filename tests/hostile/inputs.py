"""Hostile sources, manifests, tokenizers, answers of a hub and old caches, and the commands that meet them."""

import bz2
import gzip
import json
import lzma
import os
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tests.campaign.oracle import Trial, as_record
from tests.campaign.trial import remove, run_verb

from forebay.tokens.vocabulary import GPT2, load_vocabulary

SECONDS = 10.0
Commands = list[tuple[str, ...]]
Make = Callable[[Path, Path], Commands]  # where to put it, where a cache may go -> what to run
GIB = 1 << 30
SQUEEZERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.compressobj(1, wbits=31),
    ".bz2": lambda: bz2.BZ2Compressor(1),
    ".xz": lambda: lzma.LZMACompressor(preset=0),
    ".zst": lambda: zstandard.ZstdCompressor(level=1).compressobj(),
}


def _zeros(size: int, piece: bytes = b"a" * (1 << 20)) -> Iterable[bytes]:
    return (piece for _ in range(size // len(piece)))


def _stream(ending: str, size: int) -> Make:
    """One line that unpacks to very much."""

    def make(folder: Path, root: Path) -> Commands:
        path = folder / f"a.jsonl{ending}"
        squeezer = SQUEEZERS[ending]()
        path.write_bytes(b"".join(map(squeezer.compress, _zeros(size))) + squeezer.flush())
        return [("estimate", "tokens", str(path)), _build("tokens", path, root), _build("raw", path, root)]

    return make


def _build(kind: str, path: Path, root: Path, *more: str) -> tuple[str, ...]:
    return ("build", kind, str(path), "--into", str(root / f"{kind}-{path.name}"), "--workers", "0", *more)


def _dictionary(folder: Path, root: Path) -> Commands:
    """A text of 64 MB that a file of 2 kB holds for 2,000 rows."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * (64 << 20)]))
    pq.write_table(pa.table({"text": text}), folder / "a.parquet", compression="zstd")
    return [("estimate", "tokens", str(folder / "a.parquet")), _build("tokens", folder / "a.parquet", root)]


def _one_cell(folder: Path, root: Path) -> Commands:
    size = 300 << 20
    text = pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, size)), pa.py_buffer(b"y" * size))
    table = pa.table({"text": text})
    path = folder / "a.parquet"
    pq.write_table(table, path, compression="zstd", compression_level=1, use_dictionary=False, write_statistics=False)
    return [_build("tokens", path, root)]


def _one_page(text: Callable[[], str], rows: int) -> Make:
    """Texts that a small file has in one page, which is unpacked as a whole."""

    def make(folder: Path, root: Path) -> Commands:
        table = pa.table({"text": [text()] * rows})
        pq.write_table(table, folder / "a.parquet", compression="zstd", use_dictionary=False)
        return [_build("tokens", folder / "a.parquet", root)]

    return make


def _equal_texts(text: Callable[[], str], rows: int) -> Make:
    """A text that a small file holds for some rows."""

    def make(folder: Path, root: Path) -> Commands:
        table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text()]))})
        pq.write_table(table, folder / "a.parquet", compression="zstd")
        return [("estimate", "tokens", str(folder / "a.parquet")), _build("tokens", folder / "a.parquet", root)]

    return make


def _text_file(text: Callable[[], str], *more: str) -> Make:
    def make(folder: Path, root: Path) -> Commands:
        (folder / "a.txt").write_text(text())
        return [_build("tokens", folder / "a.txt", root, *more)]

    return make


def _packed_lines(text: Callable[[], str]) -> Make:
    def make(folder: Path, root: Path) -> Commands:
        content = json.dumps({"text": text()}, ensure_ascii=False).encode() + b"\n"
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(content, 1))
        return [_build("tokens", folder / "a.jsonl.gz", root)]

    return make


def _whole_texts(folder: Path, root: Path) -> Commands:
    """A tokenizer that gets texts whole, and the encoder that takes most memory for them."""
    document = json.loads(load_vocabulary(GPT2).json)
    split = {"type": "Split", "pattern": {"Regex": r"\s+|\S+"}, "behavior": "Isolated", "invert": False}
    document["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, {**document["decoder"], "use_regex": False}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "a.txt").write_text("a " * 749_000)
    (folder / "b.txt").write_text("a " * (8 << 20))
    whole = ("--tokenizer", str(folder / "tokenizer.json"), "--encoder", "tokenizers")
    return [_build("tokens", folder / name, root, *whole) for name in ("a.txt", "b.txt")]


def _flipped_parquet(folder: Path, root: Path) -> Commands:
    draw = random.Random(3)
    table = pa.table({"text": [f"document {number} " * 20 for number in range(200)]})
    pq.write_table(table, folder / "whole.parquet")
    whole = (folder / "whole.parquet").read_bytes()
    (folder / "whole.parquet").unlink()
    commands = []
    for number in range(6):
        damaged = bytearray(whole)
        for _ in range(3):
            at = draw.randrange(len(damaged) - 400, len(damaged)) if number % 2 else draw.randrange(len(damaged))
            damaged[at] ^= 1 << draw.randrange(8)
        path = folder / f"{number}.parquet"
        path.write_bytes(damaged)
        commands.append(_build("tokens", path, root))
    return commands


def _png(width: int, height: int) -> bytes:
    """Transparent pixels without end, in few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = bytes(1 + 4 * width)
    squeezer = zlib.compressobj(1, wbits=-15)
    packed = squeezer.compress(row) + squeezer.flush(zlib.Z_FULL_FLUSH)  # for every row: none refers to another
    adler = struct.pack(">HH", len(row) * height % 65521, 1)
    data = b"\x78\x01" + packed * height + b"\x03\x00" + adler
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _images(folder: Path, root: Path) -> Commands:
    (folder / "huge.png").write_bytes(_png(61_000, 4_400))  # a gigabyte, and just not what Pillow itself would refuse
    (folder / "largest.png").write_bytes(_png(9_000, 9_000))
    (folder / "film.jpg").write_bytes(b"\xff\xd8" + bytes(4 << 20))
    with (folder / "sparse.png").open("wb") as file:
        file.truncate(GIB)
    (folder / "a.json").write_bytes(b"[" * 200_000)
    return [_build("images", folder, root, "--size", "64")]


def _manifest(folder: Path, root: Path) -> Commands:
    lines = [
        {"path": "../../../etc/passwd"},
        {"path": "/etc/passwd"},
        {"path": "a\0b"},
        {"path": "x" * 100_000},
        {"path": 7},
        {"path": "list.jsonl"},
        {"path": "loop"},
        {"tags": "a"},
    ]
    (folder / "loop").symlink_to(folder / "loop")
    text = "\n".join(map(json.dumps, lines)) + "\n" + "[" * 100_000 + "\n" + '{"path": "' + "y" * (8 << 20) + '"}\n'
    (folder / "list.jsonl").write_text(text)
    return [_build("images", folder / "list.jsonl", root, "--size", "64")]


def _odd_json(folder: Path, root: Path) -> Commands:
    lines = [b"[" * 100_000, b'{"text":' * 50_000, b'{"text": "\\ud800"}', b'{"text": 1e999999}', b"\xff\xfe"]
    lines += [b"9" * 5_000_000, b'{"text": {"text": 1}}', b'{"text": "good"}', b"\0" * 1000, b'{"text": "\x1b[31mred"}']
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    root_arguments = _build("tokens", folder / "a.jsonl", root)
    return [("estimate", "tokens", str(folder / "a.jsonl")), root_arguments, ("status", root_arguments[4])]


def _special_files(folder: Path, root: Path) -> Commands:
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    return [_build("tokens", folder / name, root) for name in ("pipe.jsonl", "zero.jsonl")]


def _tokenizer(folder: Path, root: Path) -> Commands:
    (folder / "a.jsonl").write_text('{"text": "a cat sat on a mat"}\n' * 50)
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    letter = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 3_000_000}
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], "unk_token": "b"}
    commands = []
    for name, steps in (("doubles", [double] * 40), ("book", [letter])):
        path = folder / f"{name}.json"
        normalizer = {"type": "Sequence", "normalizers": steps}
        path.write_text(json.dumps({"version": "1.0", "model": model, "normalizer": normalizer, "added_tokens": []}))
        command = _build("tokens", folder / "a.jsonl", root / name, "--tokenizer", str(path))
        commands.append(command)
    (folder / "deep.json").write_bytes(b"[" * 1_000_000)
    commands.append(_build("tokens", folder / "a.jsonl", root / "deep", "--tokenizer", str(folder / "deep.json")))
    return commands


def _pickles(folder: Path, root: Path) -> Commands:
    """Files that are not what `torch.save` writes; what it writes and should not be believed is in tests/torch."""
    (folder / "code.pt").write_bytes(b"cposix\nsystem\n(S'touch /tmp/forebay-was-here'\ntR.")
    with zipfile.ZipFile(folder / "zipped.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("a/data.pkl", b"cposix\nsystem\n(S'touch /tmp/forebay-was-here'\ntR.")
        archive.writestr("a/data/0", bytes(300 << 20))
    (folder / "deep.pt").write_bytes(b"\x80\x02" + b"(" * 3_000_000 + b".")
    return [("import", str(folder / f"{name}.pt"), "--into", str(root / name)) for name in ("code", "zipped", "deep")]


INPUTS: dict[str, Make] = {
    "line in .gz": _stream(".gz", 400 << 20),
    "line in .zst": _stream(".zst", 3 * GIB),
    "line in .bz2": _stream(".bz2", 40 << 20),
    "line in .xz": _stream(".xz", 200 << 20),
    "parquet dictionary": _dictionary,
    "parquet cell": _one_cell,
    "parquet of one word": _equal_texts(lambda: "x" * (16 << 20), 20),
    "parquet of short words": _equal_texts(lambda: "a " * (8 << 20), 8),
    "parquet of the longest texts": _equal_texts(lambda: "a " * (31 << 20), 4),
    "parquet in four bytes": _equal_texts(lambda: "\U0001f469" + "a " * (31 << 20), 3),
    "parquet page in four bytes": _one_page(lambda: "\U0001f469" + "1," * 15_900_000, 4),
    "parquet page in two bytes": _one_page(lambda: "’" + "1," * (31 << 20), 2),
    "parquet page of long words": _one_page(lambda: "’" + ("!" * 3_900_000 + "a ") * 15, 2),
    "parquet flipped": _flipped_parquet,
    "text of one word": _text_file(lambda: "x" * (62 << 20)),
    "text of spaces": _text_file(lambda: " " * (62 << 20)),
    "text in four bytes": _text_file(lambda: "\U0001f469" + "a " * (31 << 20)),
    "text of long words": _text_file(lambda: ("!" * 3_900_000 + "a ") * 3),
    "line of runs in .gz": _packed_lines(lambda: "\n" * 3_990_000 + "a"),
    "line of other letters in .gz": _packed_lines(lambda: "字，" * (8 << 20)),
    "tokenizer without cuts": _whole_texts,
    "images": _images,
    "manifest": _manifest,
    "odd json": _odd_json,
    "special files": _special_files,
    "tokenizer": _tokenizer,
    "pickles": _pickles,
}


def meet_input(name: str, folder: Path) -> list[dict[str, Any]]:
    """Make one input and run its commands in forked children under limits; what was found."""
    folder.mkdir()
    try:
        trial = Trial(folder, "0", ())
        (folder / "input").mkdir()
        pid = os.fork()  # what making the input takes is not forebay's
        if pid == 0:
            try:
                commands = INPUTS[name](folder / "input", folder / "caches")
                (folder / "commands.json").write_text(json.dumps(commands))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        for command in json.loads((folder / "commands.json").read_text()):
            trial.cause = f"{name}: {command[:2]}"
            trial.judge(" ".join(command[:2]), run_verb(*command, seconds=SECONDS))
            trial.expect_untouched()
        if Path("/tmp/forebay-was-here").exists():
            trial.find("outside", "a pickle ran code")
        return [as_record(each, name, "0") for each in trial.findings]
    finally:
        remove(folder)
