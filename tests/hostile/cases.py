"""Crafted caches against every verb, in a process that forks: `python -m tests.hostile.cases CRAFT WORLD SEED…`.

Prints a line of JSON for every finding.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

from forebay.testing.campaign.faults import Trial
from forebay.testing.campaign.hostile import READING, craft
from forebay.testing.campaign.trial import remove, run_call, run_verb
from forebay.testing.campaign.worlds import World, make_worlds, read_rows

SECONDS = 10.0


def every_verb(name: str, world: World, worlds: list[World], seed: str, folder: Path) -> list[dict[str, str]]:
    """A crafted cache, read and passed to every verb, each time as it was crafted."""
    findings = []
    for number, verb in enumerate(READING):
        place = folder / f"{seed}-{number}"
        place.mkdir(parents=True)
        trial = Trial(place, random.Random(seed), worlds)
        world.copied(trial.root)
        trial.cause = craft(name, trial.draw, trial.root, trial.canary.folder)
        if number == 0:
            trial.judge("reading", run_call(lambda root=trial.root: read_rows(root)))
        arguments = [part.format(root=trial.root, copy=place / "copied", pristine=world.cache) for part in verb]
        trial.judge(" ".join(verb), run_verb(*arguments, seconds=SECONDS))
        trial.expect_untouched()
        findings += [{"cause": each.cause, "verdict": each.verdict, "seen": each.seen} for each in trial.findings]
    return findings


def main(name: str, world_name: str, seeds: list[str]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        worlds = make_worlds(folder / "worlds", 7)
        world = next(each for each in worlds if each.name == world_name)
        for seed in seeds:
            for finding in every_verb(name, world, worlds, seed, folder / "trials"):
                print(json.dumps(finding))
    finally:
        remove(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
