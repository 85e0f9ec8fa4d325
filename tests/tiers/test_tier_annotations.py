"""What is said about an image makes no pixel: a new sidecar or line decodes nothing, and an old one is never served."""

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL.ImageFile import ImageFile
from tests.tiers.pictures import RECIPE, assert_same_rows, fresh_rows, write_picture, write_pictures
from tests.tiers.processes import FORK, SPAWN, run
from tests.tiers.test_cached_images import change

import forebay as fb
from forebay.errors import ImageUnreadable
from forebay.tiers import CachedImages, TierWarning, summarize_tier, verify_tier, warm
from forebay.tiers.tier_value import decode_value, encode_value, identity_bytes

COUNT = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "pictures", COUNT)


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """One entry for every picture that Pillow decodes in this process."""
    found: list[str] = []
    load = ImageFile.load

    def counted(image: ImageFile):
        if image.tile:  # what is loaded already has none
            found.append(type(image).__name__)
        return load(image)

    monkeypatch.setattr(ImageFile, "load", counted)
    return found


def fill(source: fb.Source, tier: Path) -> None:
    with CachedImages(source, RECIPE, l2=tier) as images:
        images.read(range(len(images)))


def tag_all(folder: Path) -> None:
    """A tagging pass: every sidecar gets two tags that it did not have."""
    for number in range(COUNT):
        sidecar = folder / f"{number:05d}.json"
        said = json.loads(sidecar.read_text())
        sidecar.write_text(json.dumps({"tags": [*said["tags"], "new", f"new-{number}"], "score": number}))


def manifest_of(folder: Path, tags: str) -> fb.Source:
    """A manifest of the pictures, written anew with other tags."""
    lines = (json.dumps({"path": f"{number:05d}.png", "tags": [tags, f"{tags}-{number}"]}) for number in range(COUNT))
    (folder / "list.jsonl").write_text("\n".join(lines))
    return fb.sources.image_manifest(folder / "list.jsonl")


def assert_read_without_decoding(source: fb.Source, tier: Path, decoded: list[str], compared: int, **options) -> None:
    with CachedImages(source, options.pop("recipe", RECIPE), l1=0, l2=tier, **options) as images:
        expected = fresh_rows(source, images.recipe)
        decoded.clear()
        rows = images.read(range(len(images)))
        assert decoded == []
        assert_same_rows(rows, expected)
        found = images.statistics()
        assert (found.misses, found.l2_hits, found.compared, found.bad) == (0, len(images), compared, {})


@pytest.mark.parametrize("key", ["", "a key"])
@pytest.mark.parametrize("check_source", ["read", "open"])
def test_a_tagging_pass_over_all_sidecars_decodes_nothing(folder, tier, decoded, monkeypatch, key, check_source):
    if key:
        monkeypatch.setenv("FOREBAY_HMAC_KEY", key)
    source = fb.sources.images(folder)
    fill(source, tier)
    assert len(decoded) == COUNT
    tag_all(folder)
    assert_read_without_decoding(source, tier, decoded, COUNT, check_source=check_source)
    assert_read_without_decoding(source, tier, decoded, 0, check_source=check_source)  # what was said is kept now
    report = verify_tier(str(tier))
    assert (report.sound, report.values) == (True, COUNT)
    assert summarize_tier(str(tier)).tagged == (COUNT if key else 0)


def test_lines_of_a_manifest_with_other_tags_decode_nothing(folder, tier, decoded):
    fill(manifest_of(folder, "old"), tier)
    source = manifest_of(folder, "new")
    assert_read_without_decoding(source, tier, decoded, COUNT)
    assert_read_without_decoding(source, tier, decoded, 0)
    assert summarize_tier(str(tier)).values == COUNT


def test_a_sidecar_that_came_or_went_decodes_nothing(folder, tier, decoded):
    source = fb.sources.images(folder)
    fill(source, tier)
    (folder / "00003.json").unlink()
    (folder / "00004.json").rename(folder / "00004.png.txt")
    assert_read_without_decoding(source, tier, decoded, 2)
    (folder / "00003.txt").write_text("back, again")
    assert_read_without_decoding(source, tier, decoded, 1)
    assert_read_without_decoding(source, tier, decoded, 0)


