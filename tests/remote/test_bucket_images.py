"""Images and manifests of images in buckets: the same bytes as from a folder, and every change is found."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from tests.cli.running import run
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


def test_a_manifest_names_images_by_url_too(bucket, photos):
    lines = [{"path": f"{bucket}/photos/a.png"}, {"path": "s3://other/a.png"}, {"path": "/a.png"}]
    upload(bucket, "photos/urls.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    first, *others = fb.sources.image_manifest(f"{bucket}/photos/urls.jsonl").files()
    assert first.path == "a.png"
    assert [file.etag.partition("!")[2] for file in others] == ["outside-root", "outside-root"]
    below = fb.sources.image_manifest(f"{bucket}/photos/list.jsonl", root=f"{bucket}/photos")
    assert below == fb.sources.image_manifest(f"{bucket}/photos/list.jsonl")


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


def test_a_new_sidecar_is_a_change_of_its_image(bucket, photos, tmp_path):
    source = fb.sources.images(f"{bucket}/photos")
    fb.build(tmp_path / "cache", source, RECIPE, workers=0, end_chunk=0)
    upload(bucket, "photos/c.json", b'{"tags": ["cat"]}')
    with pytest.raises(SourceChanged, match=r"'c\.json' was edited, added or removed"):
        fb.build(tmp_path / "cache", source, RECIPE, workers=0)


def test_a_changed_line_of_a_manifest_and_a_changed_image_are_found(bucket, photos, tmp_path):
    source, lines = fb.sources.image_manifest(f"{bucket}/photos/list.jsonl"), (photos / "list.jsonl").read_bytes()
    fb.build(tmp_path / "cache", source, RECIPE, workers=0)
    upload(bucket, "photos/list.jsonl", lines.replace(b"dog", b"cow"))
    assert fb.status(tmp_path / "cache", source=source).stale
    upload(bucket, "photos/list.jsonl", lines)
    assert not fb.status(tmp_path / "cache", source=source).stale
    upload(bucket, "photos/a.png", bytes(reversed((photos / "a.png").read_bytes())))
    assert fb.status(tmp_path / "cache", source=source).stale


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


def test_a_build_asks_for_images_and_for_the_sidecars_that_are_listed(bucket, photos, s3, tmp_path, monkeypatch):
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        source = fb.sources.images(f"{bucket}/photos")
        named = [*(file.path for file in source.files()), "a.png.json", "b.txt", "deep/d.json"]
        proxy.reset_counts()
        fb.build(tmp_path / "cache", source, RECIPE, workers=0)
    asked = Counter(key.removeprefix("photos/") for operation, key in proxy.log if operation in ("read", "head"))
    assert asked.pop("photos") <= 3  # is it an object or a folder?
    assert asked.keys() == set(named), "the listing says which sidecars there are"
    images = {name: asked[name] for name in named if name.lower().endswith(".png")}
    assert images == dict.fromkeys(images, 2), "one of them for the trial that estimates rows"


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


@pytest.mark.slow
def test_the_command_line_builds_and_updates_images_of_a_bucket(bucket, photos, tmp_path):
    cache = f"{bucket}/cache"
    run("build", "images", f"{bucket}/photos", "--into", cache, "--size", SIZE, "--workers", 0)
    upload(bucket, "photos/z.png", sample(9).data.content)
    run("update", cache, f"{bucket}/photos", "--workers", 0)
    assert fb.status(cache, source=fb.sources.images(f"{bucket}/photos")).complete
    run("verify", cache, "--allow-network")
    manifest = f"{bucket}/listed"
    run("build", "images", f"{bucket}/photos/list.jsonl", "--into", manifest, "--size", SIZE, "--workers", 0)
    upload(bucket, "photos/list.jsonl", (photos / "list.jsonl").read_bytes() + b'{"path": "c.png"}\n')
    before = len(fb.open_cache(manifest))
    run("update", manifest, f"{bucket}/photos/list.jsonl", "--workers", 0)
    assert len(fb.open_cache(manifest)) == before + 1
