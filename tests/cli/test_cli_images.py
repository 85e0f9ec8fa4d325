"""Images on the command line: sources, recipe flags, growth, figures, and what peek draws of them."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.cli.running import run
from tests.helpers.photographs import write_photographs

import forebay as fb

SMALL = ["--size", 64, "--workers", 0]
NAMES = ["coast.jpg", "fog.png", "icon.png", "lake.jpg", "sticker.png", "tower.jpg"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    write_photographs(folder)
    return folder


@pytest.fixture(scope="module")
def built(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that no test changes."""
    root = tmp_path_factory.mktemp("built") / "cache"
    run("build", "images", photos, "--into", root, *SMALL)
    return root


def recipe_of(root: Path) -> dict[str, object]:
    fields: dict[str, object] = run("info", root, "--json").json["layers"][0]["fields"]
    return fields


def ids_in(root: Path) -> list[str]:
    return [image["id"] for image in run("peek", root, "--rows", 99, "--json").json["shown"]]


def test_every_field_of_the_recipe_has_a_flag(photos: Path, tmp_path: Path):
    flags = [
        *("--size", 32, "--pad-color", "#0a0b0c", "--resample", "lanczos", "--alpha", "drop", "--exif", "ignore"),
        *("--decode", "fast", "--storage", "jpeg", "--quality", 80, "--codec", "zstd", "--level", "max"),
        *("--tags", "water, city", "--tag-key", "tags", "--min-tag-count", 2, "--max-pixels", 10**6),
        *("--chunk-bytes", "1MiB", "--workers", 0, "--tag-separator", ";"),
    ]
    run("build", "images", photos, "--into", tmp_path / "cache", *flags)
    assert recipe_of(tmp_path / "cache") == {
        "size": 32,
        "pad_color": [10, 11, 12],
        "resample": "lanczos",
        "alpha": "drop",
        "exif": "ignore",
        "decode": "fast",
        "storage": "jpeg",
        "quality": 80,
        "codec": "zstd",
        "level": "max",
        "tags": ["water", "city"],
        "tag_key": "tags",
        "min_tag_count": 2,
        "max_pixels": 10**6,
        "chunk_bytes": 1 << 20,
        "tag_separator": ";",
    }
    assert set(recipe_of(tmp_path / "cache")) == set(fb.ImageRecipe.__struct_fields__)
    assert ids_in(tmp_path / "cache") == NAMES


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ([], ["fish", "looking_left", "looking_right", "water", "city", "land"]),
        (["--min-tag-count", 2], ["fish", "looking_left", "looking_right", "water"]),
        (["--tags", "none"], []),
        (["--tags", "@tags.txt"], ["looking right", "fish"]),
        (["--tag-key", "subjects"], []),
    ],
)
def test_the_vocabulary_is_that_of_the_source_or_the_one_given(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[object], kept: list[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tags.txt").write_text("looking right\n\nfish\n")
    run("build", "images", photos, "--into", tmp_path / "cache", *written, *SMALL)
    assert recipe_of(tmp_path / "cache")["tags"] == kept


@pytest.mark.parametrize("name", ["all.jsonl", "all.jsonl.gz"])
def test_a_manifest_is_known_by_its_name_and_keeps_its_order(photos: Path, tmp_path: Path, name: str):
    lines = [json.dumps({"file": name, "tags": ["one"]}) + "\n" for name in reversed(NAMES)]
    content = "".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    words = ["--into", tmp_path / "cache", "--image", "file", "--root", photos, *SMALL]
    run("build", "images", tmp_path / name, *words)
    assert ids_in(tmp_path / "cache") == NAMES[::-1]
    assert recipe_of(tmp_path / "cache")["tags"] == ["one"]


def test_parquet_is_known_by_its_name(photos: Path, tmp_path: Path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    columns = {"picture": [(photos / name).read_bytes() for name in NAMES], "tags": [["a", name[:1]] for name in NAMES]}
    parquet.write_table(arrow.table(columns), tmp_path / "all.parquet")
    run("build", "images", tmp_path / "*.parquet", "--into", tmp_path / "cache", "--image", "picture", *SMALL)
    assert len(ids_in(tmp_path / "cache")) == 6
    assert recipe_of(tmp_path / "cache")["tags"] == ["a", "c", "f", "i", "l", "s", "t"]


def test_a_settings_file_has_the_same_words(photos: Path, tmp_path: Path):
    (tmp_path / "classes" / "cat").mkdir(parents=True)
    shutil.copy(photos / "lake.jpg", tmp_path / "classes" / "cat")
    (tmp_path / "photos.toml").write_text("""
        [source]
        paths = ["classes"]
        labels = "folder"

        [recipe]
        kind = "images"
        size = 32
        pad_color = [0, 0, 0]
        tag_key = ["tags", "more"]
        tag_separator = " "
        chunk_bytes = "1MiB"

        [build]
        into = "cache"
        workers = 0
    """)
    run("build", tmp_path / "photos.toml", "--quality", 90)
    fields = recipe_of(tmp_path / "cache")
    assert (fields["size"], fields["pad_color"], fields["tags"], fields["quality"]) == (32, [0, 0, 0], ["cat"], 90)
    assert (fields["tag_key"], fields["tag_separator"]) == (["tags", "more"], " ")
    assert run("estimate", tmp_path / "photos.toml", "--json").json["rows"] == 1


def test_an_estimate_is_near_what_a_build_takes(photos: Path, built: Path):
    found = run("estimate", "images", photos, "--size", 64, "--json").json
    assert found["rows"] == 6
    assert found["stored_bytes"] == pytest.approx(fb.info(built).layers[0].bytes, rel=0.5)


def test_a_cache_of_images_grows_by_new_files_and_keeps_its_vocabulary(photos: Path, tmp_path: Path):
    folder, root = tmp_path / "photos", tmp_path / "cache"
    write_photographs(folder)
    run("build", "images", folder, "--into", root, *SMALL)
    (folder / "new.png").write_bytes((photos / "fog.png").read_bytes())
    (folder / "new.json").write_text('{"tags": ["fish", "unheard of"]}')
    run("update", root, folder, "--workers", 0)
    assert ids_in(root) == [*NAMES, "new.png"]
    assert "unheard of" not in recipe_of(root)["tags"]
    assert re.search(r"unknown tags +1\n", run("info", root).out)


def test_a_cache_of_a_manifest_grows_by_its_further_lines(photos: Path, tmp_path: Path):
    manifest, root = tmp_path / "all.jsonl", tmp_path / "cache"
    manifest.write_text("".join(json.dumps({"path": name}) + "\n" for name in NAMES[:4]))
    run("build", "images", manifest, "--into", root, "--root", photos, *SMALL)
    with manifest.open("a") as file:
        file.write("".join(json.dumps({"path": name}) + "\n" for name in NAMES[4:]))
    run("update", root, manifest, "--workers", 0)
    assert ids_in(root) == NAMES
    assert "pass that file" in run("update", root, manifest, photos, code=2).err


def test_what_was_changed_is_named(tmp_path: Path):
    folder, root = tmp_path / "photos", tmp_path / "cache"
    write_photographs(folder)
    run("build", "images", folder, "--into", root, *SMALL)
    (folder / "lake.json").write_text('{"tags": ["another"]}')
    assert "lake.jpg" in run("build", root, "--workers", 0, code=1).err
    assert "resample" in run("build", "images", folder, "--into", root, "--resample", "box", *SMALL, code=1).err


def test_failures_are_listed_with_reason_and_name(tmp_path: Path):
    folder = tmp_path / "photos"
    write_photographs(folder)
    (folder / "page.jpg").write_text("<html>not found</html>")
    run("build", "images", folder, "--into", tmp_path / "cache", *SMALL)
    assert re.search(r"page\.jpg +not-an-image +it begins with b'<html>", run("status", tmp_path / "cache").out)


def test_info_draws_the_figures(built: Path):
    shown = run("info", built).out
    for words in (
        r"images +6\n",
        r"scaled down +6\n",
        r"mean aspect +1\.\d\d\n",
        r"padding share +\d+\.\d%\n",
        r"tags per image +2\.\d+\n",
        r"bytes per image +\d+\.\d kB\n",
    ):
        assert re.search(words, shown), (words, shown)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["build", "images", "photos", "--into", "cache"], ["peek", "{built}"]])
def test_without_pillow_the_line_that_installs_it_is_said(built: Path, words: list[str]):
    without = "import sys; sys.modules['PIL'] = None; from forebay.cli.main import main; main()"
    command = [sys.executable, "-c", without, *(word.format(built=built) for word in words)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: working with images needs 'pillow', which is not installed")
    assert ran.stderr.endswith("pip install 'forebay[images]'\n")


def test_peek_lists_facts_and_the_command_that_draws(built: Path):
    shown = run("peek", built, "--row", 3).out
    assert "row 3 (chunk 0, row 3) · lake.jpg\n" in shown
    assert shown.endswith(f"next: forebay peek {built} --png sheet.png\n")
    for words in (
        r"as displayed +640 × 480",
        r"on 64 × 64 +64 × 48 at 0, 8",
        r"padding +25\.0%",
        r"metadata +\{\"rating\"",
    ):
        assert re.search(words, shown), (words, shown)
    assert re.search(r"tags +fish, looking_left, water", shown)


def test_peek_gives_every_number_as_json(built: Path):
    found = run("peek", built, "--row", 5, "--json").json
    (image,) = found["shown"]
    row = fb.open_cache(built)[5]
    assert image["box"] == row["box"].tolist() == [14, 0, 36, 64]
    assert image["original_size"] == [360, 640]
    assert (image["id"], image["metadata"]) == ("tower.jpg", {"rating": 0.5})
    assert image["padding"] == 1 - 36 / 64


def test_peek_draws_a_sheet_with_boxes_and_ignored_tokens(built: Path, tmp_path: Path):
    said = run("peek", built, "--png", tmp_path / "sheet.png", "--row", 3, "--row", 1, "--patch", 8)
    assert re.search(r"sheet\.png\n +patch +8\n +drawn +3, 1\n", said.out)
    lake, fog = np.split(np.asarray(Image.open(tmp_path / "sheet.png"))[10:234, 10:].astype(int), [234], axis=1)
    redness = lake[:, :, 0] - lake[:, :, 1]
    assert (redness[2:26, 4:220].mean(axis=1) > 20).all()  # a row of tokens is ignored above the content,
    assert (redness[200:, 4:220].mean(axis=1) > 20).all()  # and one below
    assert np.abs(fog[4:40, 4:220] - 114).max() == 0  # grey content is content
    outline = (30, 120, 220)
    assert (lake[28, 4:220] == outline).all()
    assert (lake[195, 4:220] == outline).all()
    assert (fog[0, 4:220] == outline).all()
    record = run("peek", built, "--png", tmp_path / "sheet.png", "--json").json
    assert (record["drawn"], record["patch"]) == ([0, 1, 2, 3, 4, 5], 16)


def test_images_stored_as_jpeg_are_drawn_too(photos: Path, tmp_path: Path):
    run("build", "images", photos, "--into", tmp_path / "cache", "--storage", "jpeg", *SMALL)
    assert "lake.jpg" in run("peek", tmp_path / "cache", "--row", 3).out
    run("peek", tmp_path / "cache", "--png", tmp_path / "sheet.png")


def test_what_cannot_be_drawn_is_wrong_usage(built: Path, tmp_path: Path):
    uneven = run("peek", built, "--png", tmp_path / "sheet.png", "--patch", 15, code=2).err
    assert "must divide the canvas size 64 (got 15)" in uneven
    assert "--patch needs --png FILE" in run("peek", built, "--patch", 16, code=2).err
    both = run("peek", built, "--png", tmp_path / "sheet.png", "--column", "box", code=2).err
    assert "--png draws whole images and --column shows one column" in both
    many = run("peek", built, "--png", tmp_path / "sheet.png", *["--row", 0] * 601, code=2).err
    assert "a sheet has room for 600 images (got 601)" in many
    assert not (tmp_path / "sheet.png").exists()


def test_columns_of_images_can_be_seen_as_they_are(built: Path):
    assert re.search(r"box +int32 \[4\] +0 8 64 48", run("peek", built, "--row", 3, "--column", "box").out)


def test_danbooru_tags_have_their_separator_and_their_keys(photos: Path, tmp_path: Path):
    folder = tmp_path / "booru"
    folder.mkdir()
    for name, general, character in (("a", "1girl solo long_hair", "miku"), ("b", "solo sky", "")):
        shutil.copy(next(photos.glob("*.png")), folder / f"{name}.png")
        said = {"tag_string_general": general, "tag_string_character": character}
        (folder / f"{name}.json").write_text(json.dumps(said))
    plain = run("build", "images", folder, "--into", tmp_path / "plain", "--tag-key", "tag_string_general", *SMALL)
    assert "note" in plain.out + plain.err
    assert "--tag-separator ' '" in plain.out + plain.err
    keys = ["--tag-key", "tag_string_general", "--tag-key", "tag_string_character"]
    ran = run("build", "images", folder, "--into", tmp_path / "cache", *keys, "--tag-separator", " ", *SMALL)
    assert "tag_separator ' '" in run("info", tmp_path / "cache").out
    assert "--tag-separator" not in ran.out + ran.err
    assert recipe_of(tmp_path / "cache")["tags"] == ["solo", "1girl", "long_hair", "miku", "sky"]
    assert recipe_of(tmp_path / "cache")["tag_key"] == ["tag_string_general", "tag_string_character"]
    shown = run("peek", tmp_path / "cache", "--rows", 2, "--json").json["shown"]
    assert [image["tags"] for image in shown] == [["solo", "1girl", "long_hair", "miku"], ["solo", "sky"]]
    assert [image["metadata"] for image in shown] == [{}, {}]
    run("build", tmp_path / "cache")  # the recipe that the cache keeps


def test_with_a_folder_per_class_the_name_of_the_folder_is_the_tag(photos: Path, tmp_path: Path):
    for label in ("cat", "dog"):
        (tmp_path / "classes" / label).mkdir(parents=True)
        shutil.copy(next(photos.glob("*.png")), tmp_path / "classes" / label / "1.png")
    words = ["build", "images", tmp_path / "classes", "--into", tmp_path / "cache", *SMALL]
    run(*words, "--labels", "folder")
    assert recipe_of(tmp_path / "cache")["tags"] == ["cat", "dog"]
    shown = run("peek", tmp_path / "cache", "--rows", 2, "--json").json["shown"]
    assert [(image["id"], image["tags"]) for image in shown] == [("cat/1.png", ["cat"]), ("dog/1.png", ["dog"])]
    assert "labels='folder'" in run(*words, code=1).err
    shutil.copytree(tmp_path / "classes" / "cat", tmp_path / "classes" / "owl")
    grown = run("update", tmp_path / "cache", tmp_path / "classes", "--workers", 0)
    assert "1 tag(s) of the appended images are not in the vocabulary" in grown.out + grown.err


@pytest.mark.parametrize("size", [(1, 448), (448, 1), (1, 1)])
def test_a_sheet_is_drawn_where_content_is_one_pixel_wide(tmp_path: Path, size: tuple[int, int]):
    (tmp_path / "thin").mkdir()
    Image.new("RGB", size).save(tmp_path / "thin" / "a.png")
    run("build", "images", tmp_path / "thin", "--into", tmp_path / "cache", "--workers", 0)
    run("peek", tmp_path / "cache", "--png", tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size[0] > 200


def test_a_folder_without_images_is_not_called_plain_text(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("{}")
    said = run("build", "images", tmp_path / "data", "--into", tmp_path / "cache", code=1).err
    assert "1 file was not read: .jsonl 1\nhint: pass a folder or a glob that has such files\n" in said
    assert "--suffix" not in said
