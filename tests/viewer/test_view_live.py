"""A build watched from its first chunk to its last, an index of 100,000 chunks, and the keyboard."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.helpers.builders import ending, start_builder, wait_until
from tests.helpers.many_chunks import many_chunks
from tests.helpers.obedient_recipes import orders, write_orders
from tests.teachers.own_teachers import Ramp, prompt_cache
from tests.viewer.conftest import Open

import forebay as fb
from forebay.cache.catalog import load_generation
from forebay.cache.claims import Claim
from forebay.cache.heartbeat import BuilderBeat, read_builders
from forebay.format import layout
from forebay.store import LocalStore
from forebay.teachers import TeacherRecipe
from forebay.viewer.chunk_map import NAMES

pytestmark = pytest.mark.slow

CHUNKS = 24
ELSEWHERE = "0123456789ab-77-1"
CLAIM = Claim(owner=ELSEWHERE, host="node7", pid=77)
BEAT = BuilderBeat(beat=3, host="node7", pid=77, layer="raw", workers=8, cpu_percent=790.0, memory_bytes=3_000_000_000)


def _claim_key(store: LocalStore) -> str:
    return layout.claim(load_generation(store).folder("raw"), 50)


def test_a_build_is_watched_to_its_end(view: Open, tmp_path: Path) -> None:
    source = write_orders(tmp_path / "raw" / "a.txt", orders(CHUNKS))
    root = tmp_path / "cache"
    builder = start_builder(root, source, recipe={"seconds": 0.4}, workers=2)
    wait_until((root / "plan").exists, what="nothing was planned")
    opened = view(root)
    page = opened.go("0/chunks")
    page.wait_for_selector("[data-build=running]")
    page.wait_for_selector("text=rows per second")
    page.wait_for_selector("text=remaining")
    page.wait_for_selector("td:text-is('working')")
    assert page.locator("[data-build] canvas").count() == 8
    assert str(builder.pid) in page.inner_text("[data-build]")
    assert ending(builder)["report"]["built"] == CHUNKS
    page.wait_for_selector("[data-build=ended]")
    page.wait_for_selector(f"text=published {CHUNKS}")
    assert "100.0%" in opened.text()
    assert f"{CHUNKS} of {CHUNKS} planned" in opened.text()
    opened.go("0/overview")
    assert f"{2 * CHUNKS}" in opened.text()
    opened.check()


def test_a_layer_whose_build_begins_is_added_to_the_map(view: Open, tmp_path: Path) -> None:
    root = prompt_cache(tmp_path, tuple(f"prompt {number}" for number in range(9)), chunk_bytes=60)
    opened = view(root)
    page = opened.go("0/chunks")
    assert page.locator("[data-layer]").count() == 1
    fb.build(root, None, TeacherRecipe(teacher=Ramp(width=4)))
    page.wait_for_selector("[data-layer=ramp] .legend:has-text('published')")
    opened.check()


def test_a_page_says_when_its_server_is_gone(view: Open, raw_root: Path) -> None:
    opened = view(raw_root)
    page = opened.go("0/chunks")
    opened.server.stop()
    page.wait_for_selector("text=/The server does not answer/")
    opened.problems.clear()  # the browser reports the lost connection


def test_a_heartbeat_says_what_its_builder_uses(tmp_path: Path) -> None:
    source = write_orders(tmp_path / "raw" / "a.txt", orders(6))
    root = tmp_path / "cache"
    builder = start_builder(root, source, recipe={"seconds": 1.5}, workers=2, lease_seconds=1.5)
    try:

        def beaten() -> list[BuilderBeat]:
            beats = read_builders(LocalStore(str(root))).values()
            return [beat for beat in beats if beat.workers > 1 and beat.beat > 1]

        wait_until(beaten, what="no heartbeat has the figures of two workers")
        assert beaten()[0].memory_bytes > 5_000_000
    finally:
        builder.terminate()
        builder.communicate(timeout=600)


def test_a_hundred_thousand_chunks_are_drawn_scrolled_and_opened(view: Open, tmp_path: Path) -> None:
    root = many_chunks(tmp_path, 100_000, 70_000, files=200)
    opened = view(root)
    page = opened.go("0/chunks")
    assert "100,000 planned" in opened.text()
    assert "missing 30,000" in opened.text()
    drawn = page.evaluate(
        """() => { const canvas = document.querySelector('canvas.map'); const pen = canvas.getContext('2d');
        const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
        const colors = new Set(); let filled = 0;
        for (let at = 0; at < data.length; at += 4) {
          if (data[at + 3]) { filled += 1; colors.add(data.slice(at, at + 3).join()); }
        }
        return [filled / (data.length / 4), colors.size]; }"""
    )
    assert drawn[0] > 0.9
    assert drawn[1] >= 3
    page.locator("[role=application]").focus()
    page.keyboard.press("End")
    page.wait_for_selector(".readout:has-text('chunk 99,999: missing')")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Chunk 1 of layer raw")
    opened.go("0/overview")
    assert "70,000" in opened.text()
    opened.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_states_of_a_chunk_look_alike(view: Open, raw_root: Path, scheme: str) -> None:
    opened = view(raw_root, scheme=scheme)
    page = opened.go("0/chunks")
    colors = page.evaluate(
        """async () => { const { STATES } = await import('./static/chunkmap.js');
        const { cssColor } = await import('./static/dom.js');
        return Object.values(STATES).map((one) => cssColor(one.color)); }"""
    )
    channels = np.array([[int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in colors])
    apart = np.linalg.norm(channels[:, None] - channels[None], axis=-1)
    assert len(colors) == len(NAMES)
    assert apart[~np.eye(len(colors), dtype=bool)].min() > 50
    opened.check()


def test_a_build_on_another_host_is_shown_live(view: Open, tmp_path: Path) -> None:
    root = many_chunks(tmp_path, 60, 40)
    store = LocalStore(str(root))
    opened = view(root)
    page = opened.go("0/chunks")
    assert not page.is_visible("[data-build]")
    store.create(_claim_key(store), [msgspec.json.encode(CLAIM)])
    store.create(layout.builder(ELSEWHERE), [msgspec.json.encode(BEAT)])
    page.wait_for_selector("[data-build=running] td:text-is('node7, process 77')")
    for shown in ("raw", "8", "790%", "3.0 GB", "working"):
        assert page.locator(f"[data-build] td:text-is('{shown}')").count() == 1
    page.wait_for_selector("[data-layer=raw] .legend:has-text('claimed 1')")
    beaten = msgspec.structs.replace(BEAT, beat=4, cpu_percent=420.0)
    store.replace(layout.builder(ELSEWHERE), [msgspec.json.encode(beaten)])
    page.wait_for_selector("[data-build] td:text-is('420%')")
    store.delete(_claim_key(store))
    page.wait_for_selector("[data-layer=raw] .legend:not(:has-text('claimed'))")
    assert page.locator("[data-build=running] td:text-is('working')").count() == 1  # between two chunks
    store.delete(layout.builder(ELSEWHERE))
    page.wait_for_selector("[data-build=ended]")
    opened.check()


CONTROLS = """() => { window.controls =
  [...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')]
  .filter((one) => one.checkVisibility() && !one.disabled && !one.closest('.skip'));
  return window.controls.map((one) => `${one.tagName} ${one.textContent.slice(0, 20)}`); }"""
FOCUSED = """() => { const on = document.activeElement; const style = getComputedStyle(on);
  return [window.controls.indexOf(on), style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0]; }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_control_of_every_page_is_reached_by_keyboard_alone(
    view: Open, token_root: Path, image_root: Path, taught_root: Path, scheme: str
) -> None:
    opened = view(token_root, image_root, taught_root, width=400 if scheme == "dark" else 1600, scheme=scheme)
    for where in (
        "0/overview", "0/chunks?layer=tokens&chunk=1", "0/rows?row=1", "0/training?batch=2", "0/compare?b=1",
        "1/images", "1/images?row=3&one=1", "2/rows?row=2", "2/teachers?row=3",
    ):  # fmt: skip
        page = opened.go(where)
        page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0)")
        controls = page.evaluate(CONTROLS)
        reached: dict[int, bool] = {}
        for _ in range(len(controls) + 8):
            page.keyboard.press("Tab")
            at, is_seen = page.evaluate(FOCUSED)
            reached[at] = is_seen
        missed = [controls[at] for at in range(len(controls)) if at not in reached]
        assert missed == [], where
        assert all(is_seen for at, is_seen in reached.items() if at >= 0), where
        opened.check()


def test_arrow_keys_step_through_rows_and_r_draws_one(view: Open, token_root: Path) -> None:
    opened = view(token_root)
    page = opened.go("0/rows?row=3")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("h1:text-is('Row 4')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("h1:text-is('Row 3')")
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")  # moves from token to token there
    assert page.inner_text("h1") == "Row 3"
    page.evaluate("Math.random = () => 0.999999")
    page.locator("h1").click()
    page.keyboard.press("r")
    page.wait_for_selector(f"h1:text-is('Row {len(fb.open_cache(token_root)) - 1}')")
    opened.check()
