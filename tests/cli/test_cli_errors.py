"""Every error that a user can cause is one line that says what to do, with exit code 1 and no traceback."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from click import Context
from click.testing import CliRunner
from tests.cli.running import (
    COMMAND,
    Ran,
    build_lines,
    chunk_path,
    flip,
    run,
    run_process,
    stories,
    write_documents,
    write_lines,
)
from tests.hub.data_sets import shard
from tests.hub.server import Flip, HubServer
from tests.layer_recipes import LineRecipe
from tests.pairs import more
from tests.tokens.test_encoders import unsupported
from tests.tokens.vocabularies import byte_level

import forebay as fb
from forebay import errors
from forebay.cli.main import cli
from forebay.preview.words import printable

Scene = Callable[[Path, pytest.MonkeyPatch], Ran]
SCENES: dict[type[errors.ForebayError], tuple[Scene, str]] = {}


def shows(error: type[errors.ForebayError], words: str) -> Callable[[Scene], Scene]:
    """Register what a user does to meet an error, and words of its line."""

    def keep(scene: Scene) -> Scene:
        SCENES[error] = (scene, words)
        return scene

    return keep


@shows(errors.CacheNotFound, "there is no cache at")
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    return run("status", tmp_path / "nowhere", code=1)


@shows(errors.NothingPublished, "has no generation; see `forebay status")
def no_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path, "--end-chunk", 0)
    for generation in (root / "generations").iterdir():
        generation.unlink()
    return run("info", root, code=1)


@shows(errors.LayerNotFound, "has no layer 'lune'; it has: raw")
def no_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    run("build", root, "--layer", "lune", code=1)
    return run("gaps", root, "--layer", "lune", code=1)


@shows(errors.ColumnNotFound, "has no column 'tokens'; it has: data, id")
def no_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    return run("peek", root, "--column", "tokens", code=1)


@shows(
    errors.RecipeMismatch,
    '(differs in: chunk_bytes: 400 → 16777216, codec: "zstd" → "lz4"); resume with its own recipe',
)
def other_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, source = build_lines(tmp_path)
    run("build", root, "--codec", "lz4", code=1)
    return run("build", "raw", source, "--into", root, "--codec", "lz4", code=1)


@shows(errors.RecipeInvalid, "is not a valid layer name")
def bad_layer_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = write_lines(tmp_path / "data")
    return run("build", "raw", source, "--into", tmp_path / "cache", "--layer", "a/b", code=1)


@shows(errors.UnknownKind, "no recipe of kind 'numbers' is installed")
def foreign_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    path = tmp_path / "numbers.txt"
    path.write_text("1\n2\n3\n")
    fb.build(tmp_path / "cache", fb.sources.lines(path), LineRecipe(), workers=0)
    run("peek", tmp_path / "cache")
    return run("build", tmp_path / "cache", code=1)


@shows(errors.SettingsInvalid, "small.toml:1: unknown section [bild]; did you mean 'build'?")
def bad_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "small.toml").write_text("[bild]\n")
    return run("build", tmp_path / "small.toml", code=1)


@shows(errors.FormatTooNew, "upgrade forebay")
def newer_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    document = json.loads((root / "cache.json").read_text())
    (root / "cache.json").write_text(json.dumps({**document, "format_version": 99}))
    return run("status", root, code=1)


@shows(errors.ChunkCorrupt, "is corrupt: ")
def corrupt_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    size = chunk_path(root, 0).stat().st_size
    for position in range(4096, size):
        flip(chunk_path(root, 0), position)
    return run("peek", root, code=1)


@shows(errors.ChunkMissing, "is published but its file is missing; run `forebay repair")
def missing_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    chunk_path(root, 0).unlink()
    return run("peek", root, code=1)


@shows(errors.IndexCorrupt, "run `forebay repair")
def corrupt_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    newest = max((root / "generations").iterdir())
    flip(newest, newest.stat().st_size - 1)
    return run("info", root, code=1)


@shows(errors.StoreRefused, "no store has the scheme")
def a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    monkeypatch.chdir(tmp_path)
    root, source = build_lines(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    run("build", "raw", source, "--into", "gcs://bucket/cache", code=1)
    run("status", "file:///bucket/cache", code=1)
    run("build", "raw", "https://host/a.jsonl", "--into", "new", code=1)
    ran = run("copy", root, "s33://bucket/backup", code=1)
    assert sorted(tmp_path.rglob("*")) == before
    return ran


@shows(errors.StoreUnavailable, "check the network and the endpoint in AWS_*, and try again")
def a_bucket_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    monkeypatch.setattr("forebay.store.object_store._PAUSES", (0.0, 0.0))
    monkeypatch.setattr("forebay.store.bucket_client._RETRIES", {"max_retries": 0})
    for name, value in (
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ALLOW_HTTP", "true"),
    ):
        monkeypatch.setenv(name, value)
    return run("status", "s3://bucket/cache", code=1)


@shows(errors.PinMismatch, "its generation is 0, expected at least 7; see `forebay info")
def rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    return run("verify", root, "--min-generation", 7, code=1)


@shows(errors.KeyRefused, "is refused: ")
def refused_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "secret")
    return run("info", root, code=1)


@shows(errors.SourceNotFound, "check the path")
def no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    run("estimate", "raw", tmp_path / "*.jsonl", code=1)
    return run("build", "raw", tmp_path / "*.jsonl", "--into", tmp_path / "cache", code=1)


@shows(errors.SourceUnreadable, "cannot read ")
def unreadable_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "a.jsonl.gz").write_bytes(b"this is not gzip")
    run("estimate", "raw", tmp_path / "a.jsonl.gz", code=1)
    return run("build", "raw", tmp_path / "a.jsonl.gz", "--into", tmp_path / "cache", code=1)


@shows(errors.SourceChanged, "'a.jsonl' has other content than was planned; run `forebay refresh")
def changed_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, source = build_lines(tmp_path)
    source.write_text(source.read_text().replace("line 007", "line 700"))
    run("build", root, code=1)
    return run("grow", root, source, code=1)


@shows(errors.BuildFailed, "could not be built: chunk 1: ")
def failed_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    for name in ("a.md", "b.md"):
        write_lines(tmp_path / "data", name)
    words = ["--into", tmp_path / "cache", "--chunk-bytes", 400, "--workers", 0]
    run("build", "raw", tmp_path / "data", *words, "--end-chunk", 0)
    (tmp_path / "data" / "b.md").unlink()
    return run("build", "raw", tmp_path / "data", *words, code=1)


@shows(errors.WorkersFailed, "exit during start-up")
def failed_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = write_lines(tmp_path / "data")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    return run("build", "raw", source, "--into", tmp_path / "cache", "--workers", 1, code=1)


@shows(errors.TooManyFailures, "30 of 60 samples failed; the limit is 10.00%: see `forebay status ")
def many_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = tmp_path / "a.jsonl"
    source.write_text("ab\n" * 30 + "a long line\n" * 30)
    words = ["--max-sample-bytes", 5, "--max-failures", "10%", "--workers", 0]
    return run("build", "raw", source, "--into", tmp_path / "cache", *words, code=1)


@shows(errors.ChunkFailed, "failed (30 × too-long, e.g. ")
def failed_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "a.jsonl").write_text("ab\n" * 100)
    (tmp_path / "b.jsonl").write_text("a long line\n" * 30)
    words = ["--max-sample-bytes", 5, "--chunk-bytes", 100_000, "--workers", 0]
    run("build", "raw", tmp_path / "a.jsonl", "--into", tmp_path / "cache", *words)
    return run("grow", tmp_path / "cache", tmp_path / "b.jsonl", "--workers", 0, code=1)


@shows(
    errors.SourceEmpty, "nothing to build: none of the 1 file(s) of the source has a sample; nothing was published at"
)
def empty_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "a.jsonl").write_text("")
    return run("build", "raw", tmp_path / "a.jsonl", "--into", tmp_path / "cache", "--workers", 0, code=1)


@shows(errors.NothingMade, "all 60 trial sample(s) failed (60 × too-long, e.g. ")
def nothing_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = write_lines(tmp_path / "data")
    words = ["--max-sample-bytes", 5, "--workers", 0]
    return run("build", "raw", source, "--into", tmp_path / "cache", *words, code=1)


@shows(errors.DiskFull, "free some space and run the same command to resume")
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = write_lines(tmp_path / "data")
    link = os.link

    def full(here: str, there: str, **folders: Any) -> None:
        if there.endswith("000002.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), there)
        link(here, there, **folders)

    monkeypatch.setattr(os, "link", full)
    words = ["--chunk-bytes", 400, "--workers", 0]
    return run("build", "raw", source, "--into", tmp_path / "cache", *words, code=1)


@shows(errors.MemoryTooSmall, "raise --memory-limit")
def small_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = write_lines(tmp_path / "data")
    words = ["--chunk-bytes", 400, "--memory-limit", "1MB", "--workers", 1]
    return run("build", "raw", source, "--into", tmp_path / "cache", *words, code=1)


@shows(errors.LibraryMissing, "pip install 'forebay[tokens]'")
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "tokenizer.json").write_bytes(byte_level())  # one that no other test has loaded
    monkeypatch.setattr("forebay.tokens.vocabulary.find_spec", lambda name: None)
    return build_one(tmp_path, "--tokenizer", tmp_path / "tokenizer.json", code=1)


@shows(errors.TokenizerUnusable, "pass 'gpt2', the path of a tokenizer.json, or org/name on the hub")
def no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    return build_one(tmp_path, "--tokenizer", "nowhere.json", code=1)


@shows(errors.TemplateUnusable, "pass another with --template FILE")
def no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "tokenizer.json").write_bytes(byte_level())
    (tmp_path / "chats.jsonl").write_text('{"prompt": "Hi", "completion": "Hello"}\n')
    words = ["--tokenizer", tmp_path / "tokenizer.json", "--into", tmp_path / "cache", "--workers", 0]
    return run("build", "chat", tmp_path / "chats.jsonl", *words, code=1)


@shows(errors.EncodersDiffer, "pass encoder='auto' or encoder='tokenizers'")
def unsupported_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "tokenizer.json").write_bytes(unsupported().json)
    return build_one(tmp_path, "--tokenizer", tmp_path / "tokenizer.json", "--encoder", "fastokens", code=1)


@shows(errors.DocumentTooLong, "document 'a.jsonl@0' has 3 tokens but a row holds 2; raise `sequence_length` or set")
def long_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    return build_one(tmp_path, "--long-documents", "error", "--sequence-length", 2, code=1)


@shows(errors.SourceNeeded, "and forebay runs no code just because a cache names it; pass it from Python")
def function_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = fb.sources.function(stories, slices=2)
    fb.build(tmp_path / "cache", source, fb.TokenRecipe(tokenizer="gpt2", sequence_length=64), workers=0)
    run("status", tmp_path / "cache")
    return run("build", tmp_path / "cache", code=1)


@shows(
    errors.SourceNotContacted, "forebay contacts no machine just because a cache names it; allow it with `forebay build"
)
def remote_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    with HubServer() as hub:
        hub.add("org/name", {"train-0.parquet": shard(["some text"] * 5)})
        words = ["hub:org/name", "--into", tmp_path / "cache", "--workers", 0]
        run_process("build", "tokens", *words, env=_environment(hub, tmp_path))
    return run("build", tmp_path / "cache", code=1)


@shows(errors.RecipeNotContacted, "needs 'org/name' from the hub, and forebay contacts no machine just because a cache")
def remote_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    build_one(tmp_path, code=0)
    kept = tmp_path / "cache" / "layers" / "tokens" / "recipe.json"
    kept.write_text(kept.read_text().replace('"tokenizer": "gpt2"', '"tokenizer": "org/name"'))
    shutil.rmtree(tmp_path / "cache" / "generations")
    (kept.parent / "constants.safetensors").unlink()
    return run("build", tmp_path / "cache", code=1)


@shows(errors.HubUnreachable, "name a mirror with HF_ENDPOINT, or use local files")
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    return run_process("estimate", "tokens", "hub:org/name", "--download-retries", 0, env=environment, code=1)


@shows(errors.HubNotFound, "cannot get ")
def not_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    with HubServer() as hub:
        return run_process("estimate", "tokens", "hub:org/name", env=_environment(hub, tmp_path), code=1)


@shows(errors.DownloadCorrupt, "does not match what the hub lists")
def spoiled_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    with HubServer() as hub:
        hub.add("org/name", {"train-0.parquet": shard(["text"] * 5)})
        hub.spoil("train-0.parquet None", *(Flip(20) for _ in range(9)))
        words = ["hub:org/name", "--into", tmp_path / "cache", "--workers", 0, "--download-retries", 0, "--json"]
        return run_process("build", "tokens", *words, env=_environment(hub, tmp_path), code=1)


@shows(errors.TierNotFound, "there is no tier of rows in it; fill one with `forebay warm")
def no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    return run("tier", "stats", tmp_path, code=1)


@shows(errors.TierUnusable, "it holds a 'data.mdb' that forebay did not make; choose another folder")
def a_tier_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    with lmdb.open(str(tmp_path)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    return run("tier", "stats", tmp_path, code=1)


def _environment(hub: HubServer, folder: Path) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(folder), "NO_PROXY": "127.0.0.1"}


def build_one(tmp_path: Path, *flags: object, code: int) -> Ran:
    source = write_documents(tmp_path / "data", ["one document"])
    return run("build", "tokens", source, "--into", tmp_path / "cache", "--workers", 0, "--json", *flags, code=code)


def _all_errors(error: type[errors.ForebayError]) -> Iterator[type[errors.ForebayError]]:
    for inner in error.__subclasses__():
        yield inner
        yield from _all_errors(inner)


@pytest.mark.parametrize("error", SCENES, ids=lambda error: error.__name__)
def test_an_error_is_one_line_that_says_what_to_do(
    error: type[errors.ForebayError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scene, words = SCENES[error]
    ran = scene(tmp_path, monkeypatch)
    assert words in ran.err, ran.err
    # A slow machine also says how far it is.
    said = [line for line in ran.err.splitlines() if not re.match(r"note: |[a-z]+ [\d,]+/[\d,]+ [a-z]+  \d+ %", line)]
    assert len(said) == 1, ran.err
    assert said[0].startswith("forebay: ")
    if ran.out:  # with --json
        assert said[0] == f"forebay: {printable(ran.error['message'])}"


def test_no_error_is_left_out():
    # Damaged and NotForebay reach a user inside what repair and verify report; layers come with later kinds; a
    # stopped build is in test_cli_stop.py; a function can be a source in Python only; nothing is trained from here;
    # what is no image is recorded; workers that a sample takes along are in test_cli_tier.py; what goes wrong with
    # teachers and old caches is in test_cli_teachers.py, test_cli_taught.py and tests/teachers.
    # A range beyond the plan, and options that name no source, are wrong usage; a source that never stops changing is
    # in tests/cache/test_build.py.
    # Clusters are in tests/engine/test_ray.py and test_machines.py, layers that others read in
    # tests/cache/test_drop.py, and those that share a column in tests/building/test_layers.py.
    elsewhere = {
        errors.LayersShareColumn,
        errors.EngineUnusable,
        errors.CacheNotShared,
        errors.SourceNotShared,
        errors.NotImportable,
        errors.LayerNeeded,
        errors.Damaged,
        errors.NotForebay,
        errors.LayerIncomplete,
        errors.FunctionFailed,
    }
    # Lanes are in test_cli_remote.py, damaged tiers in tests/tiers, blocks that are too large in tests/format.
    elsewhere |= {
        errors.RangeInvalid,
        errors.SourceInvalid,
        errors.SourceMoving,
        errors.TierDamaged,
        errors.BlockTooLarge,
    }
    elsewhere |= {errors.GenerationGone, errors.SelectionEmpty, errors.SelectionLost, errors.StateMismatch}
    elsewhere |= {
        errors.WindowTooLarge,
        errors.LaneMissing,
        errors.TierNeeded,
        errors.ImageUnreadable,
        errors.AllTokensIgnored,
        errors.WarmingFailed,
    }
    # Verbs that write say DiskFull where a store is full; a full tier is in tests/store/test_tiered.py.
    elsewhere |= {errors.RanksDisagree, errors.RanksMissing, errors.StoreFull}
    elsewhere |= {errors.TeacherUnusable, errors.TeacherOutputInvalid, errors.TeacherRaised}
    elsewhere |= {errors.HookSilent, errors.InputIncomplete, errors.LayerNotTimed, errors.OldCacheInvalid}
    ours = {error for error in _all_errors(errors.ForebayError) if error.__module__ == errors.__name__}
    assert set(SCENES) | elsewhere == ours


def test_a_chunk_that_failed_is_in_the_status_until_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failed_build(tmp_path, monkeypatch)
    shown = run("status", tmp_path / "cache", code=1).out
    assert "raw chunk 1  failed" in shown
    assert "b.md  is gone" in shown
    write_lines(tmp_path / "data", "b.md")
    shown = run("status", tmp_path / "cache", code=1).out
    assert "is gone" not in shown
    run("build", tmp_path / "cache", "--workers", 0)
    assert run("status", tmp_path / "cache", "--json").json["claims"] == []


def test_a_place_that_cannot_be_written(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    ran = run("build", "raw", source, "--into", "/proc/forebay/cache", "--workers", 0, code=1)
    assert "check the path, its permissions and the disk" in ran.err
    assert ran.err.count("\n") == 1


def test_a_cache_inside_a_file(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    ran = run("build", "raw", source, "--into", source / "cache", "--workers", 0, code=1)
    assert "check the path" in ran.err
    assert ran.err.count("\n") == 1
    assert "there is no cache at" in run("status", source / "cache", code=1).err
    assert "there is no cache at" in run("status", source, code=1).err


def test_a_cache_in_place_of_a_file(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    ran = run("build", "raw", source, "--into", source, "--workers", 0, code=1)
    assert ran.err.startswith(f"forebay: '{source}': it is a file; --into needs a folder; check the path")
    assert ran.err.count("\n") == 1


def test_a_parquet_file_without_the_column_says_which_flag_names_it(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(shard(["one"], column="content"))
    ran = run("estimate", "tokens", tmp_path / "a.parquet", code=1)
    assert (
        "it has no column 'text'; it has: 'id', 'content', 'url'; a build names the one that holds the text (--text"
        in ran.err
    )


def test_copying_onto_another_cache_is_refused(tmp_path: Path):
    root, _ = build_lines(tmp_path / "one")
    other, _ = build_lines(tmp_path / "two")
    assert "holds another cache" in run("copy", root, other, code=1).err


def test_a_bug_shows_where_it_is_and_asks_to_report_it(monkeypatch: pytest.MonkeyPatch):
    def broken(**_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli.get_command(Context(cli), "gaps"), "callback", broken)
    result = CliRunner().invoke(cli, ["gaps", "cache"])
    assert result.exit_code == 1
    assert "ZeroDivisionError: a bug" in result.stderr
    assert "a report needs the lines above, the command, and what `forebay doctor` prints" in result.stderr


class OutOfMemoryError(RuntimeError):
    """As torch names the one of a device."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory; use fewer --workers"),
        (MemoryError("Unable to allocate\n8 EiB"), "not enough memory (Unable to allocate 8 EiB); use fewer"),
        (
            OutOfMemoryError("CUDA out of memory"),
            "the device does not have enough memory: CUDA out of memory; use a small",
        ),
        (RecursionError("maximum recursion depth exceeded"), "nested too deep"),
        (
            ModuleNotFoundError("No module named 'soup'", name="soup"),
            "No module named 'soup'; see what is installed with `forebay doctor`",
        ),
        (
            ImportError("libfoo.so: cannot read file data: Input/output error"),
            "a library is missing, damaged or too old",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full; published chunks stay valid"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system; mount it for writing, or name another"),
        (OSError(errno.EIO, "Input/output error", "a.bin"), "'a.bin': Input/output error; check the path"),
    ],
)
def test_what_is_no_fault_of_ours_is_one_line_and_no_bug(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch):
    def failing(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.get_command(Context(cli), "gaps"), "callback", failing)
    said = run("gaps", "cache", code=1).err
    assert words in said
    assert said.count("\n") == 1
    assert "bug" not in said


