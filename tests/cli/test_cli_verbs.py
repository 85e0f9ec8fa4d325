"""What each verb shows, for a person and as JSON."""

import io
import json
import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tests.cli.running import build_lines, chunk_path, flip, planned_chunks, run, run_process, write_lines

import forebay as fb
from forebay.cache.reports import BuilderStatus
from forebay.cli.render import draw
from forebay.preview.words import human_bytes, human_time


def drawn(record: object, width: int = 200) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(draw(record))
    return text.getvalue()


def test_build_says_what_it_did_and_a_second_one_finds_nothing_to_do(tmp_path: Path):
    root, source = build_lines(tmp_path)
    again = run("build", "raw", source, "--into", root, "--chunk-bytes", "400", "--workers", 0)
    assert again.out == f"{root} · layer raw · 12 chunks, 60 rows · nothing to do\n"
    new = run("build", "raw", source, "--into", tmp_path / "new", "--chunk-bytes", "400", "--workers", 0).out
    assert re.search(r"chunks\s+12 built, 0 already present, 12 requested", new)
    assert f"next: forebay peek {tmp_path / 'new'}\ntrain: forebay.torch.Loader('{tmp_path / 'new'}', " in new


@pytest.mark.parametrize(
    ("names", "unit"), [(["a.jsonl"], "lines"), (["a.txt", "b.jsonl"], "lines"), (["a.jsonl", "b.md"], "files")]
)
def test_the_unit_follows_the_names_unless_it_is_said(tmp_path: Path, names: list[str], unit: str):
    paths = [write_lines(tmp_path / "data", name, count=4) for name in names]
    rows = 4 * len(paths) if unit == "lines" else len(paths)
    assert run("build", "raw", *paths, "--into", tmp_path / "one", "--workers", 0, "--json").json["rows"] == rows
    said = run("build", "raw", *paths, "--into", tmp_path / "two", "--workers", 0, "--json", "--unit", "files")
    assert said.json["rows"] == len(paths)


def test_inverse_mode_adds_new_files_and_fills_gaps_from_the_far_end(tmp_path: Path):
    root, _ = build_lines(tmp_path, "--end-chunk", 0)
    write_lines(tmp_path / "data", "b.jsonl", count=20)
    words = ["build", "raw", tmp_path / "data", "--into", root, "--unit", "lines", "--chunk-bytes", 400, "--workers", 0]
    plain = run(*words).out
    assert "1 file(s) of the source are not in the plan (the first is 'b.jsonl'); the same build in mode" in plain
    again = run(*words).out
    assert again.startswith(f"{root} · layer raw · 12 chunks, 60 rows · nothing to do\nnotes\n")
    assert run(*words, "--mode", "inverse", "--json").json["rows"] == 80
    assert run("status", root, "--json").json["complete"]
    chunk_path(root, 2).unlink()
    run("repair", root)
    assert run("build", root, "--mode", "inverse", "--workers", 0).out.endswith("nothing to do\n")


def test_a_range_beyond_the_plan_is_wrong_usage(tmp_path: Path):
    root, source = build_lines(tmp_path)
    planned = planned_chunks(root)
    hint = f"--start-chunk {planned} is beyond the plan: '{root}' has {planned} chunks, numbered from 0"
    assert hint in run("build", root, "--start-chunk", planned, "--workers", 0, code=2).err
    assert hint in run("build", root, "--start-chunk", planned, "--dry-run", code=2).err
    run("build", root, "--start-chunk", planned - 1, "--workers", 0)
    words = ["--into", tmp_path / "new", "--chunk-bytes", 400, "--workers", 0, "--start-chunk", 99]
    assert f"has {planned} chunks" in run("build", "raw", source, *words, code=2).err
    assert not (tmp_path / "new").exists()


