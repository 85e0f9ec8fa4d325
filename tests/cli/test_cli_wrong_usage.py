"""Wrong usage: one `error:` line, at most one `hint:` line, exit code 2."""

import json
from pathlib import Path

import pytest
from tests.cli.running import build_lines, run

BUILD = ["build", "raw", "data", "--into", "cache"]
IMAGES = ["build", "images", "--into", "cache"]
TOKENS = ["build", "tokens", "--into", "cache"]
COMMANDS: list[tuple[list[str], str]] = [
    (["frobnicate"], "no command 'frobnicate' (known: demo, estimate, build, "),
    (["verfy", "cache"], "did you mean 'verify'?"),
    (["biuld"], "did you mean 'build'?"),
    (["rm", "cache"], "delete the folder of a cache to remove it; `forebay drop CACHE LAYER` removes a layer"),
    (["delete", "cache"], "`forebay drop CACHE LAYER` removes a layer"),
    (["ls"], "see `forebay status CACHE`"),
    (["list", "cache"], "see `forebay status CACHE`"),
    (["help", "build"], "`forebay VERB --help`"),
    (["gaps", "cache"], "did you mean 'status'?"),
    (["grow", "cache", "new"], "did you mean 'update'?"),
    (["refresh", "cache"], "did you mean 'update'?"),
    (["warm", "cache"], "did you mean 'tier'?"),
    (["rekey", "cache"], "did you mean 'copy'?"),
    (["cat", "cache"], "did you mean 'peek'?"),
    (["check", "cache"], "did you mean 'verify'?"),
    (["train", "cache"], "from forebay.torch import Loader"),
    (["tier", "fil", "cache"], "did you mean 'fill'?"),
    (["verify", "--no-such-option", "--json"], "has no option '--no-such-option'"),
    (["tier", "--json"], "for instance: forebay tier fill … --json"),
    (["--json", "status", "cache"], "'--json' comes after the verb"),
    (["build", "-q", "raw"], "'-q' comes after the verb"),
    (["status"], "missing argument 'CACHE'"),
    (["status", "a", "b"], "unexpected extra argument (b)"),
    (["copy", "cache"], "missing argument 'DEST'"),
    (["drop", "cache"], "missing argument 'LAYER...'"),
    (["import", "old.pt"], "missing option '-o' / '--into'"),
    (["update", "cache"], "missing argument 'SOURCE...'"),
    (["build", "rwa", "data"], "did you mean: forebay build raw data"),
    (["estimate", "token", "a b.txt"], "did you mean: forebay estimate tokens 'a b.txt'"),
    (["build", "data/*.jsonl", "--into", "c"], "comes first: forebay build tokens 'data/*.jsonl' --into c"),
    (["build", "data"], "comes first: forebay build tokens data"),
    (["build", "raw", "data"], "missing option '--into'"),
    (["build", "raw", "--into", "cache"], "missing argument 'SOURCE...'"),
    (["build", "chat", "a.jsonl", "--into", "cache"], "missing option '--tokenizer' (required for chat)"),
    (["build", "tokens", "a.jsonl", "--seqlen", "8"], "did you mean '--sequence-length'?"),
    (["build", "tokens", "a.jsonl", "--seq-len", "8"], "did you mean '--sequence-length'?"),
    (["build", "tokens", "a.jsonl", "--max-length", "8"], "did you mean '--sequence-length'?"),
    (["build", "tokens", "a.jsonl", "--output", "x"], "did you mean '--into'?"),
    (["build", "tokens", "a.jsonl", "--num-workers", "8"], "did you mean '--workers'?"),
    (["build", "tokens", "a.jsonl", "--parallel-workers", "8"], "did you mean '--workers'?"),
    (["build", "tokens", "a.jsonl", "--compression-level", "max"], "did you mean '--level'?"),
    (["build", "tokens", "a.jsonl", "--resume"], "leave it out: a build always resumes"),
    (["build", "tokens", "a.jsonl", "--chunk-size", "8"], "did you mean '--chunk-rows'?"),
    (["build", "images", "a", "--chunk-rows", "8"], "did you mean '--chunk-bytes'?"),
    (["build", "chat", "a", "--long-documents", "drop"], "did you mean '--long'?"),
    (["build", "raw", "a", "--codex", "x"], "did you mean '--codec'?"),
    (["build", "teachers", "cache", "--into", "x"], "`forebay build teachers` has no option '--into'"),
    (["verify", "cache", "--deep"], "did you mean '--full'?"),
    (["verify", "cache", "--check-source"], "did you mean '--allow-network'?"),
    (["status", "cache", "--jsn"], "did you mean '--json'?"),
    (["build", "raw", "-", "--into", "cache"], "save it first"),
    (["estimate", "raw", "/dev/stdin"], "save it first"),
    (["update", "cache", "-"], "save it first"),
    (["build", "raw", "data", "--into", "memory://x"], "'memory://x' would be lost when this command ends"),
    (["copy", "cache", "memory://x"], "name a folder or a bucket"),
    ([*BUILD, "--memory-limit", "lots"], "use 600MB"),
    ([*BUILD, "--memory-limit", "0"], "at least one byte"),
    ([*BUILD, "--max-failures", "200%"], "a share like 1%"),
    ([*BUILD, "--max-failures", "-1"], "a share like 1%"),
    ([*BUILD, "--start-chunk", "4", "--end-chunk", "3"], "comes after --end-chunk 3"),
    ([*BUILD, "--unit", "lines", "--suffix", ".py"], "pass a glob like"),
    ([*BUILD, "--codec", "zip"], "it must be one of 'none', 'lz4', 'zstd'"),
    ([*BUILD, "--workers", "many"], "it must be a whole number of at least 0"),
    ([*BUILD, "--workers"], "option '--workers' requires an argument"),
    ([*BUILD, "--engine", "ray", "--workers", "0"], "leave it out with --engine ray"),
    ([*BUILD, "--engine", "ray", "--memory-limit", "4GB"], "--memory-limit bounds processes of this machine"),
    ([*BUILD, "--engine", "inline", "--workers", "3"], "--engine inline has one worker, this process"),
    ([*BUILD, "--num-cpus", "2"], "--num-cpus belongs to a Ray cluster\nhint: add --engine ray"),
    ([*TOKENS, "hub:org/x", "data"], "one data set of the hub, or files, but 2 were passed"),
    ([*TOKENS, "hub:org/x", "--format", "jsonl"], "--format is for files"),
    ([*TOKENS, "hub:org/x", "--separator", "x"], "--separator is for files"),
    ([*IMAGES, "photos", "all.jsonl"], "several formats (photos is files, all.jsonl is manifest)"),
    ([*IMAGES, "a.jsonl", "b.jsonl"], "a build reads one manifest, but 2 were passed"),
    ([*IMAGES, "photos", "--image", "x"], "--image is a field of a manifest"),
    ([*IMAGES, "a.parquet", "--root", "x"], "--root is for manifests"),
    ([*IMAGES, "photos", "--pad-color", "grey"], "is not a color\nhint: use 114,114,114 or #727272"),
    ([*IMAGES, "photos", "--pad-color", "256,0,0"], "is not a color\nhint: use 114,114,114 or #727272"),
    ([*IMAGES, "photos", "--tags", ","], "pass none for an empty list"),
    ([*IMAGES, "photos", "--tags", "@nowhere.txt"], "cannot read 'nowhere.txt'"),
    ([*IMAGES, "photos", "--quality", "101"], "it must be a whole number from 1 to 100"),
    ([*IMAGES, "photos", "--size", "1000000"], "'1000000' is not valid\nhint: it must be a whole number from 1 to"),
    ([*IMAGES, "x.jsonl", "--labels", "folder"], "manifest"),
    (["clean", "cache", "--keep-generations", "0"], "'0' is not valid\nhint: it must be a whole number of at least 1"),
    (["repair", "cache", "--from", "nowhere"], "does not exist"),
    (["copy", "cache", "other", "--old-key-env", "NO_SUCH"], "'NO_SUCH' is not set or empty"),
    (["tier", "list"], "pass the folder of the tier, or set FOREBAY_TIER"),
    (["tier", "fill", "cache", "t", "--nodes", "4"], "--nodes 4 needs --node, from 0 to 3"),
    (["tier", "fill", "cache", "t", "--nodes", "4", "--node", "4"], "--node must be from 0 to 3 (got 4)"),
    (["tier", "fill", "cache", "t", "--node", "1"], "from 0 to 0 (got 1)\nhint: pass --nodes"),
    (["estimate", "remote", "cache", "--bandwidth", "fast"], "use 1Gbit or 100MB"),
    (["estimate", "remote", "cache", "--latency", "nan"], "it must be a number of at least 0"),
    (["estimate", "remote", "cache", "--seed=-1"], "it must be a whole number of at least 0"),
    (["tier", "fill", "cache", "t", "--seed=-1"], "it must be a whole number of at least 0"),
    (["view"], "missing argument 'CACHE...'"),
    (["view", "cache", "--port", "99999"], "it must be a whole number from 0 to 65,535"),
]


