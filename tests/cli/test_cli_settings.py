"""Settings files: what they may say, and how a mistake in one is named."""

import re
from pathlib import Path

import pytest
from tests.cli.running import Ran, run, write_lines

DOCS = Path(__file__).parents[2] / "docs"
GOOD = """\
# settings of a small build
[source]
paths = ["data/*.jsonl"]

[recipe]
kind = "raw"
chunk_bytes = "400B"

[build]
into = "cache"
workers = 0
"""


def built(tmp_path: Path, text: str, *flags: object, code: int = 0) -> Ran:
    write_lines(tmp_path / "data")
    settings = tmp_path / "small.toml"
    settings.write_text(text)
    return run("build", settings, *flags, code=code)


def test_a_settings_file_builds_with_paths_relative_to_it(tmp_path: Path):
    assert built(tmp_path, GOOD, "--json").json["rows"] == 60
    assert (tmp_path / "cache" / "cache.json").exists()


def test_settings_files_in_the_docs_are_valid(tmp_path: Path):
    write_lines(tmp_path / "data")
    blocks = re.findall(r"^```toml\n(.*?)^```", (DOCS / "settings.md").read_text(), re.DOTALL | re.MULTILINE)
    for block in blocks:
        (tmp_path / "shown.toml").write_text(block)
        assert run("estimate", tmp_path / "shown.toml", "--json").json["chunks"] > 0
    assert blocks


def test_flags_win_over_the_file(tmp_path: Path):
    write_lines(tmp_path / "more", "b.jsonl", count=7)
    other = tmp_path / "other"
    report = built(tmp_path, GOOD, tmp_path / "more" / "b.jsonl", "--into", other, "--codec", "none", "--json").json
    assert (report["rows"], report["root"]) == (7, str(other))
    assert run("info", other, "--json").json["layers"][0]["fields"]["codec"] == "none"


def test_all_that_flags_say_can_be_in_the_file(tmp_path: Path):
    more = 'layer = "lines"\nmode = "forward"\nstart_chunk = 0\nend_chunk = 2\nengine = "local"\n'
    report = built(tmp_path, f'{GOOD}{more}memory_limit = "2GB"\nmax_failures = "1%"\n', "--json").json
    assert (report["layer"], report["built"]) == ("lines", 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("workers = 0", "worker = 0"), "unknown key 'worker' in [build]; did you mean 'workers'?"),
        (("paths =", "path ="), "unknown key 'path' in [source]; did you mean 'paths'?"),
        (("chunk_bytes =", "chunk_byte ="), "unknown key 'chunk_byte' in [recipe]; did you mean 'chunk_bytes'?"),
        (("workers = 0", "zzz = 0"), "unknown key 'zzz' in [build]; known: into, reuse, copy, layer, workers"),
        (
            ("workers = 0", 'workers = "two"'),
            "'workers' in [build]: 'two' is not valid; it must be a whole number of at least 0",
        ),
        (
            ("workers = 0", "workers = -1"),
            "'workers' in [build]: -1 is not valid; it must be a whole number of at least 0",
        ),
        (("workers = 0", "workers = true"), "'workers' in [build]: True is not valid; it must be a whole number"),
        (('"400B"', '"lots"'), "'chunk_bytes' in [recipe]: 'lots' is not a size"),
        (('"400B"', "[1]"), "'chunk_bytes' in [recipe]: [1] is not valid; it must be a whole number"),
        (('["data/*.jsonl"]', '"data"'), "'paths' in [source]: 'data' is not valid; it must be a list, each text"),
        (
            ("workers = 0", 'mode = "invers"'),
            "'mode' in [build]: 'invers' is not valid; it must be one of 'forward', 'inverse'; did you mean 'inverse'?",
        ),
        (
            ("workers = 0", 'mode = "???"'),
            "'mode' in [build]: '???' is not valid; it must be one of 'forward', 'inverse'",
        ),
        (('kind = "raw"', 'kind = "rawr"'), "unknown kind 'rawr' in [recipe]; did you mean 'raw'?"),
        (('kind = "raw"', "kind = 3"), "unknown kind 3 in [recipe]"),
        (('kind = "raw"\n', ""), '[recipe] has no kind; add kind = "tokens" (known: tokens, images, raw, chat'),
        (('kind = "raw"', 'kind = "raw"\nworkers = 2'), "unknown key 'workers' in [recipe]; it belongs in [build]"),
        (("workers = 0", 'level = "fast"'), "unknown key 'level' in [build]; it belongs in [recipe]"),
        (("[build]", "[biuld]"), "unknown section [biuld]; did you mean 'build'?"),
        (("[build]\n", "[build]\n[extra.deep]\n"), "unknown section [extra]"),
        (('[source]\npaths = ["data/*.jsonl"]\n', ""), "the section [source] is missing"),
        (('paths = ["data/*.jsonl"]\n', ""), "[source] has no 'paths'"),
        (("workers = 0", "workers 0"), "small.toml:11: this is not TOML: Expected '=' after a key"),
        (("workers = 0", 'workers = """'), "small.toml:11: this is not TOML"),
        (("workers = 0", "workers = " + "9" * 5000), "small.toml:11: this is not TOML: Exceeds the limit"),
        (("workers = 0", "workers = " + "[" * 5000), "small.toml:11: this is not TOML: maximum recursion depth"),
        (("# settings of a small build", "source = 3"), "'source' is a section"),
    ],
)
def test_a_mistake_is_reported_with_its_section_and_the_nearest_name(
    tmp_path: Path, change: tuple[str, str], words: str
):
    if change[1] == "source = 3":
        text = "source = 3\n[recipe]\nkind = 'raw'\n"
    else:
        assert change[0] in GOOD
        text = GOOD.replace(*change)
    ran = built(tmp_path, text, code=1)
    assert "small.toml:" in ran.err, ran.err
    assert words in ran.err, ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_a_file_that_names_no_cache_is_told_which_key_does(tmp_path: Path):
    said = built(tmp_path, GOOD.replace('into = "cache"\n', ""), code=2).err
    assert f"or set 'into' in [build] of '{tmp_path / 'small.toml'}'" in said


def test_a_settings_file_that_is_not_there_or_not_text(tmp_path: Path):
    assert "cannot read the file: No such file" in run("build", tmp_path / "gone.toml", code=1).err
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in run("build", tmp_path / "bytes.toml", code=1).err


def test_another_recipe_names_the_fields_that_differ(tmp_path: Path):
    built(tmp_path, GOOD)
    ran = built(tmp_path, GOOD.replace('"400B"', "500"), "--level", "max", code=1)
    assert re.search(r"built by another recipe \(differs in: chunk_bytes: 400 → 500, level: ", ran.err)
