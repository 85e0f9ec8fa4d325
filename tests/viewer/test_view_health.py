"""Lost and damaged chunks, addresses that lead nowhere, and text that can be read: in a real browser."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cache_files import CacheFiles, cut
from tests.viewer.conftest import PALE_TEXT, Open

import forebay as fb
from forebay.viewer import chunk_map
from forebay.viewer.page_records import bounded

pytestmark = pytest.mark.slow


def _with_damage(root: Path, into: Path) -> Path:
    """A copy without its chunk 0, and with chunk 1 cut short."""
    shutil.copytree(root, into)
    files = CacheFiles(into)
    files.chunk(0).unlink()
    cut(files.chunk(1), -7)
    return into


def test_overview_counts_lost_and_damaged_chunks(view: Open, token_root: Path, tmp_path: Path) -> None:
    opened = view(_with_damage(token_root, tmp_path / "cache"), token_root)
    page = opened.go("0/overview")
    chunks = fb.info(token_root).planned_chunks
    assert f"Damaged · 1 chunk lost, 1 chunk damaged, of {chunks}" in page.inner_text(".box.bad")
    assert f"forebay repair {tmp_path / 'cache'}" in page.inner_text(".box.bad")
    opened.go("0/chunks")
    assert "bad 1" in opened.text()
    assert "lost 1" in opened.text()
    opened.go("0/rows?row=0")
    assert "Damaged" in opened.text()
    assert f" is missing\nhint: run `forebay repair {tmp_path / 'cache'}`" in page.inner_text(".box.bad")
    opened.go("1/overview")
    assert f"Complete · {chunks} chunks" in page.inner_text(".health")
    assert page.locator(".box.bad").count() == 0
    opened.check()


def test_compare_counts_damage_and_does_not_call_lost_chunks_the_same(
    view: Open, token_root: Path, tmp_path: Path
) -> None:
    cache = fb.open_cache(token_root)
    opened = view(token_root, _with_damage(token_root, tmp_path / "cache"))
    page = opened.go("0/compare?b=1")
    cells = page.locator("section:has(h2:text-is('Rows and chunks')) td.number").all_inner_texts()
    chunks = len(cache.chunk_numbers)
    assert cells == [str(one) for one in (chunks - 2, 0, 0, 0, 2)]  # no damage in A, no column about it
    same = len(cache) - int(cache.chunk_starts[2])
    assert f"{same} rows the same, of {len(cache)} in A and {len(cache)} in B" in opened.text()
    assert "B: 2 chunks damaged" in opened.text()
    assert "no file was read" in opened.text()
    opened.check()


def test_compare_leads_with_the_recipe_and_highlights_no_ids(view: Open, token_root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    source = fb.sources.jsonl(token_root.parent / "raw" / "*.jsonl", text="text")
    fb.build(other, source, fb.TokenRecipe(tokenizer="gpt2", sequence_length=64, chunk_rows=8), workers=0)
    opened = view(token_root, other)
    page = opened.go("0/compare?b=1")
    headings = page.locator("h2").all_inner_texts()
    assert headings[:3] == ["Rows and chunks", "Recipe of tokens", "Rows"]
    assert page.locator("td:text-is('sequence_length') + td .differs").inner_text() == "128"
    highlighted = page.locator(".differs").all_inner_texts()
    for identity in (fb.info(token_root).cache_id, fb.info(other).digest):
        assert not any(identity in one for one in highlighted)
    page.click("summary:text-is('Ids and digests')")
    assert fb.info(other).digest in opened.text()
    opened.check()


def test_compared_headers_are_counted_until_all_are(
    view: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_map, "CHECK_SECONDS", 0.005)
    (tmp_path / "lines.txt").write_text("".join(f"{number:08}\n" for number in range(120)))
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "lines.txt"), fb.RawRecipe(chunk_bytes=16), workers=0)
    chunks = len(fb.open_cache(root).chunk_numbers)
    assert chunks > 30
    opened = view(root)
    page = opened.go("0/chunks")
    assert f"{chunks} of {chunks} headers compared" not in opened.text()
    page.wait_for_selector(f"text={chunks} of {chunks} headers compared")
    opened.check()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("9/overview", "There is no such cache"),
        ("x/overview", "There is no such cache"),
        ("0/nothing", "There is no page 'nothing'"),
        ("0/rows?row=999999", "There is no row 999999"),
        ("0/rows?row=-1", "There is no row -1"),
        ("0/chunks?layer=other&chunk=0", "There is no layer 'other'"),
        ("0/compare?b=7", "There is no cache 7"),
    ],
)
def test_address_of_nothing_says_so(view: Open, token_root: Path, address: str, message: str) -> None:
    opened = view(token_root)
    page = opened.go(address)
    assert message in page.inner_text("[data-missing]")
    assert page.locator(".tokens").count() == 0
    opened.check()


def test_address_of_no_image_and_no_teacher_row_says_so(view: Open, image_root: Path, taught_root: Path) -> None:
    opened = view(image_root, taught_root)
    for address in ("0/images?row=5000", "0/images?row=5000&one=1", "1/teachers?row=5000"):
        page = opened.go(address)
        assert "There is no row 5000" in page.inner_text("[data-missing]")
    page = opened.go("1/teachers?layer=other")
    assert "There is no layer 'other'" in page.inner_text("[data-missing]")
    opened.check()


def test_peek_of_a_large_row_is_cut_and_says_so(view: Open, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("short\n" + "x" * 3_000_000 + "\n")
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "lines.txt"), fb.RawRecipe(), workers=0)
    opened = view(root)
    page = opened.go("0/rows?row=1")
    assert "… (2,934,464 more characters)" in opened.text()
    assert "the first 65,536 of 3,000,000 characters" in page.inner_text(".box")
    peeked = page.evaluate("async () => (await fetch('api/0/peek.json?row=1&row=1')).text()")
    assert len(peeked) < 200_000
    page.set_viewport_size({"width": 1200, "height": 900})
    opened.go("0/rows?row=0")
    assert page.locator(".box").count() == 0
    opened.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(view: Open, token_root: Path, taught_root: Path, scheme: str) -> None:
    opened = view(token_root, taught_root, scheme=scheme)
    for address in ("0/overview", "0/chunks", "0/rows?row=1", "0/training", "0/compare?b=1", "1/teachers", "9/rows"):
        page = opened.go(address)
        assert page.evaluate(PALE_TEXT) == [], address
    opened.check()


def test_bounded_record_cuts_lists_where_the_answer_is_full(token_root: Path) -> None:
    record: Any = bounded(fb.peek(token_root, 3), most=900)
    assert len(record["shown"]) == 1
    assert len(record["shown"][0]["tokens"]) < 128
    assert any("shown[0].tokens: the first" in one for one in record["truncated"])
    assert any("shown: the first 1 of 3 values" in one for one in record["truncated"])
