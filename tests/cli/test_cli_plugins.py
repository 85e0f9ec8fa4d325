"""A recipe of another package: the command line finds it by entry point, and its fields are options."""

import re
from pathlib import Path

import pytest
from tests.cli.running import run, write_lines

RECIPE = '''
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

import forebay as fb


class ShoutRecipe(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Count the letters of lines.

    More that help does not show.
    """

    kind: ClassVar[str] = "shout"
    revision: ClassVar[int] = 1

    tune: Annotated[str, Meta(description="The tune.")]
    style: Annotated[Literal["loud", "quiet"], Meta(description="How to count.")] = "loud"
    at_most: Annotated[int, Meta(ge=1, le=99, description="The largest count.")] = 40
    whole: Annotated[bool, Meta(description="Count whole lines.")] = True
    words: Annotated[tuple[str, ...], Meta(description="Words to leave out (repeatable).")] = ()
    weights: dict[str, float] = {}

    def columns(self) -> tuple[fb.Column, ...]:
        return (fb.Column(name="count", dtype="uint32"),)

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=10)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        return fb.Rows({"count": np.array([min(len(sample.data), self.at_most) for sample in samples], np.uint32)})
'''


@pytest.fixture
def shout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one recipe, and lines to build from."""
    package = tmp_path / "package"
    about = package / "shout-1.0.dist-info"
    about.mkdir(parents=True)
    (package / "shout_recipe.py").write_text(RECIPE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[forebay.recipes]\nshout = shout_recipe:ShoutRecipe\n")
    monkeypatch.syspath_prepend(package)
    write_lines(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_its_fields_are_options_with_choices_bounds_and_help(shout: Path):
    assert re.search(r"\n  shout +Count the letters of lines\.\n", run("build", "--help").out)
    text = run("build", "shout", "--help-all").out
    assert "--tune TEXT           The tune." in text
    assert "--style [loud|quiet]  How to count.  [default: loud]" in text
    assert "--at-most N           The largest count.  [default: 40]" in text
    assert "--whole / --no-whole  Count whole lines." in text
    assert "--words TEXT          Words to leave out (repeatable)." in text
    assert "weights" not in text  # cannot be written as text: a settings file has it
    assert "--unit [files|lines]" in text  # how its source is opened, unless it names another way
    assert "More that help does not show" not in text


def test_it_builds_and_keeps_what_the_options_said(shout: Path):
    words = ["--unit", "lines", "--into", "cache", "--at-most", "7", "--words", "a", "-w", "0", "--tune", "C"]
    run("build", "shout", "data", *words)
    fields = run("info", "cache", "--json").json["layers"][0]["fields"]
    assert fields == {"tune": "C", "style": "loud", "at_most": 7, "whole": True, "words": ["a"], "weights": {}}
    assert run("build", "cache", "--json").json["built"] == 0


def test_a_wrong_value_is_refused_with_what_is_right(shout: Path):
    said = run("build", "shout", "data", "--into", "cache", "--style", "lound", code=2).err
    assert (
        "invalid value for '--style': 'lound' is not valid\nhint: it must be one of 'loud', 'quiet'; did you mean"
        in said
    )
    said = run("build", "shout", "data", "--into", "cache", "--at-most", "100", code=2).err
    assert "'100' is not valid\nhint: it must be a whole number from 1 to 99" in said
    said = run("build", "shout", "data", "--into", "cache", code=2).err
    assert "missing option '--tune' (required for shout)\nhint: The tune." in said


def test_a_settings_file_sets_its_fields(shout: Path):
    recipe = '[recipe]\nkind = "shout"\ntune = "C"\nat_most = 3\nweights = {a = 0.5}\n'
    lines = f'[source]\npaths = ["data"]\nunit = "lines"\n{recipe}'
    (shout / "s.toml").write_text(lines)
    run("build", "s.toml", "--into", "cache", "--style", "quiet", "-w", "0")
    fields = run("info", "cache", "--json").json["layers"][0]["fields"]
    assert (fields["style"], fields["at_most"], fields["weights"]) == ("quiet", 3, {"a": 0.5})
    (shout / "s.toml").write_text(lines.replace("at_most", "at_mots"))
    assert "s.toml: unknown key 'at_mots' in [recipe]; did you mean 'at_most'?" in run("build", "s.toml", code=1).err
