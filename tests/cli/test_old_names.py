"""The words of the old cache script: every key and flag of it is met, and says what it became."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.running import Ran, run, story, write_documents

import forebay as fb
from forebay.cli.legacy import FLAGS, KEYS, OldKey, in_toml
from forebay.cli.settings import BuildSettings
from forebay.sources.source_settings import TextSettings

GUIDE = Path(__file__).parents[2] / "docs" / "guide-tokens.md"

# CACHE_CONFIG of the old script, every key that its guide names with a value it gives.
OLD_CONFIG: dict[str, Any] = {
    "sequence_length": 64,
    "compression": True,
    "chunk_size": 8,
    "validation": True,
    "parallel_workers": 1,
    "memory_limit": "16GB",
    "compression_level": "max",
    "streaming": True,
    "deduplicate": True,
    "optimize_packing": True,
    "io_threads": 8,
    "write_buffer": "1GB",
    "sync_frequency": 100,
    "download_retries": 5,
    "download_timeout": 300,
    "chunk_download": True,
}
OURS = '[source]\npaths = ["data"]\n[build]\ninto = "cache"\n'


def as_toml(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in values.items())


def built(tmp_path: Path, text: str, *flags: object, code: int = 0) -> Ran:
    write_documents(tmp_path / "data", [story(number) for number in range(30)])
    (tmp_path / "old.toml").write_text(text)
    return run("build", tmp_path / "old.toml", *flags, code=code)


def recipe_of(tmp_path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = run("info", tmp_path / "cache", "--json").json["layers"][0]["fields"]
    return fields


def test_every_key_and_flag_of_the_old_guide_is_in_the_table():
    assert set(KEYS) == set(OLD_CONFIG)
    assert set(FLAGS) == {
        "--mode", "--start-chunk", "--end-chunk", "--resume", "--estimate-space", "--cleanup", "--validate", "--repair",
    }  # fmt: skip


def test_every_key_of_the_table_became_a_setting_that_is_there():
    sections = {"source": TextSettings, "recipe": fb.TokenRecipe, "build": BuildSettings}
    for old in KEYS.values():
        if old.section:
            assert old.key in {field.name for field in msgspec.structs.fields(sections[old.section])}
        else:
            assert old.remark


@pytest.mark.parametrize("form", ["[cache_config]\n{config}{ours}", "[CACHE_CONFIG]\n{config}{ours}", "{config}{ours}"])
def test_the_old_configuration_builds_and_every_key_says_what_it_became(tmp_path: Path, form: str):
    ran = built(tmp_path, form.format(config=as_toml(OLD_CONFIG), ours=OURS), "--json")
    assert ran.json["rows"] > 0
    expected = {"sequence_length": 64, "chunk_size": 8, "codec": "zstd", "level": "max", "deduplicate": True}
    assert expected.items() <= recipe_of(tmp_path).items()
    notes = [line for line in ran.err.splitlines() if line.startswith("note: ")]
    for key in OLD_CONFIG:
        assert any(note.startswith(f"note: '{key}' ") for note in notes), key
    assert "note: 'parallel_workers' is now workers = 1 in [build] (worker processes)" in notes
    assert "note: 'sync_frequency' has no effect: every chunk is synced before it is published" in notes
    assert len(notes) == len(OLD_CONFIG)


def test_old_keys_in_our_sections_are_translated_too(tmp_path: Path):
    text = '[source]\npaths = ["data"]\n[recipe]\nkind = "tokens"\ncompression = false\nparallel_workers = 0\n'
    ran = built(tmp_path, f'{text}sequence_length = 64\n[build]\ninto = "cache"\nvalidation = false\n')
    assert recipe_of(tmp_path)["codec"] == "none"
    assert ran.err.count("note: ") == 3, "a name that stayed is not worth a note"


def test_flags_win_over_old_keys(tmp_path: Path):
    built(tmp_path, f"[cache_config]\n{as_toml(OLD_CONFIG)}{OURS}", "--sequence-length", 32, "--workers", 0)
    assert recipe_of(tmp_path)["sequence_length"] == 32


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (
            "[cache_config]\ncompresion = true\n",
            2,
            "unknown key 'compresion' in [cache_config]; known: sequence_length",
        ),
        ("[cache_config]\ncompression = 3\n", 2, "'compression' cannot be 3 (one of: true, false)"),
        ('compression_level = "best"\n', 1, """'compression_level' cannot be "best" (one of: "fast","""),
        ('\n[cache_config]\nmemory_limit = "lots"\n', 3, "'memory_limit' in [build]: 'lots' is not a size"),
        (
            "parallel_workers = -2\n",
            1,
            "'workers' in [build]: -2 is not valid; it must be a whole number",
        ),
        ("cache_config = 3\n", 1, "'cache_config' is a section; write [cache_config] on a separate line"),
        (
            "parallel_workers = 2\nbuild.workers = 3\n",
            1,
            "'parallel_workers' is now 'workers' in [build], which is also set",
        ),
        ("workers = 2\n", 1, "unknown section [workers]"),
    ],
)
def test_a_mistake_in_old_words_is_named_with_its_line(tmp_path: Path, text: str, line: int, words: str):
    rest = OURS.replace('[build]\ninto = "cache"\n', "") if "build." in text else OURS
    ran = built(tmp_path, text + rest, code=1)
    said = [line for line in ran.err.splitlines() if not line.startswith("note: ")]
    assert len(said) == 1
    assert f"old.toml:{line}: " in said[0], said
    assert words in said[0], said
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("flag", [flag for flag, old in FLAGS.items() if old.verb])
@pytest.mark.parametrize(
    "words", [[], ["build"], ["build", "tokens", "data", "--into", "cache"], ["build", "raw", "data"]]
)
def test_a_flag_that_is_a_verb_here_names_it(flag: str, words: list[str]):
    said = run(*words, flag, code=2).err
    found = re.search(rf"{flag} is now a command: forebay (\w+) ", said)
    assert found is not None
    assert "Usage: " in run(found[1], "--help").out


@pytest.mark.parametrize("flag", [flag for flag, old in FLAGS.items() if not old.verb])
def test_a_flag_of_a_build_that_stands_alone_says_where_it_belongs(flag: str):
    said = run(flag, "inverse", code=2).err
    assert f"{flag} is an option of build: forebay build tokens SOURCE… --into CACHE {flag}" in said


@pytest.mark.parametrize("flag", [flag for flag, old in FLAGS.items() if not old.verb])
def test_a_flag_that_stayed_is_in_the_help_of_build(flag: str):
    assert f"  {flag} " in run("build", "tokens", "--help").out


def became(old: OldKey) -> str:
    if not old.section:
        return "no effect"
    changed = {before: in_toml(now) for before, now in old.values.items() if before != in_toml(now)}
    return ", ".join([f"`{old.key}` in `[{old.section}]`", *(f"`{key}` is `{now}`" for key, now in changed.items())])


def test_the_guide_has_the_table():
    new = {flag: f"`forebay {old.verb}`" if old.verb else f"`{flag}`" for flag, old in FLAGS.items()}
    rows = [f"| `{flag}` | {new[flag]} | {old.remark} |" for flag, old in FLAGS.items()]
    rows += [f"| `{name}` | {became(old)} | {old.remark} |" for name, old in KEYS.items()]
    assert "\n".join(["| old | here | |", "|---|---|---|", *rows]) in GUIDE.read_text()
