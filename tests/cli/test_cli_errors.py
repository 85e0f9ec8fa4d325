"""Every error that a user can cause is one line that says what to do, with exit code 1 and no traceback."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.helpers.layer_recipes import LineRecipe
from tests.helpers.option_pairs import more
from tests.hub.data_sets import shard
from tests.hub.server import Flip, HubServer
from tests.tokens.test_encoders import unsupported
from tests.tokens.vocabularies import byte_level

import forebay as fb
from forebay import errors
from forebay.cli.main import cli
from forebay.preview.words import printable
from forebay.store.retries import RetryPolicy

PROGRESS = re.compile(r"note: |[a-z]+ [\d,]+/[\d,]+ [a-z]+  \d+%|\{\"progress\"")
Scene = Callable[[Path, pytest.MonkeyPatch], Ran]
SCENES: dict[str, tuple[Scene, type[errors.ForebayError], str]] = {}


def shows(error: type[errors.ForebayError], words: str) -> Callable[[Scene], Scene]:
    """Register what a user does to meet an error, and words of its line."""

    def keep(scene: Scene) -> Scene:
        SCENES[scene.__name__] = (scene, error, words)
        return scene

    return keep


@shows(errors.CacheNotFound, "there is no cache at")
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    return run("status", tmp_path / "nowhere", code=1)


@shows(errors.CacheNotFound, "has no generation\nhint: finish its build")
def no_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path, "--end-chunk", 0)
    for generation in (root / "generations").iterdir():
        generation.unlink()
    return run("info", root, code=1)


@shows(errors.NotFound, "has no layer 'lune' (it has: raw)")
def no_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    run("build", root, "--layer", "lune", code=2)
    return run("drop", root, "lune", code=1)


@shows(
    errors.RecipeMismatch,
    '(differs in: chunk_bytes: 400 → 16777216, codec: "zstd" → "lz4")\nhint: resume with its own recipe',
)
def other_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, source = build_lines(tmp_path)
    run("build", root, "--codec", "lz4", code=1)
    return run("build", "raw", source, "--into", root, "--codec", "lz4", code=1)


@shows(errors.RecipeInvalid, "is not a valid layer name")
def bad_layer_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = write_lines(tmp_path / "data")
    return run("build", "raw", source, "--into", tmp_path / "cache", "--layer", "a/b", code=1)


@shows(errors.LibraryMissing, "no recipe of kind 'numbers' is installed")
def foreign_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    path = tmp_path / "numbers.txt"
    path.write_text("1\n2\n3\n")
    fb.build(tmp_path / "cache", fb.sources.lines(path), LineRecipe(), workers=0)
    run("peek", tmp_path / "cache")
    return run("build", tmp_path / "cache", code=1)


@shows(errors.RecipeInvalid, "small.toml: unknown section [bild]; did you mean 'build'?")
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


@shows(errors.ChunkMissing, "is missing\nhint: run `forebay repair")
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
    monkeypatch.setattr("forebay.store.object_store.RETRIES", RetryPolicy(retries=0))
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


@shows(errors.StateMismatch, "its generation is 0, expected at least 7")
def rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, _ = build_lines(tmp_path)
    return run("verify", root, "--min-generation", 7, code=1)


@shows(errors.KeyRefused, "is rejected: ")
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


@shows(errors.SourceChanged, "'a.jsonl' has other content than was planned\nhint: build a new cache")
def changed_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    root, source = build_lines(tmp_path)
    source.write_text(source.read_text().replace("line 007", "line 700"))
    run("build", root, code=1)
    return run("update", root, source, code=1)


@shows(errors.BuildFailed, "could not be built: chunk 1: ")
def failed_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    for name in ("a.md", "b.md"):
        write_lines(tmp_path / "data", name)
    words = ["--into", tmp_path / "cache", "--chunk-bytes", 400, "--workers", 0]
    run("build", "raw", tmp_path / "data", *words, "--end-chunk", 0)
    (tmp_path / "data" / "b.md").unlink()
    return run("build", "raw", tmp_path / "data", *words, code=1)


@shows(errors.BuildFailed, "exit during start-up")
def failed_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = write_lines(tmp_path / "data")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    return run("build", "raw", source, "--into", tmp_path / "cache", "--workers", 1, code=1)


@shows(errors.TooManyFailures, "30 of 60 samples")
def many_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = tmp_path / "a.jsonl"
    source.write_text("ab\n" * 30 + "a long line\n" * 30)
    words = ["--max-sample-bytes", 5, "--max-failures", "10%", "--workers", 0]
    return run("build", "raw", source, "--into", tmp_path / "cache", *words, code=1)


@shows(errors.BuildFailed, "none of the 1 file(s) of the source has a sample")
def empty_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "a.jsonl").write_text("")
    return run("build", "raw", tmp_path / "a.jsonl", "--into", tmp_path / "cache", "--workers", 0, code=1)


@shows(errors.TooManyFailures, "all 60 trial samples failed (60 × too-long, e.g. ")
def nothing_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = write_lines(tmp_path / "data")
    words = ["--max-sample-bytes", 5, "--workers", 0]
    return run("build", "raw", source, "--into", tmp_path / "cache", *words, code=1)


@shows(errors.StoreFull, "free some space and run the same command to resume")
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


@shows(errors.EngineUnusable, "raise --memory-limit")
def small_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = write_lines(tmp_path / "data")
    words = ["--chunk-bytes", 400, "--memory-limit", "1MB", "--workers", 1]
    return run("build", "raw", source, "--into", tmp_path / "cache", *words, code=1)


@shows(errors.LibraryMissing, "pip install 'forebay[tokens]'")
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "tokenizer.json").write_bytes(byte_level())  # one that no other test has loaded
    monkeypatch.setattr("forebay.tokens.encoders.find_spec", lambda name: None)
    return build_one(tmp_path, "--tokenizer", tmp_path / "tokenizer.json", code=1)


@shows(errors.ModelUnusable, "pass 'gpt2', the path of a tokenizer.json, or org/name on the hub")
def no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    return build_one(tmp_path, "--tokenizer", "nowhere.json", code=1)


@shows(errors.ModelUnusable, "pass another with --template FILE")
def no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "tokenizer.json").write_bytes(byte_level())
    (tmp_path / "chats.jsonl").write_text('{"prompt": "Hi", "completion": "Hello"}\n')
    words = ["--tokenizer", tmp_path / "tokenizer.json", "--into", tmp_path / "cache", "--workers", 0]
    return run("build", "chat", tmp_path / "chats.jsonl", *words, code=1)


@shows(errors.RecipeInvalid, "pass encoder='auto' or encoder='tokenizers'")
def unsupported_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    (tmp_path / "tokenizer.json").write_bytes(unsupported().json)
    return build_one(tmp_path, "--tokenizer", tmp_path / "tokenizer.json", "--encoder", "fastokens", code=1)


@shows(errors.RecipeInvalid, "document 'a.jsonl@0' has 3 tokens; rows hold 2\nhint: raise `sequence_length`, or set")
def long_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    return build_one(tmp_path, "--long", "error", "--sequence-length", 2, code=1)


@shows(errors.SourceInvalid, "forebay runs no code that only a cache names\nhint: pass it from Python")
def function_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    source = fb.sources.function(stories, slices=2)
    fb.build(tmp_path / "cache", source, fb.TokenRecipe(tokenizer="gpt2", sequence_length=64), workers=0)
    run("status", tmp_path / "cache")
    return run("build", tmp_path / "cache", code=1)


@shows(
    errors.SourceInvalid,
    "that only a cache names",
)
def remote_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    with HubServer() as hub:
        hub.add("org/name", {"train-0.parquet": shard(["some text"] * 5)})
        words = ["hub:org/name", "--into", tmp_path / "cache", "--workers", 0]
        run_process("build", "tokens", *words, env=_environment(hub, tmp_path))
    return run("build", tmp_path / "cache", code=1)


@shows(errors.StoreUnavailable, "set HF_ENDPOINT to a mirror, or use local files")
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    return run_process("estimate", "tokens", "hub:org/name", "--download-retries", 0, env=environment, code=1)


@shows(errors.SourceNotFound, "cannot get ")
def not_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    with HubServer() as hub:
        return run_process("estimate", "tokens", "hub:org/name", env=_environment(hub, tmp_path), code=1)


@shows(errors.BuildFailed, "does not match what the hub lists")
def spoiled_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    with HubServer() as hub:
        hub.add("org/name", {"train-0.parquet": shard(["text"] * 5)})
        hub.spoil("train-0.parquet None", *(Flip(20) for _ in range(9)))
        words = ["hub:org/name", "--into", tmp_path / "cache", "--workers", 0, "--download-retries", 0, "--json"]
        return run_process("build", "tokens", *words, env=_environment(hub, tmp_path), code=1)


def _environment(hub: HubServer, folder: Path) -> dict[str, str]:
    return {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(folder), "NO_PROXY": "127.0.0.1"}


def build_one(tmp_path: Path, *flags: object, code: int) -> Ran:
    source = write_documents(tmp_path / "data", ["one document"])
    return run("build", "tokens", source, "--into", tmp_path / "cache", "--workers", 0, "--json", *flags, code=code)


@pytest.mark.parametrize("name", SCENES)
def test_cli_error_is_an_error_line_and_a_hint_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scene, error, words = SCENES[name]
    ran = scene(tmp_path, monkeypatch)
    assert words in ran.err, ran.err
    # A slow machine also says how far it is.
    lines = [line for line in ran.err.splitlines() if not PROGRESS.match(line)]
    assert lines[0].startswith("error: "), ran.err
    assert [line.partition(" ")[0] for line in lines[1:]] in ([], ["hint:"]), ran.err
    if ran.out:  # with --json
        assert ran.error["type"] == error.__name__
        assert lines[0] == f"error: {printable(ran.error['message'])}"
        assert lines[1:] == ([f"hint: {printable(ran.error['hint'])}"] if "hint" in ran.error else [])


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ("/proc/forebay/cache", "hint: check the path, its permissions and the disk"),
        ("{source}/cache", "hint: "),
        ("{source}", "error: '{source}': it is a file, not a folder\nhint: choose a folder"),
    ],
)
def test_folder_that_cannot_be_written_is_an_error_and_a_hint(tmp_path: Path, into: str, words: str):
    source = write_lines(tmp_path / "data")
    root = into.format(source=source)
    ran = run("build", "raw", source, "--into", root, "--workers", 0, code=1)
    assert words.format(source=source) in ran.err
    assert ran.err.count("\n") == 2
    assert "there is no cache at" in run("status", root, code=1).err


def test_a_parquet_file_without_the_column_says_which_flag_names_it(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(shard(["one"], column="content"))
    ran = run("estimate", "tokens", tmp_path / "a.parquet", code=1)
    assert "it has no column 'text'; it has: 'id', 'content', 'url'; name the one with the text (--text" in ran.err


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), ModuleNotFoundError("a bug", name="forebay.soup")])
def test_a_bug_shows_where_it_is_and_asks_to_report_it(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def broken(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.get_command(Context(cli), "info"), "callback", broken)
    result = CliRunner().invoke(cli, ["info", "cache"])
    assert result.exit_code == 1
    assert f"{type(error).__name__}: a bug" in result.stderr
    assert "report the lines above, the command and the output of `forebay doctor`" in result.stderr


class OutOfMemoryError(RuntimeError):
    """As torch names the one of a device."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory\nhint: use fewer --workers"),
        (MemoryError("Unable to allocate\n8 EiB"), "not enough memory (Unable to allocate 8 EiB)\nhint: use fewer"),
        (
            OutOfMemoryError("CUDA out of memory"),
            "the device does not have enough memory: CUDA out of memory\nhint: use a small",
        ),
        (RecursionError("maximum recursion depth exceeded"), "nested too deep"),
        (
            ModuleNotFoundError("No module named 'soup'", name="soup"),
            "No module named 'soup'\nhint: see what is installed with `forebay doctor`",
        ),
        (
            ImportError("libfoo.so: cannot read file data: Input/output error"),
            "a library is missing, damaged or too old",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (
            OSError(errno.EROFS, "Read-only file system"),
            "Read-only file system\nhint: mount it for writing, or choose another",
        ),
        (OSError(errno.EIO, "Input/output error", "a.bin"), "'a.bin': Input/output error\nhint: check the path"),
    ],
)
def test_what_is_no_fault_of_ours_is_one_line_and_no_bug(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch):
    def failing(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.get_command(Context(cli), "info"), "callback", failing)
    said = run("info", "cache", code=1).err
    assert words in said
    assert said.count("\n") == 2
    assert "bug" not in said


