"""Caches whose recipe names a kind that did not make them: every verb that shows a cache says what it can."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tests.helpers.forged_caches import Draft, forge

import forebay as fb
from forebay.cache.catalog import load_generation
from forebay.cli.main import cli
from forebay.format import layout

SHOWING = ("info", "status", "peek", "verify")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest")
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    fb.build(folder / "cache", fb.sources.lines(folder / "a.txt"), fb.RawRecipe(), workers=0)
    return folder / "cache"


@pytest.mark.parametrize("kind", ["tokens", "images"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sequence_length": "x", "codec": [], "size": None, "tags": 7},
        {"sequence_length": 64, "codec": "zstd", "size": 64, "tags": ["a"]},
    ],
    ids=["none", "odd", "some"],
)
def test_a_recipe_of_another_kind_is_shown_or_refused_in_one_line(honest, tmp_path, kind, fields):
    root = tmp_path / "cache"
    shutil.copytree(honest, root)
    store = fb.LocalStore(root)
    generation = load_generation(store)
    text = json.dumps(json.loads(generation.recipes["raw"]) | {"kind": kind, "fields": fields})
    store.replace(layout.recipe("raw"), [text.encode()])
    store.replace(layout.generation(0), replace(generation, recipes={"raw": text}).encode(None))
    for words in ([verb, str(root)] for verb in SHOWING):
        ran = CliRunner().invoke(cli, words, prog_name="forebay")
        assert ran.exception is None or isinstance(ran.exception, SystemExit), (words, ran.exception)
        assert ran.exit_code in (0, 1)
        assert ran.stderr.count("\n") <= 2, ran.stderr
    assert [layer.kind for layer in fb.info(root).layers] == [kind]


def test_the_folders_that_only_a_cache_names_are_not_walked(tmp_path: Path) -> None:
    """A stranger's pattern may name the whole machine; the files of the plan are looked at by name."""
    raw, root = tmp_path / "raw", tmp_path / "cache"
    (raw / "deep/deeper").mkdir(parents=True)
    (raw / "a.txt").write_text("one\ntwo\nthree\n")
    fb.build(root, fb.sources.lines(raw / "**/*.txt"), fb.RawRecipe(), workers=0)
    (raw / "deep/deeper/b.txt").write_text("four\n")
    (raw / "a.txt").write_text("ONE\ntwo\nthree\n")
    walked: list[str] = []
    watching = True

    def watch(event: str, args: tuple[object, ...]) -> None:
        if watching and event in ("os.scandir", "os.listdir") and str(args[0]).startswith(str(raw)):
            walked.append(str(args[0]))

    sys.addaudithook(watch)
    for words in (["status"], ["verify"], ["repair"], ["build"], ["build", "--dry-run"], ["estimate"]):
        ran = CliRunner().invoke(cli, [words[0], str(root), *words[1:]], prog_name="forebay")
        assert ran.exit_code == (words[0] in ("status", "verify", "build") and "--dry-run" not in words), (
            words,
            ran.output,
        )
        assert walked == [], words
    assert "has changed" in _output(["build", str(root), "--allow-network"])
    assert walked != []
    watching = False


def _output(words: list[str]) -> str:
    return CliRunner().invoke(cli, words, prog_name="forebay").output


METADATA = [
    b"", b"[]", b"null", b"5", b"{", b"[" * 100_000, b"\xff", b'{"a": ' + b"9" * 6000 + b"}", b'{"a": "\\ud800"}',
]  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    Image.new("RGB", (40, 30)).save(folder / "a.png")
    fb.build(folder / "cache", fb.sources.images(folder), fb.ImageRecipe(size=32, codec="none"), workers=0)
    return folder / "cache"


@pytest.mark.parametrize("stored", METADATA)
def test_metadata_that_no_recipe_stores_is_shown_as_what_it_is(pictures, tmp_path, stored):
    root = tmp_path / "cache"
    shutil.copytree(pictures, root)

    def change(draft: Draft) -> None:
        draft.put("metadata.offsets", np.array([0, len(stored)], np.uint64))
        draft.tensors["metadata"] = ("U8", [len(stored)], stored)

    forge(root, change, "images")
    for words in (["peek", str(root)], ["peek", str(root), "--json"]):
        ran = CliRunner().invoke(cli, words)
        assert ran.exit_code == 0, ran.output
