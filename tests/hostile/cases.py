"""Crafted caches and hostile inputs against every verb, in a process that forks.

`python -m tests.hostile.cases` reads one line of JSON per question, `{"craft": …, "world": …, "seeds": […], "part": …}`
or `{"input": …}` or `{"answer": …}`, and answers each with one line: the list of findings.
"""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.campaign.faults import meet
from tests.campaign.hostile import CHANGING, LOOKING, chunks, craft
from tests.campaign.oracle import Finding, Trial, as_record, trial_in
from tests.campaign.trial import remove, run_call, run_verb, warm_up
from tests.campaign.worlds import World, doorbell, make_worlds, read_rows
from tests.hostile.answers import meet_answers
from tests.hostile.folder_bucket import folder_bucket
from tests.hostile.inputs import meet_input

import forebay as fb
from forebay.chat import repack
from forebay.errors import ForebayError


@contextmanager
def crafted(name: str, world: World, seed: str, folder: Path) -> Iterator[Trial]:
    """A crafted copy of a cache."""
    with trial_in(folder, seed, [world]) as trial:
        world.copied(trial.root)
        trial.cause = craft(name, trial.draw, trial.root, trial.canary.folder)
        yield trial


def by_verbs(name: str, world: World, seed: str, folder: Path, part: slice) -> list[Finding]:
    """A crafted cache is read and passed to a part of all verbs; whatever may change it gets a new one."""
    findings = []
    looking = LOOKING[part]
    for verbs in (looking, *((verb,) for verb in CHANGING[part])):
        with crafted(name, world, seed, folder) as trial:
            if verbs is looking:
                trial.judge("reading", run_call(lambda root=trial.root: read_rows(root)))
            for verb in verbs:
                meet(trial, world, verb)
            findings += trial.findings
    return findings


BY_URL: tuple[tuple[str, ...], ...] = (
    ("status", "{url}"),
    ("info", "{url}"),
    ("peek", "{url}"),
    ("verify", "{url}"),
    ("verify", "--full", "{url}"),
    ("copy", "{url}", "{copy}"),
    ("tier", "fill", "{url}", "{tier}"),
    ("repair", "{mine}", "--from", "{url}", "--workers", "0"),
)


def by_url(name: str, world: World, seed: str, folder: Path, part: slice) -> list[Finding]:
    """A crafted cache in a bucket that only serves; the user named its endpoint, and no other is asked."""
    with crafted(name, world, seed, folder) as trial, folder_bucket(trial.root.parent) as bucket:
        url, mine = f"s3://b/{trial.root.name}", trial.folder / "mine"
        chunks(world.copied(mine))[0].unlink()

        def at_bucket() -> None:
            os.environ |= bucket.environment

        def read() -> Any:
            at_bucket()
            return read_rows(url)

        trial.judge("reading", run_call(read))
        places = {"url": url, "copy": trial.folder / "copied", "tier": trial.folder / "tier", "mine": mine}
        for verb in BY_URL:
            trial.judge(" ".join(verb), run_verb(*(part.format(**places) for part in verb), first=at_bucket))
            trial.expect_untouched()
        trial.read(world, mine)
        if bucket.failures:
            trial.find("unclear", f"the bucket itself failed: {bucket.failures[0]}")
        if bucket.writes:
            trial.find("outside", f"{bucket.writes} writes to a bucket that verbs only read")
    return trial.findings


def repacked(name: str, world: World, seed: str, folder: Path, part: slice) -> list[Finding]:
    """A crafted chat cache is packed again into rows of another length."""
    with crafted(name, world, seed, folder) as trial:

        def pack() -> str:
            try:
                source, recipe = repack(trial.root, sequence_length=256)
                fb.build(trial.folder / "packed", source, recipe, workers=0)
                return f"{len(fb.open_cache(trial.folder / 'packed'))} rows"
            except ForebayError as error:
                return type(error).__name__

        trial.judge("repack", run_call(pack))
        trial.expect_untouched()
    return trial.findings


def only_read(name: str, world: World, seed: str, folder: Path, part: slice) -> list[Finding]:
    """Every row of a crafted cache is asked for."""
    with crafted(name, world, seed, folder) as trial:
        trial.judge("reading", run_call(lambda: read_rows(trial.root)))
    return trial.findings


HOW = {"verbs": by_verbs, "url": by_url, "repack": repacked, "read": only_read}


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    # The user's own hub and buckets are at the port that nobody may call, also not because of a crafted cache.
    os.environ |= {"HF_ENDPOINT": doorbell().address, "HF_TOKEN": "hf_secret_of_the_user", "HF_HOME": f"{folder}/home"}
    os.environ |= {"AWS_ENDPOINT_URL": doorbell().address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "id_of_the_user", "AWS_SECRET_ACCESS_KEY": "secret_of_the_user"}
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
                part, place = slice(*asked["part"]), folder / f"by-{asked['how']}"
                findings = HOW[asked["how"]](asked["craft"], worlds[asked["world"]], seed, place, part)
                found += [as_record(each, asked["craft"], seed) for each in findings]
            print(json.dumps(found), flush=True)
    finally:
        remove(folder)


if __name__ == "__main__":
    main()