@pytest.mark.parametrize("error", ["OSError(5, 'Input/output error')", "MemoryError()", "ImportError('libm.so.6')"])
def test_a_start_that_fails_is_one_line(tmp_path: Path, error: str):
    """As where the disk fails while a library is imported."""
    (tmp_path / "rich.py").write_text(f"raise {error}")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from forebay.cli.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("forebay: cannot start: ")
    assert done.stderr.count("\n") == 1


def test_a_module_of_ours_that_is_missing_is_a_bug(monkeypatch: pytest.MonkeyPatch):
    def failing(**_: object) -> None:
        raise ModuleNotFoundError("No module named 'forebay.soup'", name="forebay.soup")

    monkeypatch.setattr(cli.get_command(Context(cli), "gaps"), "callback", failing)
    assert "this is a bug" in CliRunner().invoke(cli, ["gaps", "cache"]).stderr


@pytest.mark.parametrize("closed", [">&-", *more(">&- 2>&-"), "<&- >&- 2>&-", *more("2>&-")])
def test_a_build_whose_streams_are_closed_builds(tmp_path: Path, closed: str):
    source = write_lines(tmp_path / "data")
    words = ["build", "raw", str(source), "--into", str(tmp_path / "cache"), "--workers", "1"]
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "bash", *COMMAND, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done
    assert not re.search("Traceback|bug|Exception", done.stderr)
    assert run("verify", tmp_path / "cache", "--full").code == 0


