"""Crafted caches and hostile inputs against every verb, in a process that forks.

`python -m tests.hostile.cases` reads one line of JSON per question, `{"craft": …, "world": …, "seeds": […]}` or
`{"input": …}` or `{"answer": …}`, and answers each with one line: the list of findings.
"""

import importlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.hostile.answers import meet_answers
from tests.hostile.inputs import meet_input

from forebay.testing.campaign.faults import Trial, as_record, meet
from forebay.testing.campaign.hostile import CHANGING, LOOKING, craft
from forebay.testing.campaign.trial import remove, run_call, warm_up
from forebay.testing.campaign.worlds import World, doorbell, make_worlds, read_rows


def every_verb(name: str, world: World, seed: str, folder: Path) -> list[dict[str, Any]]:
    """A crafted cache is read and passed to every verb; whatever may change it gets a new one."""
    findings = []
    for number, verbs in enumerate((LOOKING, *((verb,) for verb in CHANGING))):
        place = folder / f"{seed}-{number}"
        place.mkdir(parents=True)
        trial = Trial(place, random.Random(seed), [world])
        world.copied(trial.root)
        trial.cause = craft(name, trial.draw, trial.root, trial.canary.folder)
        if verbs is LOOKING:
            trial.judge("reading", run_call(lambda root=trial.root: read_rows(root)))
        for verb in verbs:
            meet(trial, world, verb)
        findings += [as_record(each, name, seed) for each in trial.findings]
        remove(place)
    return findings


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    # The user's own hub is the port that nobody may call: a crafted cache must not make forebay ask it either.
    os.environ |= {"HF_ENDPOINT": doorbell().address, "HF_TOKEN": "hf_secret_of_the_user", "HF_HOME": f"{folder}/home"}
    importlib.import_module("forebay.sources.hub_datasets")  # now: its library reads the environment at import
    warm_up()
    try:
        worlds = {each.name: each for each in make_worlds(folder / "worlds", 7)}
        for line in sys.stdin:
            asked = json.loads(line)
            found = []
            if "input" in asked:
                found = meet_input(asked["input"], folder / "input")
            elif "answer" in asked:
                found = meet_answers(asked["answer"], folder / "answer")
            for seed in asked.get("seeds", []):
                found += every_verb(asked["craft"], worlds[asked["world"]], seed, folder / "trials")
            print(json.dumps(found), flush=True)
    finally:
        remove(folder)


if __name__ == "__main__":
    main()
