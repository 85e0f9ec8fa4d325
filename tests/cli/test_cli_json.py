"""One JSON document on standard output, whatever happens: results, findings, errors, wrong usage, interrupts."""

import json
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.cli.running import COMMAND, build_lines, chunk_path, flip, run, wait_until, write_lines

import forebay as fb


def test_what_the_command_line_can_do_python_can_do(tmp_path: Path):
    root, source = build_lines(tmp_path, "--end-chunk", 3)
    would = fb.dry_run(root, fb.sources.lines(source), fb.RawRecipe(chunk_bytes=400), start_chunk=2, end_chunk=6)
    shown = run("build", root, "--dry-run", "--start-chunk", 2, "--end-chunk", 6, "--json").json
    for field in ("root", "layer", "kind", "planned"):
        assert shown[field] == json.loads(msgspec.json.encode(getattr(would, field)))
    assert (would.missing, shown["missing"]) == ((4, 5, 6), [[4, 6]])
    assert would.estimate.chunks == shown["estimate"]["chunks"] == 3
    with pytest.raises(fb.errors.RecipeMismatch, match="codec"):
        fb.dry_run(root, fb.sources.lines(source), fb.RawRecipe(chunk_bytes=400, codec="none"))
    with pytest.raises(fb.errors.NotFound, match="start_chunk 99 is beyond the plan"):
        fb.dry_run(root, fb.sources.lines(source), fb.RawRecipe(chunk_bytes=400), start_chunk=99)


def test_a_finding_has_the_result_and_the_command_that_repairs_it(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    flip(chunk_path(root, 3), 4100)
    ran = run("verify", root, "--json", code=1)
    assert ran.json["bad"][0]["key"].endswith("000003.safetensors")
    assert ran.error == {
        "type": "Damaged",
        "message": f"'{root}' is damaged or stale",
        "command": f"forebay repair {root}",
    }
    assert ran.err == ""


def test_what_a_library_prints_meanwhile_is_not_in_the_document(tmp_path: Path, monkeypatch):
    _, source = build_lines(tmp_path)
    make = fb.RawRecipe.make
    monkeypatch.setattr(fb.RawRecipe, "make", lambda *given: print("a node died") or make(*given))
    ran = run("build", "raw", source, "--into", tmp_path / "other", "--workers", 0, "--json")
    assert ran.json["built"] > 0
    assert "a node died" in ran.err


def test_an_error_has_its_type_its_message_and_what_is_known(tmp_path: Path):
    root = tmp_path / "nowhere"
    ran = run("status", root, "--json", code=1)
    assert ran.error["type"] == "CacheNotFound"
    assert ran.error["facts"] == {"root": str(root)}
    assert ran.err == f"error: {ran.error['message']}\nhint: {ran.error['hint']}\n"
    file = tmp_path / "part-0.jsonl"
    file.touch()
    assert "it is a file; pass the folder" in run("status", file, code=1).err
    root, source = build_lines(tmp_path)
    ran = run("build", "raw", source, "--into", root, "--codec", "none", "--json", code=1)
    assert ran.error["type"] == "RecipeMismatch"
    assert ran.error["command"] == f"forebay build {root}"
    assert ran.error["facts"]["changed"]["codec"] == '"zstd" → "none"'


def test_an_error_of_the_system_names_the_path(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    ran = run("build", "raw", source, "--into", source, "--json", code=1)
    assert ran.error["type"] == "NotADirectoryError"
    assert ran.error["facts"] == {"path": str(source)}


def test_a_stopped_build_names_the_command_that_resumes_it(tmp_path: Path):
    source = write_lines(tmp_path / "data", count=20_000)
    root = tmp_path / "cache"
    words = ["build", "raw", source, "--into", root, "--chunk-bytes", "400", "--workers", "1", "--json"]
    with subprocess.Popen(
        [*COMMAND, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: chunk_path(root, 2).exists(), process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    document = json.loads(out)
    assert process.returncode == 130
    assert document["ok"] is False
    assert document["error"]["type"] == "BuildStopped"
    assert document["error"]["command"] == "forebay " + " ".join(map(str, words))
    assert document["error"]["command"] in err


def test_quiet_prints_errors_only(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    root = tmp_path / "cache"
    ran = run("build", "raw", source, "--into", root, "--workers", 0, "-q")
    assert (ran.out, ran.err) == ("", "")
    ran = run("verify", root, "--quiet")
    assert (ran.out, ran.err) == ("", "")
    flip(chunk_path(root, 0), 4100)
    ran = run("verify", root, "-q", code=1)
    assert (ran.out, ran.err) == ("", "")
    assert run("info", tmp_path / "nowhere", "-q", code=1).err.startswith("error: there is no cache")
    assert run("info", root, "-q", "--json").json["root"] == str(root)
