"""A stranger's cache: every verb gives a clear error or the right rows, in 10 s and 1 GiB, and touches nothing outside.

The corpus is made by `forebay.testing.campaign.hostile`; every digest in it is right.
"""

import json
import subprocess
import sys

import pytest
from tests.builders import REPOSITORY, script_environment

from forebay.testing.campaign.hostile import CRAFTED
from forebay.testing.campaign.syscalls import SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the campaign forks and watches children as Linux does")
WORLDS = ("raw-zstd", "tokens", "images")


@pytest.mark.parametrize("craft", sorted(CRAFTED))
def test_a_crafted_cache_is_refused_or_read_right_by_every_verb(craft: str) -> None:
    # Another cache for every craft, so that all kinds are met without running everything on each.
    world = WORLDS[sorted(CRAFTED).index(craft) % len(WORLDS)]
    found = findings(craft, world, ["1", "2", "3"])
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("craft", sorted(CRAFTED))
def test_many_crafted_caches_are_refused_or_read_right_by_every_verb(craft: str, world: str) -> None:
    found = findings(craft, world, [str(number) for number in range(10, 50)])
    assert not found, "\n".join(found)


def findings(craft: str, world: str, seeds: list[str]) -> list[str]:
    return found_by("tests.hostile.cases", craft, world, *seeds)


def found_by(module: str, *arguments: str) -> list[str]:
    """What a module that forks found, run as a process by itself."""
    command = [sys.executable, "-m", module, *arguments]
    run = subprocess.run(command, env=script_environment(), cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in run.stdout.splitlines()]
    return [f"{record['verdict']}: {record['cause']}: {record['seen']}" for record in records]