@pytest.mark.parametrize("verb", [["status"], *more(["peek", "--json"], ["--help"])])
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path: Path, verb: list[str]):
    root, _ = build_lines(tmp_path)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, verb[0], *([] if verb == ["--help"] else [str(root)]), *verb[1:]],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "to standard output: No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--help"], *more(["--version"], ["status", "--help"])])
def test_help_that_cannot_be_printed_is_one_line(words: list[str]):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "the disk is full" in done.stderr or "standard output: No space left on device" in done.stderr


@pytest.mark.parametrize("verb", ["status", "repair", "verify", "clean", "refresh"])
def test_a_folder_that_is_not_a_cache_is_never_to_be_deleted(tmp_path: Path, verb: str):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    said = run(verb, tmp_path / "thesis", code=1).err
    assert f"there is no cache at '{tmp_path / 'thesis'}'" in said
    assert "delete" not in said


@pytest.mark.parametrize(
    "typed", ["forebay build photos ", "forebay build {cache} ", "forebay build x.toml ", "forebay "]
)
def test_completion_never_fails(tmp_path: Path, typed: str):
    root, _ = build_lines(tmp_path)
    words = typed.format(cache=root)
    environment = {"_FOREBAY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(cli, prog_name="forebay", env=environment)
    assert result.exit_code == 0, result
    assert "Traceback" not in result.output
    if typed == "forebay ":
        assert "plain,status" in result.output


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("forebay status cac", "dir,cac"),
        ("forebay build cac", "file,cac"),
        ("forebay build tokens dat", "file,dat"),
        ("forebay build tokens data --into cac", "dir,cac"),
        ("forebay build tokens data --tokenizer tok", "file,tok"),
        ("forebay build teachers caches/photos --t5 mod", "file,mod"),
        ("forebay copy caches/edu bac", "dir,bac"),
        ("forebay repair caches/edu --from bac", "dir,bac"),
        ("forebay warm photos --l2 ti", "dir,ti"),
        ("forebay tier verify ti", "dir,ti"),
        ("forebay build tokens data --codec z", "plain,zstd"),
        ("forebay status --js", "plain,--json"),
        ("forebay build im", "plain,images"),
        ("forebay help st", "plain,status"),
        ("forebay help build to", "plain,tokens"),
        ("forebay build tokens data --codec = z", "plain,zstd"),
        ("forebay build tokens data --codec =", "plain,none"),
        ("forebay build tokens data --codec=z", "plain,--codec=zstd"),
    ],
)
def test_completion_offers_paths_where_a_path_is_expected(typed: str, offered: str):
    environment = {"_FOREBAY_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert offered in CliRunner().invoke(cli, prog_name="forebay", env=environment).output.splitlines()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("peek {} --column da", ["plain,data"]),
        ("gaps {} --layer ", ["plain,raw"]),
        ("drop {} ", []),  # the layer that the cache was built with cannot be dropped
        ("peek {}/nowhere --column ", []),
        ("peek s3://bucket/cache --column ", []),
    ],
)
def test_completion_knows_the_layers_and_columns_of_a_cache(tmp_path: Path, typed: str, offered: list[str]):
    root, _ = build_lines(tmp_path)
    words = f"forebay {typed.format(root)}"
    environment = {"_FOREBAY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert CliRunner().invoke(cli, prog_name="forebay", env=environment).output.split() == offered


@pytest.mark.parametrize(("shell", "offered"), [("zsh", "plain\n--codec=zstd\n_"), ("fish", "plain,--codec=zstd")])
def test_shells_that_do_not_split_at_the_equals_sign_get_the_whole_word(shell: str, offered: str):
    typed = "forebay build raw data --codec=z"
    position = "--codec=z" if shell == "fish" else "4"
    environment = {"_FOREBAY_COMPLETE": f"{shell}_complete", "COMP_WORDS": typed, "COMP_CWORD": position}
    assert CliRunner().invoke(cli, prog_name="forebay", env=environment).output == f"{offered}\n"


def test_bash_itself_completes_verbs_and_paths(tmp_path: Path):
    """The script that help names, in a real shell."""
    (tmp_path / "forebay").write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    (tmp_path / "forebay").chmod(0o755)
    script = """
        eval "$(_FOREBAY_COMPLETE=bash_source forebay)"
        compopt() { echo "paths: $2"; }
        COMP_WORDS=(forebay sta); COMP_CWORD=1; _forebay_completion forebay; echo "${COMPREPLY[@]}"
        COMPREPLY=()  # as bash does before each completion
        COMP_WORDS=(forebay build raw --codec z); COMP_CWORD=4; _forebay_completion forebay; echo "${COMPREPLY[@]}"
        COMP_WORDS=(forebay status cac); COMP_CWORD=2; _forebay_completion forebay
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-4:] == ["status", "zstd", "paths: dirnames", ""], done


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(shell: str):
    result = CliRunner().invoke(cli, prog_name="forebay", env={"_FOREBAY_COMPLETE": f"{shell}_source"})
    assert f"_FOREBAY_COMPLETE={shell}_complete" in result.output


def test_errors_go_to_stderr_also_with_json(tmp_path: Path):
    ran = run_process("status", tmp_path / "nowhere", "--json", code=1)
    assert ran.error["type"] == "CacheNotFound"
    assert ran.err.count("\n") == 1