@pytest.mark.parametrize("error", ["OSError(5, 'Input/output error')", "MemoryError()", "ImportError('libm.so.6')"])
def test_a_start_that_fails_is_one_line(tmp_path: Path, error: str):
    """As where the disk fails while a library is imported."""
    (tmp_path / "rich.py").write_text(f"raise {error}")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from forebay.cli.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot start: ")
    assert done.stderr.count("\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", *more(">&- 2>&-"), "<&- >&- 2>&-", *more("2>&-")])
def test_a_build_whose_streams_are_closed_builds(tmp_path: Path, closed: str):
    source = write_lines(tmp_path / "data")
    done = _run_closed(closed, "build", "raw", source, "--into", tmp_path / "cache", "--workers", "1", "-q")
    assert done.returncode == 0, done
    assert not re.search("Traceback|bug|Exception", done.stderr)
    assert run("verify", tmp_path / "cache", "--full").code == 0


def _run_closed(closed: str, *words: object) -> "subprocess.CompletedProcess[str]":
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", *COMMAND, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("flags", [[], *more(["--json"])])
def test_a_result_that_closed_standard_output_loses_is_an_error(tmp_path: Path, flags: list[str]):
    root, _ = build_lines(tmp_path)
    done = _run_closed(">&-", "info", root, *flags)
    assert done.returncode == 1
    assert "error: cannot write the result to standard output: Bad file descriptor" in done.stderr
    assert _run_closed(">&-", "info", root, "-q").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["status", "CACHE"], ["--help"], *more(["peek", "CACHE", "--json"], ["--version"], ["status", "--help"])]
)
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path: Path, words: list[str]):
    root, _ = build_lines(tmp_path)
    command = [*COMMAND, *(str(root) if word == "CACHE" else word for word in words)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 2)
    assert "the disk is full" in done.stderr or "standard output: No space left on device" in done.stderr


@pytest.mark.parametrize("verb", ["status", "repair", "verify", "clean"])
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
        ("forebay tier list ti", "dir,ti"),
        ("forebay build tokens data --codec z", "plain,zstd"),
        ("forebay status --js", "plain,--json"),
        ("forebay build im", "plain,images"),
    ],
)
def test_completion_offers_paths_where_a_path_is_expected(typed: str, offered: str):
    environment = {"_FOREBAY_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert offered in CliRunner().invoke(cli, prog_name="forebay", env=environment).output.splitlines()


@pytest.mark.slow
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
