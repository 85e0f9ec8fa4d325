"""Packed tokens on the command line: sources of every format, recipe flags, growth, failures, figures."""

import gzip
import io
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tests.cli.running import build_tokens, run, stories, story, write_documents

import forebay as fb

STORIES = [story(number) for number in range(40)]
SMALL = ["--sequence-length", 64, "--chunk-rows", 8, "--workers", 0]


def recipe_of(root: Path) -> dict[str, object]:
    fields: dict[str, object] = run("info", root, "--json").json["layers"][0]["fields"]
    return fields


def documents_in(root: Path) -> int:
    count: int = run("info", root, "--json").json["layers"][0]["statistics"]["documents"]
    return count


def write_texts(folder: Path, texts: list[str], suffix: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number}{suffix}").write_text(text)


def test_every_field_of_the_recipe_has_a_flag(tmp_path: Path):
    flags = [
        *("--long", "truncate", "--eos", "none", "--bos", "<|endoftext|>", "--pad", 5, "--deduplicate"),
        *("--codec", "lz4", "--level", "fast", "--rows-per-block", 3, "--encoder", "tokenizers", "--tokenizer", "gpt2"),
    ]
    root, _ = build_tokens(tmp_path, STORIES, *flags)
    assert recipe_of(root) == {
        "tokenizer": "gpt2",
        "sequence_length": 64,
        "long": "truncate",
        "chunk_rows": 8,
        "eos": None,
        "bos": 50256,  # what a token's text means is settled when a cache is planned
        "pad": 5,
        "deduplicate": True,
        "codec": "lz4",
        "level": "fast",
        "rows_per_block": 3,
        "encoder": "tokenizers",
    }


def parquet_of(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "more": list(range(len(texts)))}), buffer)
    return buffer.getvalue()


LINES = "".join(json.dumps({"text": text}) + "\n" for text in STORIES).encode()
NAMED = LINES.replace(b'"text"', b'"content"')
LICENSE = {"LICENSE": b"not meant"}
CORPORA = {"c4-train.00000.json.gz": gzip.compress(LINES), "more.ndjson": LINES, "UPPER.JSONL": LINES + b"\n\n"}
TXT, MD, RST = (
    {f"{number}{suffix}": text.encode() for number, text in enumerate(STORIES[:7])}
    for suffix in (".txt", ".md", ".rst")
)


@pytest.mark.parametrize(
    ("files", "source", "flags", "documents"),
    [
        ({"a.jsonl": LINES}, "a.jsonl", [], 40),
        ({"a.json": LINES}, "a.json", [], 40),
        ({"a.jsonl.gz": gzip.compress(LINES)}, "a.jsonl.gz", [], 40),
        ({"a.jsonl": LINES, **LICENSE}, "", [], 40),
        ({"a.jsonl": LINES, **LICENSE}, "*", [], 40),
        (CORPORA, "", ["--max-failures", 0], 120),
        ({"a.jsonl": NAMED}, "", ["--text", "content"], 40),
        ({"a.log": LINES}, "*.log", ["--format", "jsonl"], 40),
        ({"a.parquet": parquet_of(STORIES)}, "", [], 40),
        (TXT, "", [], 7),
        (MD, "", [], 7),
        (TXT | RST, "", ["--suffix", ".rst"], 7),
        ({"notes": "\n---\n".join(STORIES[:5]).encode()}, "notes", ["--separator", r"\n---\n"], 5),
    ],
)
def test_format_follows_the_names_of_files_and_the_flags(
    tmp_path: Path, files: dict[str, bytes], source: str, flags: list[object], documents: int
):
    (tmp_path / "data").mkdir()
    for name, content in files.items():
        (tmp_path / "data" / name).write_bytes(content)
    ran = run("build", "tokens", tmp_path / "data" / source, "--into", tmp_path / "cache", *flags, *SMALL)
    assert documents_in(tmp_path / "cache") == documents
    assert "not read" not in ran.out or files != CORPORA
    assert STORIES[1] in run("peek", tmp_path / "cache", "--rows", 99).out.replace("\n  ▌ ", "")


def test_mixed_formats_are_wrong_usage_until_one_is_chosen(tmp_path: Path):
    write_documents(tmp_path / "data", STORIES)
    write_texts(tmp_path / "data", STORIES[:2], ".txt")
    words = ["build", "tokens", tmp_path / "data", "--into", tmp_path / "cache"]
    said = run(*words, code=2).err
    assert (
        "several formats (0.txt is text, a.jsonl is jsonl)\nhint: choose one with --format jsonl|parquet|text" in said
    )
    run(*words, "--format", "text", *SMALL)
    assert documents_in(tmp_path / "cache") == 2


@pytest.mark.parametrize("glob", ["*.py", "*", "**/*.p?"])
def test_every_file_that_a_glob_names_is_meant_where_the_format_is_given(tmp_path: Path, glob: str):
    write_texts(tmp_path / "odd", STORIES[:3], ".py")
    words = ["build", "tokens", tmp_path / "odd" / glob, "--into", tmp_path / "cache", *SMALL]
    assert "pass --format jsonl|parquet|text, or --suffix" in run(*words, code=2).err
    run(*words, "--format", "text")
    assert documents_in(tmp_path / "cache") == 3


