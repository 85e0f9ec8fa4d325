"""The data itself: sample rows, distributions, documents with their lines, turns, search, and code to copy."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.cache_files import CacheFiles, flip
from tests.helpers.many_chunks import many_chunks
from tests.viewer.conftest import Open
from tests.viewer.test_view_chat import TRAINED
from tests.viewer.test_view_chat import chat_root as chat_root

import forebay as fb
from forebay.masks.train_on import TrainOn, token_weights
from forebay.viewer import row_search
from forebay.viewer.distribution import Distribution, distribution, repetition
from forebay.viewer.row_search import SearchResult, search_rows
from forebay.viewer.shown_cache import Query, ShownCache

pytestmark = pytest.mark.slow


def _source(token_root: Path) -> fb.Source:
    return fb.sources.jsonl(token_root.parent / "raw" / "*.jsonl", text="text")


def _searched(root: Path, text: str) -> list[SearchResult]:
    """The answers to one search, until the end of the cache."""
    shown, found, row = ShownCache.of(root), list[SearchResult](), 0
    while True:
        found.append(search_rows(shown, Query((("text", text), ("row", str(row))))))
        following = found[-1].next
        if following is None:
            return found
        assert following > row
        row = following


def test_overview_opens_with_health_three_rows_and_histograms(view: Open, token_root: Path) -> None:
    opened = view(token_root)
    page = opened.go("0/overview")
    headings = page.locator("h2").all_inner_texts()
    assert headings[:3] == ["Sample rows", "Lengths and padding", "Rows that stand out"]
    rows = [int(text.removeprefix("Row ")) for text in page.locator(".sample h3").all_inner_texts()]
    assert len(set(rows)) == 3
    for at, row in enumerate(fb.peek(token_root, rows).shown):
        begin = str(row.pieces[0].text).split("\u202e")[0][:30].strip()
        assert begin in page.locator(".sample").nth(at).inner_text()
    assert page.locator(".histogram").count() == 3
    assert page.evaluate("window.hacked") is None
    summary = fb.info(token_root)
    padding = f"{100 * summary.layers[0].figures['padding_share']:.2f}%"
    for shown in (f"{summary.rows:,}", summary.cache_id, summary.digest, "sequence_length", "gpt2", padding):
        assert shown in opened.text()
    assert "Failed samples: 1" in opened.text()
    page.click("text=Other rows")
    page.click(".sample a >> nth=0")
    opened.ready("rows")
    opened.check()


@pytest.mark.parametrize("kind", ["images", "raw", "taught"])
def test_overview_of_every_kind_opens_with_rows(
    view: Open, image_root: Path, raw_root: Path, taught_root: Path, kind: str
) -> None:
    opened = view({"images": image_root, "raw": raw_root, "taught": taught_root}[kind], width=390, scheme="dark")
    page = opened.go("0/overview")
    assert page.locator(".sample").count() == 3
    assert page.locator(".histogram").count() >= 2
    opened.check()


def test_distribution_counts_documents_and_ranks_rows(token_root: Path) -> None:
    cache = fb.open_cache(token_root)
    lengths = cache.read(np.arange(len(cache)), ["seq_lens"])["seq_lens"]
    found: Any = distribution(ShownCache.of(token_root), Query(()))
    assert isinstance(found, Distribution)
    assert found.sampled == found.rows == len(cache)
    of_documents = found.histograms[0]
    assert (of_documents.name, sum(of_documents.counts)) == ("tokens per document", len(lengths.values))
    assert of_documents.median == np.median(lengths.values)
    padding = 1 - np.add.reduceat(lengths.values.astype(np.int64), lengths.offsets[:-1]) / 128
    worst = found.rankings[0]
    assert worst.name == "most padding"
    assert [one.value for one in worst.rows] == pytest.approx(
        sorted(padding, reverse=True)[: len(worst.rows)], abs=1e-4
    )
    assert found.failures[0].failures == 1


def test_repeated_text_ranks_above_other_text() -> None:
    chance = np.random.default_rng(0)
    assert repetition(chance.integers(0, 50_000, 512)) < 0.01
    assert repetition(np.tile(chance.integers(0, 50_000, 8), 64)) > 0.95
    assert repetition(np.arange(3)) == 0


def test_documents_are_blocks_with_their_file_and_line(view: Open, token_root: Path) -> None:
    opened = view(token_root, source=_source(token_root))
    page = opened.go("0/rows?row=1")
    blocks = page.locator(".block:has(.begins)")
    (row,) = fb.peek(token_root, [1], source=_source(token_root)).shown
    assert blocks.count() == len(row.pieces)
    for at, piece in enumerate(row.pieces):
        file, _, offset = piece.source.rpartition("@")
        line = (token_root.parent / "raw" / file).read_bytes()[: int(offset)].count(b"\n") + 1
        assert f"document {at + 1} · {file} line {line} · {piece.tokens} tokens" in blocks.nth(at).inner_text()
    opened.check()


def test_rows_without_a_source_name_the_file_of_their_chunk(view: Open, raw_root: Path, token_root: Path) -> None:
    opened = view(token_root)
    opened.go("0/rows?row=0")
    assert "document 1 · part-0.jsonl · " in opened.text()
    assert "pass --source to forebay view" in opened.text()
    opened.check()


def test_train_on_switch_redraws_what_the_loader_would_train(view: Open, chat_root: Path) -> None:
    cache = fb.open_cache(chat_root)
    read: Any = cache.read([0], ["spans", "last_turn", "seq_lens"])
    spans, last, lengths = (read[name] for name in ("spans", "last_turn", "seq_lens"))
    opened = view(chat_root)
    page = opened.go("0/rows?row=0")
    assert page.locator(".turn.by-assistant").count() == 2 * len(lengths[0])
    for name, policy in (("last turn", TrainOn(turns="last")), ("answers", TrainOn.of(("response", "stop")))):
        page.select_option("[name=train]", label=name)
        weights = token_weights(spans.values, spans.offsets, lengths[0][None], last.values, 768, policy)[0]
        assert page.evaluate(TRAINED) == (weights > 0).tolist()
        assert f"({int((weights > 0).sum())} trained)" in opened.text()
    assert "train=answers" in page.url
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    opened.ready("rows")
    assert page.evaluate(TRAINED) == (weights > 0).tolist()
    opened.check()


def test_search_goes_through_all_chunks_in_bounded_steps(token_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = fb.open_cache(token_root)
    expected = [row for row in range(len(cache)) if any("café" in text.lower() for text in cache.text(row))]
    assert len({int(one) for one in cache.chunk_positions(np.array(expected))}) > 1
    whole = _searched(token_root, "CAFÉ")
    assert [hit.row for found in whole for hit in found.hits] == expected
    monkeypatch.setattr(row_search, "SCAN_SECONDS", 0.0)
    steps = _searched(token_root, "CAFÉ")
    assert len(steps) == len(cache.chunk_numbers)  # at least one chunk at a time
    assert [hit.row for found in steps for hit in found.hits] == expected


def test_search_skips_a_damaged_chunk_and_names_its_rows(token_root: Path, tmp_path: Path) -> None:
    shutil.copytree(token_root, tmp_path / "cache")
    damaged = CacheFiles(tmp_path / "cache").chunk(1)
    flip(damaged, damaged.stat().st_size // 2)
    cache = fb.open_cache(token_root)
    first, stop = (int(one) for one in cache.chunk_starts[1:3])
    (found,) = _searched(tmp_path / "cache", "hostile")
    expected = [hit.row for hit in _searched(token_root, "hostile")[0].hits]
    assert [hit.row for hit in found.hits] == [row for row in expected if not first <= row < stop]
    assert found.notes[0].startswith(f"rows {first} to {stop - 1} were skipped: ")


def test_search_on_the_page_shows_progress_and_leads_to_rows(view: Open, token_root: Path) -> None:
    opened = view(token_root)
    page = opened.go("0/rows?row=0")
    page.fill("[name=text]", "HOSTILE <img")
    page.click("text=Search >> nth=-1")
    rows = len(fb.open_cache(token_root))
    page.wait_for_selector(f"text={rows} of {rows} rows searched")
    assert page.locator("progress").evaluate("(one) => one.value") == 1
    assert set(page.locator("mark").all_inner_texts()) == {"hostile <img"}
    page.click(".hits a >> nth=0")
    page.wait_for_selector(".tokens:has-text('hostile')")
    assert "text=HOSTILE" in page.url
    opened.check()


def test_python_of_every_page_runs_and_is_copied(view: Open, token_root: Path, taught_root: Path) -> None:
    opened = view(token_root, taught_root)
    for address in ("0/overview", "0/rows?row=1", "0/chunks", "0/training?batch=4", "1/teachers?row=2", "1/rows?row=2"):
        page = opened.go(address)
        page.click(".python summary")
        code = page.inner_text(".python pre")
        exec(compile(code, address, "exec"), {})
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click(".python button")
    assert page.evaluate("window.copied") == code
    assert page.inner_text(".python button") == "Copied"
    opened.check()


@pytest.mark.parametrize(("shuffle", "compares"), [("global", False), ("window", True)])
def test_training_page_compares_only_what_is_not_random(
    view: Open, token_root: Path, shuffle: str, compares: bool
) -> None:
    opened = view(token_root)
    page = opened.go(f"0/training?shuffle={shuffle}")
    assert page.locator(".plot").count() == (2 if compares else 1)
    assert ("a random order has 100%" in opened.text()) == compares
    opened.check()


def test_overview_lists_missing_chunks_with_their_space(view: Open, tmp_path: Path) -> None:
    root = many_chunks(tmp_path, 60, 40)
    for number, path in CacheFiles(root).chunks().items():
        os.utime(path, (1_700_000_000 + 2 * number,) * 2)
    opened = view(root)
    page = opened.go("0/overview")
    assert "Incomplete · 20 chunks of 60 missing" in page.inner_text(".health")
    gap = page.locator("section:has(h2:text-is('Missing chunks')) td").all_inner_texts()
    each = sum(path.stat().st_size for path in CacheFiles(root).chunks().values()) / 40
    assert gap[:3] == ["raw", "20", "40–59"]
    assert gap[3] == f"about {20 * each / 1000:.1f} kB"
    assert gap[4] == "about 40 s"
    opened.check()


def test_arrow_keys_step_through_images(view: Open, image_root: Path) -> None:
    opened = view(image_root)
    page = opened.go("0/images?row=3&one=1")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("dd:text-is('4 of 11')")
    page.evaluate("Math.random = () => 0")
    page.keyboard.press("r")
    page.wait_for_selector("dd:text-is('0 of 11')")
    opened.check()
