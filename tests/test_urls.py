"""URLs: a scheme that no store has is refused wherever a path is meant, and no folder is made for it."""

import re
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.helpers.layer_recipes import LineRecipe, number_cache

import forebay as fb
from forebay.errors import SourceInvalid, SourceNotFound, StoreRefused
from forebay.feeding.mixture_file import open_mixture
from forebay.store import open_store

URLS = ["hf://datasets/x", "https://host/x", "file:///tmp/x", "s33://b/x", "gcs://b/x", "S3A://b/x"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder in which nothing may appear."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("url", [*URLS, *map(Path, URLS)], ids=str)
def test_an_unknown_scheme_is_refused_as_a_root(here, url):
    root = number_cache(here)
    source = fb.sources.lines(here / "raw")
    for act in (
        lambda: open_store(url),
        lambda: fb.open_cache(url),
        lambda: fb.build(url, source, LineRecipe(), workers=0),
        lambda: fb.update(url, source, workers=0),
        lambda: fb.copy(root, url),
        lambda: fb.repair(root, copy=url),
        lambda: fb.estimate(source, LineRecipe(), into=url),
        lambda: fb.status(url),
    ):
        with pytest.raises(StoreRefused, match="no store has the scheme"):
            act()


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("gcs://b/x", "did you mean gs://b/x"),
        ("s3a://b/x", "did you mean s3://b/x"),
        ("abfss://c/x", "did you mean az://c/x"),
        ("s33://b/x", "did you mean s3://b/x"),
        ("file:///tmp/x", "pass the path '/tmp/x'"),
        ("https://host/x", "use a path, or one of az://, gs://, memory://, s3://"),
    ],
)
def test_the_scheme_that_was_meant_is_named(url, advice):
    with pytest.raises(StoreRefused) as refused:
        open_store(url)
    assert advice in str(refused.value)


def test_another_package_adds_schemes_and_replaces_none_of_ours(here, monkeypatch):
    pytest.importorskip("obstore")
    about = here / "site" / "shelves-9.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shelves\nVersion: 9\n")
    (about / "entry_points.txt").write_text("[forebay.stores]\nshelf = shelf_store:Shelf\ns3 = shelf_store:Shelf\n")
    (here / "site" / "shelf_store.py").write_text(
        "from forebay.store import LocalStore\n"
        f"class Shelf(LocalStore):\n    def __init__(self, url):\n        super().__init__(r'{here}/' + url[8:])\n"
    )
    monkeypatch.syspath_prepend(here / "site")
    fb.copy(number_cache(here), "shelf://a/b")
    assert len(fb.open_cache("shelf://a/b")) == len(fb.open_cache(here / "a/b")) > 0
    assert type(open_store("s3://bucket/a")).__name__ == "ObjectStore"


@pytest.mark.parametrize("url", ["s3://", "s3://user:word@bucket/x", "s3://b/../x", "s3://b/x?key=1"])
def test_what_is_not_the_url_of_a_bucket_is_refused_without_its_secrets(url):
    pytest.importorskip("obstore")
    with pytest.raises(StoreRefused) as refused:
        open_store(url)
    assert not any(secret in str(refused.value) for secret in ("key=1", "word"))


def test_a_url_names_the_same_store_after_a_path_has_taken_a_slash():
    pytest.importorskip("obstore")
    assert open_store(Path("s3://bucket/a/b/")).address == open_store("S3://bucket/a/b").address == "s3://bucket/a/b"


def test_a_url_is_rejected_as_l2(here):
    with pytest.raises(StoreRefused, match="l2 is the URL"):
        fb.CachedImages(fb.sources.images(here), fb.ImageRecipe(), l2="s3://bucket/tier")


def test_a_manifest_and_its_images_are_in_one_place(here):
    for path, root in ((here / "list.jsonl", "s3://bucket/photos"), ("s3://bucket/list.jsonl", here)):
        with pytest.raises(SourceNotFound, match="both on this machine, or both in one bucket"):
            fb.sources.image_manifest(path, root=root)
    with pytest.raises(SourceNotFound, match="another bucket"):
        fb.sources.image_manifest("s3://bucket/list.jsonl", root="s3://other/photos")


