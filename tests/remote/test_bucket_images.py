"""Images and manifests of images in buckets: the same bytes as from a folder, and every change is found."""

import gzip
import json
from pathlib import Path

import pytest
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.image_caches import SIZE, sample

import forebay as fb
from forebay.errors import SourceChanged
from forebay.source import samples_of
from forebay.store import open_store

RECIPE = fb.ImageRecipe(size=SIZE, chunk_bytes=4 * 3 * SIZE * SIZE)


def upload(bucket: str, name: str, content: bytes) -> None:
    folder, _, key = f"{bucket}/{name}".rpartition("/")
    open_store(folder).replace(key, [content])


@pytest.fixture
def photos(bucket, tmp_path) -> Path:
    """A folder whose files are also in the bucket, below `photos`."""
    pictures = [sample(number).data.content for number in range(7)]
    files = {
        "a.png": pictures[0], "a.png.json": b'{"tags": ["cat"], "id": 1}', "a.json": b'{"tags": ["never"]}',
        "b.png": pictures[1], "b.txt": b"cat, outdoors", "c.png": pictures[2],
        "deep/d.PNG": pictures[3], "deep/d.json": b"not JSON", "deep/cat/e.png": pictures[4],
        "odd é #%.png": pictures[5], "f.png": b"not a picture", ".hidden.png": pictures[6], "notes.md": b"x",
        "notes.txt": b"x",
    }  # fmt: skip
    lines = [{"path": "a.png", "tags": ["dog"]}, {"path": "deep/d.PNG"}, {"path": "gone.png"}, {"path": "a.png"}]
    files["list.jsonl"] = "".join(json.dumps(line) + "\n" for line in lines).encode()
    for name, content in files.items():
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(content)
        upload(bucket, f"photos/{name}", content)
    return tmp_path / "photos"


def chunks(root) -> dict[str, bytes]:
    store = open_store(root)
    return {entry.key: store.read(entry.key) for entry in store.entries("layers/") if "recipe" not in entry.key}


def built(root, source) -> dict[str, bytes]:
    fb.build(root, source, RECIPE, workers=0)
    return chunks(root)


@pytest.mark.parametrize("pattern", ["", "*.png", "**/*.png", "a.png", "deep"])
@pytest.mark.parametrize("labels", ["sidecar", "folder"])
def test_images_in_a_bucket_make_the_bytes_that_the_same_folder_makes(bucket, photos, tmp_path, pattern, labels):
    here = fb.sources.images(photos / pattern, labels=labels)
    there = fb.sources.images(f"{bucket}/photos/{pattern}", labels=labels)
    assert [file.path for file in there.files()] == [file.path for file in here.files()]
    assert dict(there.listing().left_out) == dict(here.listing().left_out)
    assert [there.look(file.path) for file in there.files()] == there.files(), "a listing and a look agree"
    assert built(tmp_path / "there", there) == built(tmp_path / "here", here) != {}


@pytest.mark.parametrize("packed", [False, True])
def test_a_manifest_in_a_bucket_makes_the_bytes_that_a_local_one_makes(bucket, photos, tmp_path, packed):
    name = "list.jsonl"
    if packed:
        name, content = "list.jsonl.gz", gzip.compress((photos / "list.jsonl").read_bytes(), mtime=0)
        (photos / name).write_bytes(content)
        upload(bucket, f"photos/{name}", content)
    here, there = fb.sources.image_manifest(photos / name), fb.sources.image_manifest(f"{bucket}/photos/{name}")
    assert [file.path for file in there.files()] == [file.path for file in here.files()]
    assert [there.look(file.path) for file in there.files()] == there.files()
    assert built(tmp_path / "there", there) == built(tmp_path / "here", here) != {}


def test_a_changed_image_or_sidecar_is_an_error_that_names_it(bucket, photos, tmp_path):
    source = fb.sources.images(f"{bucket}/photos")
    fb.build(tmp_path / "cache", source, RECIPE, workers=0, end_chunk=0)
    upload(bucket, "photos/b.txt", b"cat, outdoorz")  # the same size
    with pytest.raises(SourceChanged, match=r"'b\.txt' was edited, added or removed; it describes 'b\.png'"):
        fb.build(tmp_path / "cache", source, RECIPE, workers=0)
    upload(bucket, "photos/b.txt", b"cat, outdoors")
    flipped = bytearray((photos / "b.png").read_bytes())
    flipped[-1] ^= 1
    upload(bucket, "photos/b.png", bytes(flipped))
    with pytest.raises(SourceChanged, match=r"'b\.png' has other content than was planned"):
        fb.build(tmp_path / "cache", source, RECIPE, workers=0)


def test_listing_and_checking_ask_for_pages_not_for_images(bucket, photos, s3, tmp_path, monkeypatch):
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        source = fb.sources.images(f"{bucket}/photos")
        proxy.reset_counts()
        assert len(source.files()) == 7
        assert proxy.requests == {"head": 1, "list": 1}
        fb.build(tmp_path / "cache", source, RECIPE, workers=0)
        proxy.reset_counts()
        assert fb.status(tmp_path / "cache", source=source).complete
        assert proxy.requests["head"] + proxy.requests["list"] <= 4  # pages of what is planned, and of what is new
        assert proxy.requests["read"] == 0


def test_an_image_that_changes_while_it_is_read_leaves_no_chunk(bucket, photos, tmp_path):
    source = fb.sources.images(f"{bucket}/photos")
    (planned,) = [file for file in source.files() if file.path == "b.png"]
    assert source.reads_planned_files
    part = fb.source.Part(planned, 0, 1)
    assert len(list(samples_of(source, part))) == 1
    for name, content in (("b.txt", b"cat, outdoorz"), ("b.png", (photos / "a.png").read_bytes())):
        upload(bucket, f"photos/{name}", content)
        with pytest.raises(SourceChanged, match=rf"'{name}' changed while it was read"):
            list(samples_of(source, part))
        upload(bucket, f"photos/{name}", (photos / name).read_bytes())
    open_store(f"{bucket}/photos").delete("b.png")
    with pytest.raises(SourceChanged, match=r"'b\.png' changed while it was read"):
        list(samples_of(source, part))
