"""A cache that names a bucket: nobody is asked there, and nothing is sent there, until the user says so.

An archive can hold a cache and, beside it, a folder called `s3:`. The plan then names files of this machine, so that
nothing shows that a source is remote, whose names become URLs where they are joined to the root.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.campaign.hostile import Parts, chunks, write_plan
from tests.campaign.worlds import doorbell
from tests.helpers.layer_recipes import write_lines

import forebay as fb
from forebay.cli.main import cli
from forebay.sources.opening import full_path

Everywhere = Callable[[Path, Path], None]
VERBS = (
    ("status",),
    ("verify",),
    ("verify", "--full"),
    ("peek",),
    ("build", "--workers", "0"),
    ("update", "--workers", "0"),
    ("repair", "--workers", "0"),
    ("view", "--bundle", "page.html"),
)


def crafted(folder: Path, root: str, name: str) -> Path:
    """A cache whose plan says that its source is `name` below `root`; a chunk of it is lost."""
    write_lines(folder / "raw/a.txt", 0, 10)
    cache = folder / "cache"
    fb.build(cache, fb.sources.lines(folder / "raw/a.txt"), fb.RawRecipe(chunk_bytes=64), workers=0)
    chunks(cache)[0].unlink()
    path = cache / "plan/000000.safetensors"
    parts = Parts.of(path.read_bytes())
    parts.metadata["source"] |= {"root": root, "patterns": [name]}
    parts.tensors["file_path"] = ("U8", [len(name)], name.encode())
    parts.tensors["file_path_offsets"] = ("U64", [2], b"".join(at.to_bytes(8, "little") for at in (0, len(name))))
    write_plan(cache, path, parts)
    assert fb.verify(cache).bad == ()
    return cache


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Everywhere:
    """Runs every verb in a folder of the attacker's, with credentials for a service that only counts calls."""
    for name, value in {
        "AWS_ENDPOINT_URL": doorbell().address,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "AKIASECRET",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)

    def run(folder: Path, cache: Path) -> None:
        monkeypatch.chdir(folder)
        for verb, *options in VERBS:
            ran = CliRunner().invoke(cli, [verb, str(cache), *options], prog_name="forebay")
            assert doorbell().calls() == [], (verb, options)
            assert ran.exception is None or isinstance(ran.exception, SystemExit), (verb, ran.exception)
            assert "bug in forebay" not in ran.stderr, ran.stderr

    return run


@pytest.mark.parametrize("root", ["s3://evil/data", "S3://evil", "s3:/evil"])
def test_a_source_in_a_bucket_is_not_asked_because_a_cache_names_it(
    tmp_path: Path, everywhere: Everywhere, root: str
) -> None:
    everywhere(tmp_path, crafted(tmp_path, root, "a.txt"))


@pytest.mark.parametrize(
    ("root", "name"), [("", "s3:/evil/a.txt"), (".", "s3:/evil/a.txt"), ("x", "../s3:/evil/a.txt")]
)
def test_a_name_that_becomes_a_url_names_a_file_of_this_machine(
    tmp_path: Path, everywhere: Everywhere, root: str, name: str
) -> None:
    cache = crafted(tmp_path, root, name)
    (tmp_path / "s3:/evil").mkdir(parents=True)
    (tmp_path / "raw/a.txt").rename(tmp_path / "s3:/evil/a.txt")
    os.utime(tmp_path / "s3:/evil/a.txt", ns=(1, 1))
    everywhere(tmp_path, cache)


@pytest.mark.parametrize(("root", "name"), [("", "s3://b/a"), (".", "s3:/b/a"), ("x", "../s3:/b/a"), ("/", "gs://b/a")])
def test_a_path_below_a_folder_is_never_a_url(root: str, name: str) -> None:
    assert os.path.isabs(full_path(root, name))