@pytest.mark.parametrize(("words", "shown"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_wrong_usage_is_one_error_line_and_at_most_one_hint(words: list[str], shown: str) -> None:
    ran = run(*words, code=2)
    assert shown in ran.err
    error, *hints = ran.err.splitlines()
    assert error.startswith("error: ")
    assert len(hints) <= 1
    assert all(hint.startswith("hint: ") for hint in hints)
    if "--json" in words:
        found = json.loads(ran.out)["error"]
        assert (found["type"], found["command"][-7:]) == ("UsageError", " --help")
        assert found["message"] in error
    else:
        assert ran.out == ""


def test_at_least_sixty_wrong_usages_are_tried() -> None:
    assert len({tuple(words) for words, _ in COMMANDS}) >= 60


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["peek", "CACHE", "--row", "60"], "there is no row 60; "),
        (["peek", "CACHE", "--column", "foo"], "has no column 'foo' (it has: "),
        (["peek", "CACHE", "--patch", "16"], "--png and --patch are for images"),
        (["peek", "CACHE", "--source", "data"], "--source is for packed tokens"),
        (["status", "CACHE", "--failures", "-1"], "neither a count nor 'all'"),
        (["build", "CACHE", "--into", "new"], "use `forebay update` to add data"),
        (["build", "CACHE", "--start-chunk", "99"], "is beyond the plan"),
    ],
)
def test_wrong_usage_of_a_cache_is_one_error_line_and_at_most_one_hint(
    tmp_path: Path, words: list[str], shown: str
) -> None:
    root, _ = build_lines(tmp_path)
    ran = run(*(str(root) if word == "CACHE" else word for word in words), code=2)
    assert shown in ran.err
    assert [line.partition(": ")[0] for line in ran.err.splitlines()] in (["error"], ["error", "hint"])
