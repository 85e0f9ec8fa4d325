"""Every page on caches of each kind, in a real browser: what it says is what the records say."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.cache_files import CacheFiles, flip
from tests.viewer.conftest import PRINTED, Open

import forebay as fb
from forebay.masks.documents import labels

pytestmark = pytest.mark.slow


def test_the_chunk_map_opens_a_chunk_and_its_rows(view: Open, token_root: Path) -> None:
    opened = view(token_root)
    page = opened.go("0/chunks")
    chunks = fb.info(token_root).planned_chunks
    assert f"published {chunks}" in opened.text()
    box = page.locator("canvas.map").bounding_box()
    page.mouse.move(box["x"] + 30, box["y"] + 5)
    page.wait_for_selector("[data-layer] .readout:has-text('chunk 1: published')")
    page.mouse.click(box["x"] + 30, box["y"] + 5)
    page.wait_for_selector("text=Chunk 1 of layer tokens")
    assert page.url.endswith("layer=tokens&chunk=1")
    page.click("text=/Show its rows/")
    opened.ready("rows")
    assert page.inner_text("h1") == f"Row {fb.open_cache(token_root).chunk_starts[1]:,}"
    opened.check()


def test_a_row_of_tokens_shows_text_labels_and_documents(view: Open, token_root: Path) -> None:
    cache = fb.open_cache(token_root)
    opened = view(token_root)
    page = opened.go("0/rows?row=1")
    row = cache[1]
    used = int(row["seq_lens"].sum())
    spans = page.locator(".tokens span")
    assert spans.count() == len(row["tokens"])
    text = page.evaluate("[...document.querySelectorAll('.tokens span')].map((one) => one.textContent).join('')")
    for piece in cache.text(1):
        assert piece.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b").strip() in text.replace("\u2009", "")
    expected = labels(row["tokens"][None], row["seq_lens"][None].astype(np.int64))[0]
    page.locator(".tokens").focus()
    for at in (0, 1):
        page.keyboard.press("ArrowRight")
        shown = page.inner_text(".readout")
        assert shown.startswith(f"token {at}: id {row['tokens'][at]} ")
        assert f"label {expected[at]}" in shown
    colors = page.evaluate("[...document.querySelectorAll('.tokens span')].map((one) => one.className.split(' ')[0])")
    assert colors == [f"d{at % 6}" for at, length in enumerate(row["seq_lens"]) for _ in range(length)] + ["pad"] * (
        len(row["tokens"]) - used
    )
    opened.check()


def test_texts_of_a_cache_never_become_elements(view: Open, token_root: Path, raw_root: Path) -> None:
    opened = view(token_root, raw_root)
    for where in ("0/overview", "0/chunks", "0/rows?row=0", "1/overview", "1/rows?row=0"):
        page = opened.go(where)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img[src=x]").count() == 0
        assert "\u202e" not in opened.text()
    assert PRINTED in opened.text()


def test_a_damaged_chunk_is_shown_as_damaged_and_the_rest_goes_on(view: Open, token_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    shutil.copytree(token_root, root)
    damaged = CacheFiles(root).chunk(1)
    flip(damaged, damaged.stat().st_size - 1)  # in the last block: the header is as it was
    cache = fb.open_cache(root)
    first, after = int(cache.chunk_starts[1]), int(cache.chunk_starts[2])
    opened = view(root)
    for row in range(first, after):
        opened.go(f"0/rows?row={row}")
        if opened.page.locator(".box.bad").count():
            break
    assert "Damaged" in opened.text()
    assert "chunk 1" in opened.text()
    opened.go(f"0/rows?row={after}")
    assert opened.page.locator(".tokens").count() == 1
    opened.go("0/chunks?layer=tokens&chunk=1")
    assert "bad 1" in opened.text()
    opened.go("0/overview")
    assert "forebay repair" in opened.text()
    opened.check()


def test_an_empty_cache_and_a_damaged_index_have_pages(view: Open, tmp_path: Path, token_root: Path) -> None:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.mkdir()
    (empty / "cache.json").write_bytes((token_root / "cache.json").read_bytes())
    shutil.copytree(token_root, broken)
    newest = sorted((broken / "generations").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-40])
    opened = view(empty, broken)
    for where in ("0/overview", "0/chunks", "0/rows", "1/overview", "1/chunks", "1/rows"):
        opened.go(where)
        assert "published yet" in opened.text() or opened.page.locator(".box").count()
    opened.check()