@pytest.mark.parametrize("tags", [("tag-2", "new", "tag-0"), ("new-3",), None])
def test_another_order_of_the_vocabulary_finds_the_new_tags_under_its_own_numbers(folder, tier, decoded, tags):
    source = fb.sources.images(folder)
    fill(source, tier)
    tag_all(folder)
    assert_read_without_decoding(source, tier, decoded, COUNT)
    assert_read_without_decoding(source, tier, decoded, 0, recipe=fb.ImageRecipe(size=32, tags=tags))


def test_other_labels_of_the_same_pictures_share_their_pixels(folder, tier, decoded):
    fill(fb.sources.images(folder), tier)
    by_folder = fb.sources.images(folder, labels="folder", root=str(folder))
    assert_read_without_decoding(by_folder, tier, decoded, COUNT)
    assert_read_without_decoding(by_folder, tier, decoded, 0)
    assert_read_without_decoding(fb.sources.images(folder), tier, decoded, COUNT)
    small = fb.sources.images(folder, max_sample_bytes=10)
    with CachedImages(small, RECIPE, l2=tier) as images, pytest.raises(ImageUnreadable, match="too-large"):
        images[0]


@pytest.mark.parametrize("time_put_back", [False, True])
def test_an_image_edited_together_with_its_sidecar_is_decoded(tmp_path, tier, decoded, time_put_back):
    folder = tmp_path / "pictures"
    for number in range(3):
        write_picture(folder / f"{number}.bmp", number, (20, 20))
        os.utime(folder / f"{number}.bmp", ns=(10**18, 10**18))
    source = fb.sources.images(folder)
    fill(source, tier)
    for number in range(3):
        (folder / f"{number}.json").write_text('{"tags": ["new"]}')
    write_picture(folder / "1.bmp", 77, (20, 20))
    if time_put_back:
        os.utime(folder / "1.bmp", ns=(10**18, 10**18))
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        expected = fresh_rows(source, images.recipe)
        decoded.clear()
        assert_same_rows(images.read(range(3)), expected)
        assert len(decoded) == 1
        assert (images.statistics().misses, images.statistics().l2_hits) == (1, 2)
    assert_read_without_decoding(source, tier, decoded, 0)


def test_a_data_set_that_was_moved_and_tagged_decodes_nothing(folder, tier, tmp_path, decoded):
    fill(fb.sources.images(folder), tier)
    shutil.copytree(folder, tmp_path / "elsewhere")
    tag_all(tmp_path / "elsewhere")
    assert_read_without_decoding(fb.sources.images(tmp_path / "elsewhere"), tier, decoded, COUNT)


def test_a_sidecar_that_became_unreadable_fails_as_it_does_without_a_tier(folder, tier):
    source = fb.sources.images(folder)
    fill(source, tier)
    (folder / "00005.json").write_text('{"tags": ')
    (folder / "00006.json").write_text('{"tags": 7}')
    recipe = fb.ImageRecipe(size=32, tags=())
    with CachedImages(source, recipe, l2=tier) as images:
        with pytest.raises(ImageUnreadable, match=r"\(bad-sidecar\): '00005.png'"):
            images[5]
        with pytest.raises(ImageUnreadable, match=r"\(bad-tags\): '00006.png'"):
            images[6]
    (folder / "00005.json").write_text('{"tags": ["sound"]}')
    with CachedImages(source, recipe, l2=tier) as images:
        assert json.loads(bytes(images[5]["metadata"])) == {"tags": ["sound"]}
        assert images.statistics().misses == 0


def test_a_value_that_does_not_know_its_content_is_served_until_its_image_or_sidecar_is_another(folder, tier, decoded):
    """As those that were written before the content was recorded."""
    source = fb.sources.images(folder)
    fill(source, tier)

    def forget_content(key: bytes, value: bytes) -> bytes:
        identity, row = decode_value(value)
        names, seen = (json.loads(line) for line in identity.splitlines())
        return encode_value(identity_bytes(names, {**seen, "content": None, "digest": 7}), row)

    change(tier, forget_content)
    assert_read_without_decoding(source, tier, decoded, 0)
    (folder / "00003.json").write_text('{"tags": ["new"]}')
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        assert_same_rows(images.read(range(COUNT)), fresh_rows(source, images.recipe))
        assert (images.statistics().misses, images.statistics().l2_hits) == (1, COUNT - 1)