def test_status_draws_the_chunks_and_names_what_is_missing(tmp_path: Path):
    root, _ = build_lines(tmp_path, "--start-chunk", 2, "--end-chunk", 4)
    planned = planned_chunks(root)
    shown = run("status", root).out
    assert f"raw  ░░███{'░' * (planned - 5)}  3 of {planned} chunks" in shown
    assert "unfinished" in shown
    assert f"missing   {planned - 3} chunks: 0–1, 5–{planned - 1}\n" in shown
    sizes = [chunk_path(root, chunk).stat().st_size for chunk in (2, 3, 4)]
    needed = (planned - 3) * sum(sizes) // 3
    layer = run("status", root, "--json").json["layers"][0]
    assert layer["missing"] == [[0, 1], [5, planned - 1]]
    assert layer["missing_bytes"] == needed
    for chunk in (2, 3, 4):
        os.utime(chunk_path(root, chunk), (1_000_000 + 2 * chunk, 1_000_000 + 2 * chunk))
    assert run("status", root, "--json").json["layers"][0]["missing_seconds"] == 2.0 * (planned - 3)
    needs = f"about {human_bytes(needed)} and {human_time(2.0 * (planned - 3))}"
    shown = " ".join(run("status", root).out.split())
    assert f"to build {needs}, in this order (--mode inverse: from the last) next: forebay build {root}" in shown
    assert run("build", root, "--workers", 0, "--json").json["built"] == planned - 3
    assert run("status", root, "--json").json["layers"][0]["missing_bytes"] is None


