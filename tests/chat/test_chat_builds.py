"""Chat caches as caches: failures by reason, repaired, packed again."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.chat.stock_templates import CHATML, HARMONY, Stock
from tests.chat.tokenizer_folders import byte_level, write_folder
from tests.cli.running import run
from tests.cli.test_cli_progress import on_terminal
from tests.helpers.builders import REPOSITORY, chunk_count, chunk_digests, script_environment, wait_until
from tests.helpers.cache_files import chunk_path

import forebay as fb
from forebay.building.chunk_maker import ChunkSamples
from forebay.chat import repack
from forebay.errors import RecipeInvalid, RecipeMismatch, SourceInvalid
from forebay.masks.train_on import KINDS, ROLES
from forebay.source import Part, samples_of

FIELDS: dict[str, Any] = {"sequence_length": 128, "chunk_rows": 4, "long": "drop"}
AGAIN = """
import sys
import forebay as fb
from forebay.chat import repack
fb.build(sys.argv[1], *repack(sys.argv[2], sequence_length=256), workers=1)
"""


def write_chats(path: Path, count: int) -> Path:
    lines = []
    for number in range(count):
        turns = [
            {"role": ("user", "assistant")[at % 2], "content": f"text {number} {at} " * (at + number % 5)}
            for at in range(2 * (1 + number % 3))
        ]
        turns[1]["content"] = "Yes. " + turns[1]["content"]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


def model(path: Path, stock: Stock = CHATML) -> str:
    return write_folder(path, byte_level(stock.special), stock.plain(), stock.tokens)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, the model, and a cache that was built in one go."""
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder / "chats.jsonl", 150)
    recipe = fb.ChatRecipe(tokenizer=model(folder / "model"), **FIELDS)
    fb.build(folder / "cache", fb.sources.lines(folder / "chats.jsonl"), recipe, workers=0, max_failures=1.0)
    return folder


def kill_at(chunks: int, root: Path, command: list[str]) -> None:
    builder = subprocess.Popen(command, env=script_environment(), cwd=REPOSITORY)
    wait_until(lambda: chunk_count(root) >= chunks or builder.poll() is not None)
    builder.kill()
    builder.wait()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_status_lists_failed_conversations_by_file_and_line(suffix: str, tmp_path: Path) -> None:
    lines = write_chats(tmp_path / "chats", 30).read_text().splitlines()
    asked, long = {"role": "user", "content": "?"}, {"role": "assistant", "content": "word " * 600}
    for line, bad in [(3, {"messages": [asked]}), (17, {"messages": [asked, long]}), (29, "no JSON")]:
        lines[line - 1] = json.dumps(bad)
    path = tmp_path / f"chats.jsonl{suffix}"
    path.write_bytes((gzip.compress if suffix else bytes)(("\n".join(lines) + "\n").encode()))
    folder = model(tmp_path / "model")
    command = ["build", "chat", path, "--tokenizer", folder, "--into", tmp_path / "cache", "-w", 0, "--long", "drop"]
    run(*command, "--sequence-length", 512, "--chunk-rows", 4, "--max-failures", 3)
    failed = run("status", tmp_path / "cache", "--json").json["failed_samples"]
    assert len({each["chunk"] for each in failed}) > 1
    assert [(each["sample"].partition("@")[0], each["detail"].partition(": ")[0]) for each in failed] == [
        (path.name, "line 3"),
        (path.name, "line 17"),
        (path.name, "line 29"),
    ]
    assert "line 17: " in run("status", tmp_path / "cache").out


