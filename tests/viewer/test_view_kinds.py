"""Images, teachers, training orders and comparisons: what the page draws is what training reads."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers.image_caches import SIZE, picture, sample_id
from tests.viewer.conftest import HOSTILE, Open

import forebay as fb
from forebay.masks.rectangle import token_ignore_mask
from forebay.preview.sheets import png_of
from forebay.teachers import features
from forebay.torch import Loader, Ranks
from forebay.viewer.image_rows import image_page, one_image
from forebay.viewer.shown_cache import Query, ShownCache
from forebay.viewer.taught_rows import taught_row
from forebay.viewer.training_order import training_order

pytestmark = pytest.mark.slow


def test_the_grid_has_every_image_its_box_and_tags(view: Open, image_root: Path) -> None:
    opened = view(image_root)
    page = opened.go("0/images?patch=8")
    shown = fb.peek(image_root, 11).shown
    assert page.locator(".grid figure").count() == len(shown)
    for image in shown:
        assert image.id in opened.text()
    page.wait_for_selector(".frame img")
    sizes = page.evaluate(
        "Promise.all([...document.images].map(async (one) => { await one.decode(); return one.naturalWidth; }))"
    )
    assert sizes == [SIZE] * len(shown)
    page.click(".grid a >> nth=3")
    page.wait_for_selector("text=Layers")
    for name in ("pixels", "padding", "latents", "flip"):
        page.check(f"[name={name}]")
    assert "4, looking_right" not in opened.text()
    assert sample_id(3) in page.inner_text("h1")
    opened.check()
    page.uncheck("[name=pixels]")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    opened.ready("images")
    chosen = page.evaluate("[...document.querySelectorAll('[type=checkbox]:checked')].map((one) => one.name)")
    assert chosen == ["box", "ignored", "padding", "latents", "flip"]
    opened.go("0/images")
    page.fill("[name=text]", sample_id(2))
    page.click("text=Search >> nth=-1")
    page.wait_for_selector(".hits >> text='row 2'")


def test_ignored_tokens_are_those_that_training_ignores(image_root: Path) -> None:
    shown = ShownCache.of(image_root)
    boxes = np.asarray(fb.open_cache(image_root).read(range(11), ["box"])["box"]).astype(np.int64)
    large = [row for row, box in enumerate(boxes.tolist()) if min(box[2:]) >= 12]
    expected = token_ignore_mask(boxes[large], (SIZE, SIZE), 8)
    page = image_page(shown, Query((("patch", "8"),)))
    found = [[[char == "1" for char in line] for line in page.images[row].ignored] for row in large]
    assert np.array_equal(np.array(found), expected)
    one = one_image(shown, Query((("row", "3"),)))
    assert one.image.original_size == picture(3).size
    assert np.isclose(np.mean(one.latent_weights), 1 - one.image.padding, atol=0.01)


def test_a_png_is_the_canvas_or_smaller() -> None:
    canvas = np.random.default_rng(0).integers(0, 256, (3, 7, 7), np.uint8)
    assert np.array_equal(np.asarray(Image.open(BytesIO(png_of(canvas)))), canvas.transpose(1, 2, 0))
    assert Image.open(BytesIO(png_of(canvas, 3))).size == (3, 3)


def test_features_between_buckets_are_those_that_training_reads(taught_root: Path) -> None:
    shown, cache = ShownCache.of(taught_root), fb.open_cache(taught_root)
    for t in (0.0, 0.05, 0.42, 0.777, 1.0):
        found = taught_row(shown, Query((("layer", "ramp"), ("row", "7"), ("t", str(t)))))
        expected = features(cache, "ramp").at([7], t)["ramp"][0]
        assert np.allclose(found.columns[0].values[0], expected, rtol=1e-4)
        assert np.isclose(found.columns[0].mean, expected.mean(), rtol=1e-4)
    assert found.present_share == pytest.approx(20 / 21)
    absent = taught_row(shown, Query((("layer", "ramp"), ("row", "20"))))
    assert not absent.present
    assert absent.columns == ()


def test_the_slider_shows_a_row_at_any_timestep(view: Open, taught_root: Path) -> None:
    opened = view(taught_root)
    opened.go("0/teachers?layer=ramp&row=20")
    assert "absent: the teacher did not produce it" in opened.text()
    page = opened.go("0/teachers?layer=ramp&row=3&t=0.4")
    assert "50% of bucket 0.35 and 50% of bucket 0.45" in opened.text()
    page.locator("[name=t]").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector("text=/At t = 0.420/")
    assert "t=0.42" in page.url
    page.wait_for_selector("text=/30% of bucket 0.35 and 70% of bucket 0.45/")
    opened.check()


@pytest.mark.parametrize("world", [1, 2])
def test_the_order_on_the_page_is_the_order_of_the_loader(token_root: Path, world: int) -> None:
    cache = fb.open_cache(token_root)
    asked = Query((("seed", "5"), ("epoch", "0"), ("world", str(world)), ("batch", "4")))
    found = training_order(ShownCache.of(token_root), asked)
    for rank in range(world):
        loader = Loader(cache, global_batch_size=4, seed=5, threads=0, ranks=Ranks(rank, world))
        for shown, batch in zip(found.shown, loader, strict=False):
            expected = cache.read(shown.rows[rank::world], ["tokens"])["tokens"]
            assert np.array_equal(batch["tokens"].numpy(), expected)
    assert found.batches == len(cache) // 4
    assert found.kind == "global"
    assert found.mixing.chunks == pytest.approx(1, abs=0.3)


def test_the_page_of_orders_follows_its_form(view: Open, token_root: Path, tmp_path: Path) -> None:
    opened = view(token_root)
    page = opened.go("0/training")
    page.fill("[name=world]", "2")
    page.fill("[name=batch]", "6")
    page.fill("[name=seed]", "9")
    page.click("text=Show")
    page.wait_for_selector("text=/rank 1:/")
    assert "seed=9" in page.url
    first = training_order(ShownCache.of(token_root), Query((("seed", "9"), ("world", "2"), ("batch", "6")))).shown[0]
    shown = page.locator("td a").all_inner_texts()[:6]
    assert shown == [str(row) for row in (*first.rows[0::2], *first.rows[1::2])]
    opened.check()


def test_statistics_of_a_running_loader_are_shown(view: Open, token_root: Path, tmp_path: Path) -> None:
    file = tmp_path / "statistics.json"
    file.write_text('{"batches": 7, "waited": 1.25, "transfers": {"fetched_bytes": 2000000}}')
    opened = view(token_root)
    opened.server._caches[0].statistics = (str(file), str(tmp_path / "none.json"))
    page = opened.go("0/training")
    assert "1.25 s" in opened.text()
    assert "2.0 MB" in opened.text()
    assert "No such file" in opened.text()
    file.write_text('{"batches": 8}')
    page.wait_for_selector("dd:text-is('8')")
    opened.check()


def test_two_caches_and_two_generations_are_compared(
    view: Open, token_root: Path, raw_root: Path, tmp_path: Path
) -> None:
    (tmp_path / "lines.txt").write_text("".join(f"{number}\n" for number in range(50)))
    source = fb.sources.lines(tmp_path / "lines.txt")
    grown = tmp_path / "grown"
    fb.build(grown, source, fb.RawRecipe(chunk_bytes=40), workers=0)
    before = fb.info(grown).generation
    with (tmp_path / "lines.txt").open("a") as file:
        file.writelines(f"{number}\n" for number in range(50, 80))
    fb.update(grown, source, workers=0)
    after = fb.info(grown).generation
    assert after > before
    opened = view(grown, token_root, raw_root)
    page = opened.go(f"0/compare?b=0&generation_a={before}&generation_b={after}")
    cells = page.locator("section:has-text('only in B') td.number").all_inner_texts()
    same, differ, only_a, only_b = cells  # without damage, no columns about it
    assert (differ, only_a) == ("0", "0")
    assert int(same) == len(fb.open_cache(grown, generation=before).chunk_numbers)
    assert int(only_b) > 0
    assert "50" in page.inner_text("section:has(h2:text-is('Rows')) table")
    assert "80" in page.inner_text("section:has(h2:text-is('Rows')) table")
    opened.go("1/compare?b=2&all=1")
    assert "sequence_length" in opened.text()
    opened.check()


def test_hostile_ids_tags_and_metadata_are_text(view: Open, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    name = "<img src=x onerror=window.hacked=1>.png"
    picture(0).save(pictures / name)
    tag = HOSTILE.split("\u202e")[0]
    sidecar = {"tags": [tag], HOSTILE: {"inner": HOSTILE}}
    (pictures / name.replace(".png", ".json")).write_text(json.dumps(sidecar))
    fb.build(tmp_path / "cache", fb.sources.images(pictures), fb.ImageRecipe(size=48, tags=(tag,)), workers=0)
    opened = view(tmp_path / "cache")
    for where in ("0/overview", "0/images", "0/images?row=0&one=1", "0/training", "0/compare?all=1"):
        page = opened.go(where)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0
        shown = opened.text().replace('\\"', '"')  # values of recipes are JSON
        assert tag in shown or name in shown or "training" in where
    opened.check()