@pytest.mark.parametrize(("chosen", "endings"), [("text", ".txt, .md"), ("jsonl", ".jsonl, .ndjson, .json")])
def test_a_folder_without_fitting_names_says_what_was_looked_for(tmp_path: Path, chosen: str, endings: str):
    write_texts(tmp_path / "odd", STORIES[:2], ".py")
    said = run("estimate", "tokens", tmp_path / "odd", "--format", chosen, code=1).err
    assert (
        f"no source at '{tmp_path / 'odd'}': no file there ends in {endings} (in any case, also compressed), " in said
    )
    assert "2 files were not read: .py 2\nhint: select others by a glob like '*.py', or by --suffix" in said


def test_a_table_that_is_read_as_plain_text_is_noted(tmp_path: Path):
    (tmp_path / "a.csv").write_text("id,text\n1,one\n2,two\n")
    said = run("estimate", "tokens", tmp_path / "a.csv", *SMALL).out
    assert "a table is read as plain text, each file as one document ('a.csv')" in " ".join(said.split())
    assert fb.sources.text(tmp_path / "a.csv", separator="\n").notes() == ()
    assert fb.sources.text(tmp_path, suffixes=[".TSV"]).notes()
    assert fb.sources.text(tmp_path / "*.txt").notes() == ()


def test_names_that_say_nothing_are_wrong_usage(tmp_path: Path):
    write_texts(tmp_path / "data", STORIES[:2], ".rst")
    said = run("estimate", "tokens", tmp_path / "data", code=2).err
    assert "pass --format jsonl|parquet|text, or --suffix" in said
    assert "2 files were not read: .rst 2" in said


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--subset", "x"], "is for data sets on the hub; name one as hub:org/name"),
        (["--separator", "x"], "--separator is for plain text; the format here is jsonl"),
        (["--format", "text", "--text", "x"], "--text is a field of JSON lines"),
        (["--pad", "none"], "'none' is not valid\nhint: it must be text or a whole number"),
        (["--eos", "<|nothing|>"], ""),
    ],
)
def test_flags_that_do_not_fit_the_source_are_refused(tmp_path: Path, flags: list[str], hint: str):
    source = write_documents(tmp_path / "data", STORIES)
    ran = run("build", "tokens", source, "--into", tmp_path / "cache", *flags, code=2 if hint else 1)
    assert hint in ran.err
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokenizer.json").write_bytes(fb.TokenRecipe(tokenizer="gpt2").vocabulary().json)
    monkeypatch.chdir(tmp_path)
    root, _ = build_tokens(tmp_path, STORIES, "--tokenizer", "tokenizer.json", "--end-chunk", 0)
    monkeypatch.chdir("/")
    run("build", root, "--workers", 0)
    assert recipe_of(root)["tokenizer"] == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("flags", [[], ["--chunk-rows", 8]])
def test_a_build_goes_on_when_the_file_of_its_tokenizer_is_gone(tmp_path: Path, flags: list[object]):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(fb.TokenRecipe(tokenizer="gpt2").vocabulary().json)
    root, _ = build_tokens(tmp_path, STORIES, "--tokenizer", tokenizer, "--end-chunk", 0)
    tokenizer.unlink()
    run("estimate", root)
    run("build", root, "--dry-run", *flags)
    run("build", root, "--workers", 0, *flags)
    assert run("status", root, "--json").json["complete"]
    assert documents_in(root) == 40


def test_status_names_failures_with_file_and_line(tmp_path: Path):
    root, _ = build_tokens(tmp_path, STORIES)
    more = tmp_path / "data" / "bad.jsonl"
    more.write_bytes(b'{"text": "fine"}\n{"text": \n{"other": 1}\n{"text": null}\n{"text": ""}\n{"text": "\xff"}\n')
    run("update", root, more, "--workers", 0)
    shown = run("status", root).out
    for words in (
        r"bad\.jsonl@17 +bad-json +line 2: ",
        r"bad\.jsonl@27 +no-text +line 3: ",
        r"bad\.jsonl@40 +null +line 4: ",
        r"bad\.jsonl@55 +empty +",
        r"bad\.jsonl@68 +not-utf8 +line 6: ",
    ):
        assert re.search(words, shown), (words, shown)
    assert re.search(r"failed\s+5 of 46 samples: ", shown)


def test_a_cache_that_was_made_by_a_function_grows_in_python(tmp_path: Path):
    root = tmp_path / "cache"
    source = fb.sources.function(stories, slices=3)
    fb.build(root, source, fb.TokenRecipe(tokenizer="gpt2", sequence_length=64), workers=0)
    assert "pass the source itself in Python: fb.update(" in run("update", root, tmp_path, code=2).err


