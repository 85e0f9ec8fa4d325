"""Old caches that are small on disk and large in memory, or take for ever: refused before anything is made of them."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.compat.pt_import import read_parts
from forebay.errors import SourceInvalid

ROWS = 3


def encodings(rows: int = ROWS, **others: torch.Tensor) -> dict[str, Any]:
    made = {
        "latents": torch.zeros(rows, 2, 4, 4),
        "t5_embeds": torch.zeros(rows, 3, 8),
        "clip_pooled": torch.zeros(rows, 8),
    }
    return {"name": "old", "encodings": made | others}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def refused(path: Path, words: str) -> None:
    with pytest.raises(SourceInvalid, match=words) as raised:
        read_parts(path)
    assert "\n" not in raised.value.message


def test_what_torch_writes_is_read(tmp_path):
    shared = torch.linspace(0.1, 0.9, 4)
    content = encodings() | {
        "lune": {"features": torch.zeros(ROWS, 4, 5), "t_buckets": shared},
        "sol": {"stats": torch.zeros(ROWS, 4, 4), "spatial": torch.zeros(ROWS, 4, 8, 8), "t_buckets": shared},
    }
    path = saved(tmp_path / "a.pt", content)
    _, parts = read_parts(path)
    assert len(parts["lune"]["features"]) == ROWS


@pytest.mark.parametrize("name", ["latents", "t5_embeds", "clip_pooled"])
def test_a_tensor_that_says_it_is_larger_than_its_file_is_refused(tmp_path, name):
    rows = 1 << 40
    wide = {
        "latents": torch.zeros(1, 1, 1, 1).expand(rows, 2, 4, 4),
        "t5_embeds": torch.zeros(1, 1, 1).expand(rows, 3, 8),
        "clip_pooled": torch.zeros(1, 1).expand(rows, 8),
    }
    path = saved(tmp_path / "a.pt", encodings(**{name: wide[name]}))
    assert path.stat().st_size < 10_000
    refused(path, f"'encodings.{name}' declares more values than the file holds")


def test_rows_of_nothing_are_refused(tmp_path):
    path = saved(tmp_path / "a.pt", encodings(clip_pooled=torch.zeros(1 << 40, 0)))
    refused(path, "is not a dense tensor of floats with rows")


def repacked(path: Path, change: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """A file of torch.save with other entries in it, compressed or not."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    entries |= {name: change[short] for name in entries for short in change if name.endswith(short)}
    with zipfile.ZipFile(path, "w", method) as new:
        for name, content in entries.items():
            new.writestr(name, content)
    return path


def test_a_compressed_archive_is_refused(tmp_path):
    path = saved(tmp_path / "a.pt", encodings())
    refused(repacked(path, {"data/0": bytes(300 << 20)}, zipfile.ZIP_DEFLATED), "compressed")


def test_a_pickle_that_is_long_is_refused(tmp_path):
    path = saved(tmp_path / "a.pt", encodings())
    refused(repacked(path, {"data.pkl": pickle.dumps(["x"] * 3_000_000, 2)}), "its index is longer than")


def nested(levels: int) -> tuple[Any, ...]:
    inner: tuple[Any, ...] = (1,)
    for _ in range(levels):
        inner = (inner, inner)
    return inner


def test_tuples_within_tuples_that_take_for_ever_to_hash_are_refused(tmp_path):
    pickled = io.BytesIO()
    pickler = pickle.Pickler(pickled, 2)
    pickler.dump(nested(60))  # of which a dict's key takes 2 ** 60 steps
    body = pickled.getvalue()
    key = b"\x80\x02}" + body[2:-1] + b"K\x01s."
    path = repacked(saved(tmp_path / "a.pt", encodings()), {"data.pkl": key})
    refused(path, "it uses a list or tuple more than once")


def test_what_is_not_a_file_of_torch_is_still_refused(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"text, and no pickle at all")
    refused(tmp_path / "a.pt", "not a file of torch.save")
    (tmp_path / "b.pt").write_bytes(b"")
    refused(tmp_path / "b.pt", "not a file of torch.save")