def test_status_of_a_suspect_chunk_is_damaged_with_exit_code_1(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    chunk_path(root, 1).write_bytes(b"short")
    shown = run("status", root, code=1).out
    assert shown.startswith(f"{root} · generation 0 · damaged\n")
    assert "raw  █!█" in shown
    assert re.search(r"suspect\s+1\b", shown)


def test_status_and_verify_exit_1_for_a_stale_source(tmp_path: Path):
    root, source = build_lines(tmp_path)
    source.write_text(source.read_text().replace("line 007", "line 700"))
    for verb in ("status", "verify"):
        assert "a.jsonl  has other content than was planned" in run(verb, root, code=1).out


@pytest.mark.parametrize(("state", "who"), [("working", "running builders publish"), ("abandoned", "`build` checks")])
def test_who_publishes_unlisted_chunks_is_said(tmp_path: Path, state: str, who: str):
    root, _ = build_lines(tmp_path)
    found = fb.status(root)
    layer = msgspec.structs.replace(found.layers[0], unlisted=(1,))
    one = BuilderStatus(
        layer="raw", host="a", pid=1, state=state, built=1, chunks_per_second=0.5, eta_seconds=None, workers=1,
        cpu_percent=0.0, memory_bytes=1,
    )  # fmt: skip
    assert who in drawn(msgspec.structs.replace(found, layers=(layer,), builders=(one,)))


def test_chunks_that_other_builders_made_meanwhile_are_not_called_already_present(tmp_path: Path):
    root, source = build_lines(tmp_path)
    report = fb.build(root, fb.sources.lines(source), fb.RawRecipe(chunk_bytes=400), workers=0)
    shown = drawn(msgspec.structs.replace(report, present=9, built_elsewhere=4))
    assert "0 built, 5 already present, 4 built by others meanwhile," in shown


def test_a_builder_is_not_broken_on_a_terminal_of_80_columns(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    one = BuilderStatus(
        layer="tokens", host="compute-node-0017", pid=1234567, state="working", built=123456, chunks_per_second=0.5,
        eta_seconds=5_000.0, workers=8, cpu_percent=790.0, memory_bytes=2_000_000_000,
    )  # fmt: skip
    lines = drawn(msgspec.structs.replace(fb.status(root), builders=(one, one)), width=80).splitlines()
    begin = lines.index("builders")
    assert lines[begin + 1 : begin + 5] == 2 * [
        "  compute-node-0017, process 1234567 · tokens · working",
        "    123,456 chunks · 30 chunks/min · CPU 790% · 2.0 GB · ETA 1 h 23 min",
    ]


def test_an_estimate_of_a_complete_cache_says_so_instead_of_zeros(tmp_path: Path):
    root, source = build_lines(tmp_path)
    shown = run("estimate", "raw", source, "--into", root, "--chunk-bytes", "400").out
    assert shown.startswith("estimate · nothing to build\n")
    assert re.search(r"nothing is missing: all \d+ planned chunk\(s\) are present", shown)
    assert "rows" not in shown


def build_failing_lines(tmp_path: Path) -> Path:
    """A cache where 50 of 60 lines are too long."""
    (tmp_path / "a.txt").write_text("".join("x" * (63 if number < 50 else 5) + "\n" for number in range(60)))
    words = ["--max-sample-bytes", 60, "--chunk-bytes", 400, "--workers", 0, "--max-failures", "100%"]
    run("build", "raw", tmp_path / "a.txt", "--into", tmp_path / "cache", *words)
    return tmp_path / "cache"


def test_status_names_failed_samples_and_their_reasons(tmp_path: Path):
    root = build_failing_lines(tmp_path)
    shown = run("status", root).out
    assert re.search(r"failed\s+50 of 60 samples: too-long 50", shown)
    assert re.search(r"a\.txt@0 +too-long +63 bytes +raw chunk 0", shown)
    assert f"… and 30 more: forebay status {root} --failures all" in shown


@pytest.mark.parametrize(("asked", "listed"), [("0", 0), ("3", 3), ("all", 50)])
def test_status_lists_as_many_failed_samples_as_are_asked_for(tmp_path: Path, asked: str, listed: int):
    root = build_failing_lines(tmp_path)
    assert run("status", root, "--failures", asked).out.count("too-long  63 bytes") == listed
    record = run("status", root, "--failures", asked, "--json").json
    assert (len(record["failed_samples"]), record["failed_samples_left_out"]) == (listed, 50 - listed)


def test_status_says_how_to_append_what_a_source_grew_by(tmp_path: Path):
    root, source = build_lines(tmp_path)
    with source.open("a") as file:
        file.write("one more line\n")
    command = f"update {root} {source}"
    assert f"next: forebay {command}\n" in run("status", root).out
    run(*command.split(), "--workers", 0)
    assert "sources that grew" not in run("status", root).out


def test_verify_names_layer_column_block_and_bytes_and_repair_puts_them_back(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    path = chunk_path(root, 3)
    before = path.read_bytes()
    flip(path, 4096 + 160)  # the first values of `data` lie after offsets, sums and digests
    chunk_path(root, 5).unlink()
    (root / "notes.md").write_text("mine")
    shown = run("verify", root, code=1).out
    assert re.search(
        r"layers/raw\.\w+/000003.safetensors  layer raw chunk 3, column \w+, block 0, bytes [\d,]+ to", shown
    )
    assert re.search(r"layer raw\s+1 chunk: 5", shown)
    assert "notes.md" in shown
    assert shown.rstrip().endswith(f"next: forebay repair {root}")
    repaired = run("repair", root, "--workers", 0).out
    assert "restored, byte for byte" in repaired
    assert path.read_bytes() == before
    assert "· sound" in run("verify", root, "--full").out
    assert "nothing to repair" in run("repair", root).out


def test_a_source_that_is_gone_is_no_trouble_once_all_of_it_is_built_and_fills_no_screen(tmp_path: Path):
    for number in range(25):
        write_lines(tmp_path / "data", f"{number:02d}.txt")
    root, whole = tmp_path / "cache", ["--workers", 0, "--chunk-bytes", 2000]
    run("build", "raw", tmp_path / "data", "--into", root, *whole, "--end-chunk", 0)
    for path in (tmp_path / "data").iterdir():
        path.rename(tmp_path / path.name)
    assert "is gone" in run("status", root, code=1).out
    for number in range(25):
        (tmp_path / f"{number:02d}.txt").rename(tmp_path / f"data/{number:02d}.txt")
    run("build", "raw", tmp_path / "data", "--into", root, *whole)
    shutil.rmtree(tmp_path / "data")
    for verb in ("status", "verify"):
        shown = run(verb, root).out
        assert "deleted source files; published rows stay" in shown
        assert "19.txt  is gone" in shown
        assert "20.txt" not in shown
        assert "… and 5 more; --json has all" in shown
        assert "restore the old files" not in shown
    assert len(run("verify", root, "--json").json["stale"]) == 25


def test_repair_takes_from_a_copy_and_fails_without_source_or_copy(tmp_path: Path):
    root, source = build_lines(tmp_path)
    run("copy", root, tmp_path / "backup")
    source.unlink()
    flip(chunk_path(root, 3), 4200)
    assert "failed" in run("repair", root, "--workers", 0, code=1).out
    assert "restored" in run("repair", root, "--from", tmp_path / "backup").out


def test_info_draws_the_cache_as_a_tree(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    shown = run("info", root).out
    fingerprint = fb.fingerprint(fb.RawRecipe(chunk_bytes=400))
    for words in ("60 rows", "├── source 1 file", f"recipe raw {fingerprint[:12]}", "codec zstd", "data: uint8 ragged"):
        assert words in shown


def test_peek_shows_text_as_text_and_other_bytes_as_numbers(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").write_bytes(bytes([255, 254, 0, 1]))
    (tmp_path / "data" / "b.md").write_text("# Grüße\n\nline\n" + "long " * 400)
    (tmp_path / "data" / "c.ansi").write_bytes(b"\x1b[31mred")
    run("build", "raw", tmp_path / "data", "--into", tmp_path / "cache", "--workers", 0)
    shown = run("peek", tmp_path / "cache").out
    assert "uint8 [4]  255 254 0 1" in shown
    assert "# Grüße" in shown
    assert "more characters" in shown
    assert "\x1b" not in shown
    one = run("peek", tmp_path / "cache", "--row", 1, "--column", "id").out
    assert re.search(r"id\s+b\.md", one)
    assert "Grüße" not in one


def test_estimate_compares_with_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_lines(tmp_path / "data")
    shown = run("estimate", "raw", source, "--into", tmp_path / "cache").out
    assert "enough" in shown
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    ran = run("estimate", "raw", source, "--into", tmp_path / "cache", code=1)
    assert "not enough" in ran.out
    assert f"not enough disk space at '{tmp_path / 'cache'}'" in ran.err


def test_a_dry_run_writes_nothing_and_says_what_would_be_built(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    shown = run("build", "raw", source, "--into", tmp_path / "new", "--dry-run").out
    assert "of a new cache" in shown
    assert not (tmp_path / "new").exists()
    root, _ = build_lines(tmp_path, "--end-chunk", 3)
    before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
    shown = run("build", root, "--dry-run", "--start-chunk", 2, "--end-chunk", 6).out
    assert re.search(r"would build\s+3 chunks of \d+ planned: 4–6", shown)
    whole = run("estimate", root, "--json").json
    left = run("build", root, "--dry-run", "--start-chunk", 2, "--end-chunk", 6, "--json").json["estimate"]
    assert left["chunks"] == 3  # the estimate is of what is missing
    assert 0 < left["rows"] < whole["rows"]
    assert 0 < left["stored_bytes"] < whole["stored_bytes"]
    shown = run("build", root, "--dry-run", "--end-chunk", 3).out
    assert "nothing: all requested chunks are present" in shown
    assert "estimate" not in shown, "of nothing"
    ran = run("build", "raw", source, "--into", root, "--codec", "none", "--dry-run", code=1)
    assert "differs in: chunk_bytes: 400 → 16777216, codec: " in ran.err
    assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before


def test_clean_removes_leftovers_and_old_generations(tmp_path: Path):
    root, _ = build_lines(tmp_path, "--end-chunk", 3)
    assert "nothing to do" in run("clean", root).out
    run("build", root, "--workers", 0)
    assert re.search(r"generations +0\n", run("clean", root, "--keep-generations", 1).out)


def test_json_of_every_verb_is_json_and_nothing_else(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    root, backup = tmp_path / "cache", tmp_path / "backup"
    words = [str(source), "--chunk-bytes", "400", "--into", str(root), "--workers", "0"]
    for line in (
        ["estimate", "raw", *words],
        ["build", "raw", *words, "--dry-run"],
        ["build", "raw", *words],
        ["status", root],
        ["verify", root],
        ["copy", root, backup],
        ["repair", root, "--from", backup],
        ["update", root, source, "--workers", 0],
        ["info", root],
        ["peek", root],
        ["clean", root],
    ):
        ran = run(*line, "--json")
        assert isinstance(ran.json, dict | list), line
        assert json.loads(ran.out).keys() == {"ok", "result"}
        assert ran.err == "", line


def test_status_says_that_a_published_chunk_is_lost_and_advises_repair(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    chunk_path(root, 2).unlink()
    ran = run("status", root, code=1)
    assert "lost" in ran.out
    assert "2 (published, but the file is missing)" in ran.out
    assert f"next: forebay repair {root}" in ran.out
    assert run("status", root, "--json", code=1).json["layers"][0]["lost"] == [[2, 2]]
    run("repair", root, "--workers", 0)
    run("status", root)


def test_the_id_and_the_digest_that_a_cache_is_pinned_by_are_shown(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    told = run("info", root, "--json").json
    for verb in ("info", "verify"):
        out = run(verb, root).out
        assert told["cache_id"] in out
        assert told["digest"] in out
    run("verify", root, "--cache-id", told["cache_id"], "--digest", told["digest"], "--min-generation", 0)


@pytest.mark.parametrize("lost", ["plan", "plan and generations"])
def test_a_cache_without_its_plan_is_told_what_is_lost_and_what_to_run(tmp_path: Path, lost: str):
    source = tmp_path / "a.txt"
    source.write_text("one\ntwo\n")
    root = tmp_path / "cache"
    run("build", "raw", source, "--unit", "lines", "--into", root, "--workers", 0)
    before = (root / "plan/000000.safetensors").read_bytes()
    for name in lost.split(" and "):
        shutil.rmtree(root / name)
    for words in (["build", root], ["build", root, "--dry-run"], ["update", root, source]):
        shown = run(*words, code=1).err
        if lost == "plan":
            assert f"'plan/000000.safetensors' of the cache at '{root}' is corrupt: it is gone" in shown
            assert f"run `forebay repair {root}`" in shown
        else:
            assert f"planning of the cache at '{root}' was interrupted" in shown
    if lost == "plan":
        run("repair", root)  # the generation names the source
        assert (root / "plan/000000.safetensors").read_bytes() == before
        run("build", root, "--workers", 0)


@pytest.mark.slow
def test_sixty_columns_are_enough_also_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    root, _ = build_lines(tmp_path)
    for words in (["status", root], ["doctor"], ["build", "raw", "--help"], ["info", root]):
        ran = run_process(*words)
        lines = ran.out.splitlines()
        assert max(map(len, lines)) <= 60, ran.out
    monkeypatch.setenv("COLUMNS", "38")
    bar = next(line for line in run_process("status", root).out.splitlines() if "█" in line)
    assert re.fullmatch(r"raw  █{5,}  \d+ of \d+ chunks · 60 rows", bar), "the bar shrinks"
    monkeypatch.setenv("COLUMNS", "60")
    long = next(line for line in run_process("doctor").out.splitlines() if " python " in line)
    assert long.startswith("  ✓ python "), "a long detail continues below itself"


@pytest.mark.slow
def test_info_shows_set_values_as_a_settings_file_has_them(tmp_path: Path):
    root, source = tmp_path / "cache", write_lines(tmp_path / "data")
    run("build", "tokens", source, "--into", root, "--workers", 0, "--deduplicate")
    shown = run("info", root).out
    assert "layer tokens (base)" in shown
    assert "deduplicate true" in shown
    assert "bos none" not in shown