def test_a_cache_of_files_does_not_grow_from_the_hub(tmp_path: Path):
    root, _ = build_tokens(tmp_path, STORIES)
    assert "was built from files, not from the hub" in run("update", root, "hub:org/name", code=2).err


def test_info_draws_the_figures(tmp_path: Path):
    root, _ = build_tokens(tmp_path, [*STORIES, "long " * 200, STORIES[0]], "--deduplicate")
    shown = run("info", root).out
    record = run("info", root, "--json").json
    counts = record["layers"][0]["statistics"]
    assert counts["tokens_in"] == counts["tokens"]
    for words in (
        r"documents +41\n",
        r"documents split +1\n",
        rf"tokens in +{counts['tokens_in']:,}\n",
        rf"padding share +{record['layers'][0]['figures']['padding_share']:.1%}\n",
        r"duplicates +1\n",
        r"bytes per token +\d+\.\d+\n",
        r"rows by use +[·▁▂▃▄▅▆▇█]{21}  \d",
    ):
        assert re.search(words, shown), (words, shown)


@pytest.mark.parametrize(
    ("long", "figures"),
    [
        ("truncate", [r"documents cut +1\n", r"tokens dropped +138\n", r"tokens dropped share +\d\.\d%\n"]),
        ("drop", [r"documents dropped +1\n"]),
    ],
)
def test_info_counts_what_was_dropped(tmp_path: Path, long: str, figures: list[str]):
    root, _ = build_tokens(tmp_path, [*STORIES, "long " * 200], "--long", long)
    shown = run("info", root).out
    assert all(re.search(words, shown) for words in figures), shown


def test_info_has_the_metadata_of_the_old_script_computed(tmp_path: Path):
    root, _ = build_tokens(tmp_path, STORIES)
    cache = fb.open_cache(root)
    used = int(sum(int(row["seq_lens"].sum()) for row in cache))
    assert run("info", root, "--json").json["metadata"] == {
        "version": "1.0",
        "total_chunks": len(list((root / "layers").glob("tokens.*/0*.safetensors"))),
        "total_sequences": len(cache),
        "max_length": 64,
        "compression_enabled": True,
        "utilization_stats": {
            "avg_utilization": used / (64 * len(cache)),
            "total_tokens": used,
            "efficiency_ratio": 1.0,
        },
    }


def test_an_estimate_says_that_it_knows_nothing_of_duplicates(tmp_path: Path):
    source = write_documents(tmp_path / "data", STORIES * 20)
    words = ["estimate", "tokens", source, *SMALL[:-2], "--deduplicate"]
    assert "duplicates are included" in run(*words).out
    assert len(run(*words, "--json").json["notes"]) == 1


def test_a_dry_run_knows_the_encoder_that_was_chosen(tmp_path: Path):
    root, source = build_tokens(tmp_path, STORIES, "--end-chunk", 0)
    ran = run("build", "tokens", source, "--into", root, *SMALL, "--dry-run")
    assert re.search(r"would build +\d+ chunks of \d+ planned", ran.out)


def test_files_that_are_not_read_are_counted_in_build_estimate_and_dry_run(tmp_path: Path):
    write_documents(tmp_path / "data", STORIES)
    for name in ("b.csv", "c.csv", "d.jsonl.br", "LICENSE", ".hidden"):
        (tmp_path / "data" / name).write_text("x")
    said = "4 files were not read: .csv 2, .br 1, no suffix 1"
    asked = ("tokens", tmp_path / "data", "--into", tmp_path / "data" / "cache", *SMALL)
    for verb in (("estimate", *asked[:4]), ("build", *asked, "--dry-run"), ("build", *asked), ("build", *asked)):
        assert said in run(*verb).out
    assert said in run("build", *asked, "--json").json["notes"]
    ran = run("build", "tokens", tmp_path / "data" / "*.jsonl", "--into", tmp_path / "c", *SMALL)
    assert "not read" not in ran.out


def test_a_bound_on_samples_is_kept_by_the_cache(tmp_path: Path):
    write_documents(tmp_path, ["short", "long " * 1000, "short again"])
    into = ("--into", tmp_path / "c", *SMALL)
    run("build", "tokens", tmp_path / "a.jsonl", "--max-sample-bytes", "1kB", *into)
    assert documents_in(tmp_path / "c") == 2
    assert "too-large" in run("status", tmp_path / "c").out
    assert "max_sample_bytes=1000" in run("build", "tokens", tmp_path / "a.jsonl", *into, code=1).err
    run("build", tmp_path / "c")


def test_gpt2_on_the_command_line_is_the_vocabulary_beside_a_folder_of_that_name(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    write_documents(tmp_path, STORIES[:5])
    run("build", "tokens", "a.jsonl", "--tokenizer", "gpt2", "--into", "c", *SMALL)
    assert recipe_of(tmp_path / "c")["tokenizer"] == "gpt2"
    said = run("build", "tokens", "a.jsonl", "--tokenizer", "./gpt2", "--into", "d", *SMALL, code=1).err
    assert "the folder has no tokenizer.json" in said
