"""Refreshing images: tags are read again without decoding pixels, and what was edited is reported by its name."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image, ImageFile
from tests.image_caches import image_cache, sample_id, write_pictures

import forebay as fb
from forebay.cache.plan import load_plan
from forebay.errors import SourceChanged


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    return write_pictures(tmp_path / "photos")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sides of every picture that Pillow decodes from now on."""
    sides: list[int] = []
    load = ImageFile.ImageFile.load

    def counted(image: ImageFile.ImageFile) -> object:
        sides.append(image.width)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    return sides


def retag(pictures: Path, number: int, *tags: str) -> None:
    (pictures / f"{number:03d}.json").write_text(json.dumps({"tags": tags}))


def newest_chunks(root: Path) -> dict[int, bytes]:
    """The bytes of every listed chunk."""
    table = fb.open_cache(root).generation.table("images")
    names = [
        f"{chunk:06d}{f'.r{revision}' if revision else ''}.safetensors"
        for chunk, revision in zip(table.chunks.tolist(), table.numbers["revision"].tolist(), strict=True)
    ]
    return {number: (root / "layers/images" / name).read_bytes() for number, name in enumerate(names)}


@pytest.mark.parametrize("fields", [{}, {"codec": "zstd"}, {"storage": "jpeg"}])
@pytest.mark.parametrize("key", [None, "a secret"])
def test_an_edited_sidecar_makes_tags_again_and_decodes_nothing(
    tmp_path: Path, pictures: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch, fields: dict, key: str | None
) -> None:
    if key:
        monkeypatch.setenv("FOREBAY_HMAC_KEY", key)
    image_cache(tmp_path / "cache", pictures, **fields)
    retag(pictures, 1, "outdoors")
    (pictures / "003.json").unlink()
    decoded.clear()
    report = fb.refresh(tmp_path / "cache", workers=0)
    assert decoded == []
    assert sorted(report.changed) == ["001.json", "003.json"]
    assert report.rows == report.rows_before
    image_cache(tmp_path / "again", pictures, **fields)
    assert decoded
    assert newest_chunks(tmp_path / "cache") == newest_chunks(tmp_path / "again")
    assert fb.verify(tmp_path / "cache", full=True).sound
    assert fb.refresh(tmp_path / "cache", workers=0).chunks == ()


def test_only_the_images_that_were_written_to_are_decoded(tmp_path: Path, pictures: Path, decoded: list[int]) -> None:
    image_cache(tmp_path / "cache", pictures)
    retag(pictures, 0, "cat")
    Image.new("RGB", (17, 9), "red").save(pictures / sample_id(1))
    times = (pictures / sample_id(2)).stat()
    Image.new("RGB", (19, 9), "red").save(pictures / sample_id(2))
    os.utime(pictures / sample_id(2), ns=(times.st_atime_ns, times.st_mtime_ns))
    retag(pictures, 2, "cat")
    decoded.clear()
    report = fb.refresh(tmp_path / "cache", workers=0)
    assert sorted(set(decoded)) == [17, 19]
    assert sorted(report.changed) == ["000.json", sample_id(1), sample_id(2)]
    image_cache(tmp_path / "again", pictures)
    assert newest_chunks(tmp_path / "cache") == newest_chunks(tmp_path / "again")