def test_a_damaged_value_gives_no_pixels_to_a_tagged_image(folder, tier, decoded):
    source = fb.sources.images(folder)
    fill(source, tier)
    change(tier, lambda key, value: value[:-20] + bytes([value[-20] ^ 4]) + value[-19:])
    tag_all(folder)
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        expected = fresh_rows(source, images.recipe)
        decoded.clear()
        with pytest.warns(TierWarning, match="made again and replaced"):
            assert_same_rows(images.read(range(COUNT)), expected)
        assert len(decoded) == COUNT
        assert images.statistics().bad == {"checksum": COUNT}
    assert_read_without_decoding(source, tier, decoded, 0)


def test_a_value_without_a_tag_gives_no_pixels_to_who_has_a_key(folder, tier, decoded, monkeypatch):
    source = fb.sources.images(folder)
    fill(source, tier)
    tag_all(folder)
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "a key")
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        decoded.clear()
        with pytest.warns(TierWarning, match="carries no tag"):
            images.read(range(COUNT))
        assert len(decoded) == COUNT
        assert images.statistics().bad == {"untagged": COUNT}
    assert verify_tier(str(tier)).sound


def test_a_full_tier_keeps_its_pixels_through_a_tagging_pass(folder, tier, decoded):
    source = fb.sources.images(folder)
    room = {"l1": 0, "l2": tier, "max_bytes": 1 << 16}
    with pytest.warns(TierWarning, match="reached 65,536 bytes"), CachedImages(source, RECIPE, **room) as images:
        images.read(range(COUNT))
    kept = summarize_tier(str(tier)).values
    assert 0 < kept < COUNT
    tag_all(folder)
    for _ in range(2):
        images = CachedImages(source, RECIPE, **room)
        expected = fresh_rows(source, images.recipe)
        decoded.clear()
        assert_same_rows(images.read(range(COUNT)), expected)
        assert len(decoded) == COUNT - kept
        with pytest.warns(TierWarning, match="reached 65,536 bytes"):
            images.close()
    assert verify_tier(str(tier)).sound


@pytest.mark.parametrize("workers", [0, 2])
def test_warming_after_a_tagging_pass_makes_no_row(folder, tier, decoded, workers):
    source = fb.sources.images(folder)
    assert warm(source, RECIPE, tier, workers=workers).made == COUNT
    tag_all(folder)
    report = warm(source, RECIPE, tier, workers=workers)
    assert (report.made, report.present, report.complete) == (0, COUNT, True)
    assert report.written_bytes > 0
    assert warm(source, RECIPE, tier, workers=workers).written_bytes == 0
    assert_read_without_decoding(source, tier, decoded, 0)


def read_tagged(images: CachedImages, barrier) -> None:
    """What one of two processes does at once after a tagging pass."""
    expected = fresh_rows(images.source, images.recipe)
    if barrier is not None:
        barrier.wait()
    assert_same_rows(images.read(range(COUNT)), expected)
    assert (images.statistics().misses, images.statistics().bad) == (0, {})


@pytest.mark.parametrize("context", [FORK, pytest.param(SPAWN, marks=pytest.mark.long)], ids=["fork", "spawn"])
def test_another_process_finds_what_one_wrote_after_a_tagging_pass(folder, tier, decoded, context):
    source = fb.sources.images(folder)
    fill(source, tier)
    tag_all(folder)
    run(context, read_tagged, CachedImages(source, RECIPE, l1=0, l2=tier), None)
    assert_read_without_decoding(source, tier, decoded, 0)


def test_two_processes_that_find_new_tags_at_once_decode_nothing_and_leave_each_row_once(folder, tier, decoded):
    source = fb.sources.images(folder)
    fill(source, tier)
    tag_all(folder)
    images, barrier = CachedImages(source, RECIPE, l1=0, l2=tier), FORK.Barrier(2)
    processes = [FORK.Process(target=read_tagged, args=(images, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    report = verify_tier(str(tier))
    assert (report.sound, report.values) == (True, COUNT)
    assert_read_without_decoding(source, tier, decoded, 0)
