"""Peeking at packed tokens: what a person sees, what a program gets, and that nothing outside the cache is needed."""

import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cli.running import build_tokens, run, write_documents
from tests.cli.test_cli_progress import on_terminal

import forebay as fb

LONG = " ".join(f"word{number}" for number in range(80))


def test_a_row_is_shown_as_its_documents_and_its_padding(tmp_path: Path):
    root, source = build_tokens(tmp_path, ["first text", "second text"])
    shown = run("peek", root, "--source", source).out
    assert re.search(r"row 0 \(chunk 0, row 0\) · █.* 9\.4% in use\n", shown)
    assert "  ▌ a.jsonl@0 · 3 tokens\n  ▌ first text∎\n" in shown
    assert "  ▌ a.jsonl@23 · 3 tokens\n  ▌ second text∎\n  ░ 58 tokens of padding\n" in shown


def test_pieces_of_a_split_document_say_so(tmp_path: Path):
    root, source = build_tokens(tmp_path, [LONG])
    shown = run("peek", root, "--rows", 9, "--source", source).out
    assert re.search(r"row 0 \(chunk 0, row 0\) · █{20} full\n  ▌ a\.jsonl@0 · 64 tokens\n  ▌ word0 ", shown)
    assert re.search(r"a\.jsonl@0 · 64 tokens, from token 64 on\n  ▌ …", shown)
    assert shown.count("∎") == 1
    assert LONG in re.sub(r"…?\nrow.*\n.*\n  ▌ …|\n  ▌ ", "", shown)


@pytest.mark.parametrize(
    ("text", "flags", "shown"),
    [
        ("first text", ["--bos", "<|endoftext|>"], "▸first text∎"),
        ("first text", ["--eos", "none"], "first text"),
        ("before <|endoftext|> after", [], "before <|endoftext|> after∎"),
    ],
)
def test_begin_and_end_tokens_are_marks_and_text_stays_text(tmp_path: Path, text: str, flags: list[str], shown: str):
    root, _ = build_tokens(tmp_path, [text], *flags)
    assert f"  ▌ {shown}\n" in run("peek", root).out


@pytest.mark.slow
def test_pieces_have_colours_of_their_own_on_a_terminal(tmp_path: Path):
    root, _ = build_tokens(tmp_path, ["first text", "second text"])
    shown = on_terminal("peek", root)
    cyan, yellow, dim = "\x1b[36m", "\x1b[33m", "\x1b[2m"
    assert re.search(re.escape(f"{cyan}first text") + r"\x1b\[0m" + re.escape(f"{dim}∎"), shown)
    assert f"{yellow}second text" in shown
    assert f"{dim}58 tokens of padding" in shown


def test_json_has_text_tokens_lengths_documents_and_use(tmp_path: Path):
    root, source = build_tokens(tmp_path, ["first text", "second text"])
    (row,) = run("peek", root, "--source", source, "--json").json["shown"]
    cache = fb.open_cache(root)
    assert row["tokens"] == cache[0]["tokens"].tolist()
    assert row["seq_lens"] == [3, 3]
    assert row["documents"] == [[0, 0], [1, 0]]
    assert (row["utilization"], row["padding"]) == (6 / 64, 58)
    assert row["text"] == "first textsecond text"
    assert [(piece["text"], piece["source"]) for piece in row["pieces"]] == [
        ("first text", "a.jsonl@0"),
        ("second text", "a.jsonl@23"),
    ]


def test_failed_and_repeated_documents_do_not_shift_the_names(tmp_path: Path):
    source = write_documents(tmp_path / "data", ["one", "two", "one", "three"])
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join([lines[0], "{\n", *lines[1:]]))
    run("build", "tokens", source, "--into", tmp_path / "cache", "--workers", 0, "--deduplicate")
    pieces = run("peek", tmp_path / "cache", "--source", source, "--json").json["shown"][0]["pieces"]
    starts = {piece["text"]: piece["source"] for piece in pieces}
    assert starts == {"one": "a.jsonl@0", "two": "a.jsonl@18", "three": "a.jsonl@50"}


@pytest.mark.parametrize("fate", ["gone", "changed"])
def test_rows_are_readable_where_the_source_is_gone_or_changed(tmp_path: Path, fate: str):
    root, source = build_tokens(tmp_path, ["first text", "second text"])
    if fate == "gone":
        shutil.rmtree(source.parent)
    else:
        source.write_text(source.read_text().replace("first", "third"))
    shown = run("peek", root, "--source", source).out
    assert "document 1 of the chunk · 3 tokens\n  ▌ second text∎" in shown
    assert "a.jsonl" not in shown


def test_without_the_library_ids_are_shown_and_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root, _ = build_tokens(tmp_path, ["first text"])
    monkeypatch.setattr("forebay.tokens.encoders.is_installed", lambda name: False)
    shown = run("peek", root).out
    assert "pip install 'forebay[tokens]'" in shown
    assert "  ▌ 11085 2420 50256\n" in shown


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=6).filter(any))
def test_any_text_in_rows_of_any_length_is_shown_without_control_marks(texts: list[str]):
    """Pieces may begin and end within a character."""
    with TemporaryDirectory() as folder:
        root, _ = build_tokens(Path(folder), texts, "--sequence-length", 3, "--chunk-rows", 50)
        shown = run("peek", root, "--rows", 999).out
    assert all(mark.isprintable() or mark == "\n" for mark in shown)