def test_a_file_of_the_same_size_and_time_with_other_content_is_decoded(
    tmp_path: Path, pictures: Path, decoded: list[int]
) -> None:
    path = pictures / sample_id(0)
    image_cache(tmp_path / "cache", pictures)
    times, content = path.stat(), path.read_bytes()
    Image.effect_noise((5, 5), 9).save(path, "BMP")
    path.write_bytes(path.read_bytes().ljust(len(content), b"\0"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    retag(pictures, 0, "cat")
    decoded.clear()
    fb.refresh(tmp_path / "cache", workers=0)
    assert 5 in decoded
    image_cache(tmp_path / "again", pictures)
    assert newest_chunks(tmp_path / "cache") == newest_chunks(tmp_path / "again")


def test_a_plan_that_knows_no_change_times_decodes_again(tmp_path: Path, pictures: Path, decoded: list[int]) -> None:
    image_cache(tmp_path / "cache", pictures)
    fb.copy(tmp_path / "cache", tmp_path / "older")
    for path in pictures.glob("*.png"):  # as a copy of the images: another inode and ctime, the same size and mtime
        content, times = path.read_bytes(), path.stat()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    retag(pictures, 1, "outdoors")
    decoded.clear()
    assert list(fb.refresh(tmp_path / "older", workers=0).changed) == ["001.json"]
    assert decoded
    image_cache(tmp_path / "again", pictures)
    assert newest_chunks(tmp_path / "older") == newest_chunks(tmp_path / "again")


def test_a_damaged_chunk_is_decoded_again_and_not_copied(tmp_path: Path, pictures: Path, decoded: list[int]) -> None:
    image_cache(tmp_path / "cache", pictures)
    path = tmp_path / "cache/layers/images/000000.safetensors"
    content = bytearray(path.read_bytes())
    content[4096 * 2 + 100] ^= 1
    path.write_bytes(content)
    retag(pictures, 0, "cat")
    decoded.clear()
    fb.refresh(tmp_path / "cache", workers=0)
    assert decoded
    image_cache(tmp_path / "again", pictures)
    assert newest_chunks(tmp_path / "cache") == newest_chunks(tmp_path / "again")


def test_an_edited_line_of_a_manifest_decodes_nothing(tmp_path: Path, pictures: Path, decoded: list[int]) -> None:
    lines = [json.dumps({"path": sample_id(number), "tags": ["cat"]}) for number in range(6)]
    manifest, root = pictures / "list.jsonl", tmp_path / "cache"
    manifest.write_text("\n".join(lines))
    recipe = fb.ImageRecipe(size=48, tags=("cat", "outdoors"), chunk_bytes=4096)
    fb.build(root, fb.sources.image_manifest(manifest), recipe, workers=0)
    lines[2] = json.dumps({"path": sample_id(2), "tags": ["outdoors"]})
    manifest.write_text("\n".join(lines))
    decoded.clear()
    report = fb.refresh(root, workers=0)
    assert decoded == []
    start = sum(len(line) + 1 for line in lines[:2])
    assert report.changed == {f"list.jsonl@{start}": f"was edited, added or removed; it describes '{sample_id(2)}'"}
    fb.build(tmp_path / "again", fb.sources.image_manifest(manifest), recipe, workers=0)
    assert newest_chunks(root) == newest_chunks(tmp_path / "again")


def test_every_verb_reports_an_edited_sidecar_by_its_name(tmp_path: Path, pictures: Path) -> None:
    root, source = tmp_path / "cache", fb.sources.images(pictures)
    image_cache(root, pictures)
    recipe = fb.open_cache(root).generation.recipe("images")
    retag(pictures, 1, "outdoors")
    how = f"was edited, added or removed; it describes '{sample_id(1)}'"
    assert fb.status(root).stale == fb.verify(root).stale == fb.verify(root, full=True).stale == {"001.json": how}
    with pytest.raises(SourceChanged, match=r"'001.json' was edited, added or removed; it describes '001.png'"):
        fb.grow(root, source, workers=0)
    fields = {name: value for name, value in recipe.fields.items() if name in ("size", "chunk_bytes")}
    own = fb.ImageRecipe(**fields, pad_color=tuple(recipe.fields["pad_color"]), tags=tuple(recipe.fields["tags"]))
    with pytest.raises(SourceChanged, match=r"'001.json' was edited, added or removed; it describes '001.png'"):
        fb.build(root, source, own, workers=0)
    assert fb.refresh(root, workers=0).changed == {"001.json": how}


def test_new_tags_that_are_not_in_the_vocabulary_are_counted_and_named(tmp_path: Path, pictures: Path) -> None:
    image_cache(tmp_path / "cache", pictures, tags=("cat", "looking_left"))  # two tags of the pictures are left out
    retag(pictures, 1, "cat", "zebra")
    retag(pictures, 4, "lion", "zebra")
    (note,) = fb.refresh(tmp_path / "cache", workers=0).notes
    assert note.startswith(f"2 new tag(s) are not in the vocabulary, as 'zebra' of '{sample_id(1)}', and have no index")
    retag(pictures, 4, "cat")
    assert fb.refresh(tmp_path / "cache", workers=0).notes == ()


def test_an_interrupted_refresh_of_tags_decodes_nothing_when_it_is_resumed(
    tmp_path: Path, pictures: Path, decoded: list[int]
) -> None:
    image_cache(tmp_path / "cache", pictures)
    before = len(load_plan(fb.LocalStore(tmp_path / "cache")).segments)
    for number in (1, 6):
        retag(pictures, number, "outdoors")
    fb.refresh(tmp_path / "cache", workers=0)
    for path in sorted((tmp_path / "cache/generations").iterdir())[1:]:
        path.unlink()
    for path in (tmp_path / "cache/layers/images").glob("*.r1.*"):
        path.unlink()
    assert len(load_plan(fb.LocalStore(tmp_path / "cache")).segments) == before + 1
    assert fb.status(tmp_path / "cache").stale.keys() == {"001.json", "006.json"}
    decoded.clear()
    assert len(fb.refresh(tmp_path / "cache", workers=0).chunks) == 2
    assert decoded == []
    assert fb.verify(tmp_path / "cache", full=True).sound