def test_a_spool_is_not_a_url(here):
    with pytest.raises(SourceInvalid, match="the URL"):
        fb.sources.documents(["text"], "s3://bucket/x.jsonl")


def test_a_folder_of_such_a_name_can_be_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_store("./s3:/x").create("a", [b"x"])
    assert (tmp_path / "s3:/x/a").read_bytes() == b"x"


@pytest.mark.parametrize("url", ["s3a://user:word@bucket/x", "https://user:word@host/x?sig=word", "s3a:/user:word@b/x"])
def test_an_error_does_not_show_the_password_of_a_url(url):
    with pytest.raises(StoreRefused) as refused:
        open_store(url)
    assert "word" not in str(refused.value)
    assert "/x" in str(refused.value)


ONE_SLASH = "did you mean '?s3://b/x'?[?]"


def test_one_slash_after_a_scheme_is_refused_wherever_a_cache_is_named(here):
    root = number_cache(here)
    for act in (
        lambda: fb.open_cache("s3:/b/x"),
        lambda: fb.build("s3:/b/x", fb.sources.lines(here / "raw"), LineRecipe(), workers=0),
        lambda: fb.copy(root, "s3:/b/x"),
        lambda: fb.repair(root, copy="s3:/b/x"),
    ):
        with pytest.raises(StoreRefused, match=ONE_SLASH):
            act()
    (here / "mix.toml").write_text('[[cache]]\nroot = "s3:/b/x"\nweight = 1\n')
    with pytest.raises(StoreRefused, match=ONE_SLASH):
        open_mixture(here / "mix.toml")


@pytest.mark.parametrize("make", ["jsonl", "lines", "text", "files", "parquet", "images", "image_manifest"])
def test_one_slash_after_a_scheme_is_refused_wherever_a_source_is_named(here, make):
    pytest.importorskip("pyarrow")
    with pytest.raises(SourceNotFound, match=ONE_SLASH):
        getattr(fb.sources, make)("s3:/b/x")
    with pytest.raises(SourceNotFound, match=ONE_SLASH):
        getattr(fb.sources, make)("s3://b/x/y", root="s3:/b/x")


def test_the_command_line_refuses_one_slash_and_what_would_be_lost_or_land_in_a_folder_named_like_a_url(here):
    (here / "raw.jsonl").write_text('{"text": "a"}\n')
    (here / "one.toml").write_text('[source]\npaths = ["s3:/b/x"]\n[recipe]\nkind = "raw"\n[build]\ninto = "c"\n')
    for name, into in (("into", "s3:/b/x"), ("lost", "memory://x")):
        build = f'[build]\nworkers = 0\ninto = "{into}"\n'
        (here / f"{name}.toml").write_text(f'[source]\npaths = ["raw.jsonl"]\n[recipe]\nkind = "raw"\n{build}')
    for words in (
        ["build", "raw", "s3:/b/x", "--into", here / "c"],
        ["build", "raw", here / "raw.jsonl", "--into", "s3:/b/x"],
        ["build", here / "one.toml"],
        ["build", here / "into.toml"],
        ["info", "s3:/b/x"],
        ["copy", number_cache(here), "s3:/b/x"],
    ):
        assert re.search(ONE_SLASH, run(*words, code=1).err), words
    for words in (
        ["build", "raw", here / "raw.jsonl", "--into", "memory://x", "--workers", "0"],
        ["build", here / "lost.toml"],
        ["copy", here / "cache", "memory://x"],
    ):
        assert "'memory://x' would be lost when this command ends" in run(*words, code=2).err
    for words in (["demo", "--into", "s3://b/x"], ["view", here / "cache", "--bundle", "s3://b/x"]):
        assert "'s3://b/x' is a URL" in run(*words, code=2).err
    assert "it is a URL, and a tier is a folder" in run("tier", "fill", here / "cache", "s3://b/x", code=1).err