def test_names_roles_and_variables_can_be_set_on_the_command_line(tmp_path: Path) -> None:
    turns = [{"from": "pupil", "value": "Hi"}, {"from": "teacher", "value": "Hello"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"dialog": turns}) + "\n")
    template = CHATML.plain().replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n' + opening }}")
    template = template.replace(
        "{{ message['content'] + '<|im_end|>' }}", "{{ opening + message['content'] + '<|im_end|>' }}"
    )
    folder = write_folder(tmp_path / "model", byte_level(CHATML.special), template, CHATML.tokens)
    command = ["build", "chat", tmp_path / "chats.jsonl", "--tokenizer", folder, "--into", tmp_path / "cache", "-w", 0]
    refused = run(*command, code=1)
    assert "it has dialog; map them with `names`" in refused.err
    named = ["--names", "messages=dialog", "--roles", "pupil=user,teacher=assistant"]
    run(*command, *named, "--template-arguments", "opening=So:")
    (spans,) = [row["spans"] for row in fb.open_cache(tmp_path / "cache")]
    assert {int(role) for role in spans[:, 2]} == {2, 3}
    wrong = run(*command, "--names", "messages", code=2)
    assert "'messages' is not a list of pairs" in " ".join(wrong.err.split())


def test_another_template_is_another_recipe(built: Path, tmp_path: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(CHATML.plain() + " ")
    recipe = fb.ChatRecipe(tokenizer=str(built / "model"), template=str(template), **FIELDS)
    with pytest.raises(RecipeMismatch, match="chat template"):
        fb.build(built / "cache", fb.sources.lines(built / "chats.jsonl"), recipe, workers=0)


def test_a_copied_cache_is_repaired_with_the_tokenizer_and_template_in_it(built: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 60)
    folder = model(tmp_path / "model")
    fb.build(
        tmp_path / "cache",
        fb.sources.lines(tmp_path / "chats.jsonl"),
        fb.ChatRecipe(tokenizer=folder, **FIELDS),
        workers=0,
        max_failures=1.0,
    )
    before = chunk_digests(tmp_path / "cache")
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    chunk_path(tmp_path / "cache", "chat", 0).unlink()
    report = fb.repair(tmp_path / "cache")
    assert not report.failed
    assert chunk_digests(tmp_path / "cache") == before


@pytest.mark.slow
def test_peek_colors_spans_by_kind_and_info_counts_tokens_by_kind_and_role(built: Path) -> None:
    shown = on_terminal("peek", built / "cache", "--rows", 1)
    prompt, response, header, stop, end = (f"\x1b[{code}m" for code in (36, 32, 2, "1;31", 0))
    assert f"{header}<|im_start|>user{end}" in shown
    assert f"{prompt}text " in shown
    assert re.search(re.escape(f"{response}Yes. ") + r".*" + re.escape(f"{end}{stop}<|im_end|>{end}"), shown)
    said, counts = run("info", built / "cache").out, fb.info(built / "cache").layers[0].statistics
    assert re.search(rf"conversations +{counts['conversations']}", said)
    assert counts["documents_dropped"] > 0
    by_kind, by_role = counts["tokens_by_kind"], counts["tokens_by_role"]
    assert by_kind[KINDS.index("response")] > 0
    assert by_role[ROLES.index("assistant")] > 0


def documents(cache: fb.Cache) -> list[tuple[list[int], list[list[int]], int]]:
    """Every document with its spans and last turn, wherever it is packed."""
    found = []
    for row in cache:
        ends = np.cumsum(row["seq_lens"]).tolist()
        for start, stop, last in zip([0, *ends], ends, row["last_turn"].tolist(), strict=False):
            inside = row["spans"][(row["spans"][:, 0] >= start) & (row["spans"][:, 1] <= stop)].astype(int)
            inside[:, :2] -= start
            found.append((row["tokens"][start:stop].tolist(), inside.tolist(), last))
    return sorted(found)


@pytest.mark.parametrize("stock", [CHATML, HARMONY], ids=lambda stock: stock.name)
def test_a_cache_is_packed_again_without_its_source(stock: Stock, tmp_path: Path) -> None:
    source = write_chats(tmp_path / "chats.jsonl", 40)
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model", stock), sequence_length=512, chunk_rows=8)
    fb.build(tmp_path / "cache", fb.sources.lines(source), recipe, workers=0)
    source.unlink()
    again, other = repack(tmp_path / "cache", sequence_length=700, chunk_rows=5)
    report = fb.build(tmp_path / "longer", again, other, workers=0)
    assert report.failures == 0
    old, new = fb.open_cache(tmp_path / "cache"), fb.open_cache(tmp_path / "longer")
    assert new.column("tokens").shape == (700,)
    assert documents(new) == documents(old)
    assert fb.verify(tmp_path / "longer", full=True).sound
    counts = [fb.info(tmp_path / name).layers[0].statistics for name in ("cache", "longer")]
    for name in ("conversations", "turns", "tokens", "tokens_by_kind", "tokens_by_role"):
        assert counts[0][name] == counts[1][name]


@pytest.mark.parametrize("stock", [CHATML, HARMONY], ids=lambda stock: stock.name)
def test_a_chunk_packed_again_has_the_rows_of_a_build_from_the_conversations(stock: Stock, tmp_path: Path) -> None:
    source = write_chats(tmp_path / "chats.jsonl", 40)
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model", stock), sequence_length=512)
    fb.build(tmp_path / "cache", fb.sources.lines(source), recipe, workers=0)
    fb.build(tmp_path / "again", *repack(tmp_path / "cache", sequence_length=700), workers=0)
    direct = msgspec.structs.replace(recipe, sequence_length=700)
    fb.build(tmp_path / "direct", fb.sources.lines(source), direct, workers=0)
    (again,), (rows,) = (list(fb.open_cache(tmp_path / name).chunks()) for name in ("again", "direct"))
    assert len(rows["tokens"]) > 2
    for name, column in rows.items():
        parts = [
            (each.values, each.offsets) if isinstance(each, fb.Ragged) else (each,) for each in (again[name], column)
        ]
        for mine, theirs in zip(*parts, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_packing_again_into_short_rows_cuts_at_turns(built: Path, tmp_path: Path) -> None:
    again, recipe = repack(built / "cache", sequence_length=40, long="truncate")
    fb.build(tmp_path / "short", again, recipe, workers=0, max_failures=1.0)
    direct = fb.ChatRecipe(tokenizer=str(built / "model"), **{**FIELDS, "sequence_length": 40, "long": "truncate"})
    fb.build(tmp_path / "direct", fb.sources.lines(built / "chats.jsonl"), direct, workers=0, max_failures=1.0)
    short, other = documents(fb.open_cache(tmp_path / "short")), documents(fb.open_cache(tmp_path / "direct"))
    assert short
    assert all(one in other for one in short)


def test_samples_of_a_cache_that_do_not_fit_are_named_by_their_chunk(built: Path) -> None:
    again, recipe = repack(built / "cache", sequence_length=60)
    parts = [Part(file, 0, again.weight(file)) for file in again.files()]
    rows = recipe.make(ChunkSamples(again, parts))
    known = {sample.id for part in parts for sample in samples_of(again, part) if isinstance(sample, fb.Sample)}
    named = [failure.sample for failure in rows.failures]
    assert len(named) == len(set(named)) > len(parts)
    assert known.issuperset(named)
    assert len({name.split("#")[0] for name in named}) > 1
    with pytest.raises(RecipeInvalid, match=named[0]):
        msgspec.structs.replace(recipe, long="error").make(ChunkSamples(again, parts))


@pytest.mark.slow
def test_chunks_packed_again_have_the_requested_size(tmp_path: Path) -> None:
    source = write_chats(tmp_path / "chats.jsonl", 2500)
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_rows=130)
    fb.build(tmp_path / "cache", fb.sources.lines(source), recipe, workers=0)
    again, other = repack(tmp_path / "cache", sequence_length=1024, chunk_rows=130)
    fb.build(tmp_path / "longer", again, other, workers=0)
    rows = np.diff(fb.open_cache(tmp_path / "longer").chunk_starts)
    assert len(rows) > 1
    assert 100 < rows[0] < 170


@pytest.mark.slow
def test_packing_again_gives_the_same_bytes_for_any_workers_and_after_kills(built: Path, tmp_path: Path) -> None:
    source, recipe = repack(built / "cache", sequence_length=256)
    for name, workers in (("one", 0), ("two", 2)):
        fb.build(tmp_path / name, source, recipe, workers=workers)
    assert len(chunk_digests(tmp_path / "one")) > 5
    assert chunk_digests(tmp_path / "two") == chunk_digests(tmp_path / "one")
    root = tmp_path / "killed"
    for chunks in (1, 4):
        kill_at(chunks, root, [sys.executable, "-c", AGAIN, str(root), str(built / "cache")])
    fb.build(root, source, recipe, workers=0, lease_seconds=0.1)
    assert chunk_digests(root) == chunk_digests(tmp_path / "one")


def test_a_small_cache_is_packed_again_without_worker_processes(built: Path, tmp_path: Path) -> None:
    again, recipe = repack(built / "cache", sequence_length=200)
    seen: set[int] = set()
    fb.build(tmp_path / "again", again, recipe, on_progress=lambda progress: seen.update(progress.pids))
    assert seen == {os.getpid()}


def test_a_cache_that_grew_is_packed_again_with_what_is_new(tmp_path: Path) -> None:
    recipe = fb.ChatRecipe(tokenizer=model(tmp_path / "model"), sequence_length=512, chunk_rows=8)
    fb.build(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "a.jsonl", 20)), recipe, workers=0)
    again, longer = repack(tmp_path / "cache", sequence_length=600)
    fb.build(tmp_path / "before", again, longer, workers=0)
    fb.update(tmp_path / "cache", fb.sources.lines(write_chats(tmp_path / "b.jsonl", 7)), workers=0)
    fb.update(tmp_path / "before", again, workers=0)
    fb.build(tmp_path / "after", *repack(tmp_path / "cache", sequence_length=600), workers=0)
    for name in ("before", "after"):
        assert fb.info(tmp_path / name).layers[0].statistics["conversations"] == 27, name


def test_packing_again_with_another_treatment_of_turns_is_refused(built: Path, tmp_path: Path) -> None:
    again, recipe = repack(built / "cache", thinking="drop")
    with pytest.raises(RecipeInvalid, match=r"take its recipe: source, recipe = forebay.chat.repack"):
        fb.build(tmp_path / "other", again, recipe, workers=0)


def test_only_a_chat_cache_can_be_packed_again(built: Path, tmp_path: Path) -> None:
    fb.build(tmp_path / "raw", fb.sources.lines(built / "chats.jsonl"), fb.RawRecipe(), workers=0)
    with pytest.raises(SourceInvalid, match="is a cache of raw; only one of chat can be packed again"):
        repack(tmp_path / "raw")


@pytest.mark.parametrize("field", [2, 3])
def test_spans_with_a_number_that_no_role_or_kind_has_are_not_packed_again(
    field: int, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, recipe = repack(built / "cache", sequence_length=1024)
    read = fb.Cache.chunk

    def forged(cache: fb.Cache, position: int, columns: Sequence[str] | None = None) -> dict[str, Any]:
        rows = read(cache, position, columns)
        spans = rows["spans"]
        assert isinstance(spans, fb.Ragged)
        values = spans.values.copy()
        values[-1, field] = 1 << 20
        return {**rows, "spans": fb.Ragged(values, spans.offsets)}

    monkeypatch.setattr(fb.Cache, "chunk", forged)
    parts = [Part(file, 0, again.weight(file)) for file in again.files()]
    with pytest.raises(ValueError, match="unknown role or kind"):
        recipe.make(ChunkSamples(again, parts))
