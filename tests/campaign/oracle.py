"""The oracle: what a fault led to, and whether forebay did then what it should."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.campaign.damage import Done
from tests.campaign.trial import Ending, Verdict, command_line, remove, run_call, run_verb
from tests.campaign.worlds import READ_SECONDS, Canary, World, chunk_digests, doorbell, read_rows

BUILD_SECONDS = 20.0
Outcome = Literal["right", "restored", "refused", "finding"]
OUTCOMES: tuple[Outcome, ...] = ("right", "restored", "refused", "finding")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that forebay did not take as it should."""

    cause: str
    verdict: Verdict
    seen: str


@dataclass
class Trial:
    """One fault: a folder to work in, a canary beside it, and what was found."""

    folder: Path
    seed: str
    worlds: Sequence[World]
    cause: str = ""
    findings: list[Finding] = field(default_factory=list)
    guarded: Mapping[str, str] = field(default_factory=dict)  # digests of chunks that no verb may change or delete
    covered: Counter[tuple[str, str]] = field(default_factory=Counter)  # ("verb", name), ("file", kind), ("kill", verb)
    was_refused: bool = False  # a verb or a reader ended in an error
    is_whole: bool = False  # all rows were there at the end

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.canary = Canary(self.folder / "outside")
        self.root = self.folder / "cache"

    @property
    def outcome(self) -> Outcome:
        """What came of the fault: every row right throughout, right again at the end, a clear error, or a finding."""
        if self.findings:
            return "finding"
        if not self.was_refused:
            return "right"
        return "restored" if self.is_whole else "refused"

    def find(self, verdict: Verdict, seen: str) -> None:
        self.findings.append(Finding(self.cause, verdict, seen.replace(str(self.folder), "…")))

    def judge(self, what: str, ending: Ending, *, may_die: bool = False) -> Ending:
        for verdict, seen in ending.faults(may_die=may_die):
            self.find(verdict, f"{what}: {seen}")
        self.was_refused |= ending.code != 0
        return ending

    def verb(self, *arguments: str, seconds: float = BUILD_SECONDS) -> Ending:
        self.covered["verb", arguments[0]] += 1
        intact = self.intact_chunks()
        ending = self.judge(arguments[0], run_verb(*arguments, seconds=seconds))
        self.expect_intact(arguments[0], intact)
        hint = ending.circular_hint(arguments) if self.guarded else ""
        if hint:
            self.find("circular", f"{' '.join(arguments)} ends with {ending.code} and the hint {hint}")
        return ending

    def intact_chunks(self) -> dict[str, str]:
        """The guarded chunk files that are undamaged now."""
        now = chunk_digests(self.root) if self.guarded else {}
        return {key: digest for key, digest in self.guarded.items() if now.get(key) == digest}

    def expect_intact(self, what: str, intact: Mapping[str, str]) -> None:
        now = chunk_digests(self.root) if intact else {}
        if lost := [key for key in intact if now.get(key) != intact[key]]:
            self.find("destroyed", f"{what}: {len(lost)} intact chunk files, {lost[:3]}")

    def damaged(self, done: Sequence[Done]) -> str:
        """What was damaged, as text."""
        self.covered.update(("file", each.kind) for each in done)
        self.covered["count", f"{len(done)} files"] += 1
        return ", ".join(map(str, done))

    def read(self, world: World, root: Path | None = None, tier: Path | None = None) -> tuple[int, list[str]]:
        """How many rows can be read, and the errors met. A wrong row is found."""
        ending = run_call(lambda: read_rows(root or self.root, tier), seconds=READ_SECONDS)
        self.judge("reading", ending)
        if ending.answer is None:
            return 0, []
        rows, errors = ending.answer["rows"], ending.answer["errors"]
        wrong = [row for row in rows if row not in world.rows]
        if wrong or len(set(rows)) != len(rows):
            self.find("wrong rows", f"reading gives {len(wrong)} wrong and {len(rows) - len(set(rows))} double rows")
        self.was_refused |= bool(errors)
        return len(rows), errors

    def expect_whole(self, world: World, *, same_bytes: bool) -> None:
        """All rows, a sound cache, and the chunks of an undisturbed build."""
        rows, errors = self.read(world)
        if errors or rows != len(world.rows):
            self.find("rows lost", f"{rows} of {len(world.rows)} rows can be read; {sorted(set(errors))}")
        verified = self.verb("verify", str(self.root))
        if verified.code != 0:
            self.find("rows lost", f"verify ends with {verified.code}: {verified.last_line}")
        if same_bytes and chunk_digests(self.root) != world.files:
            self.find("wrong rows", "the chunks are not those of an undisturbed build")
        self.is_whole = True

    def expect_untouched(self) -> None:
        changed = self.canary.changes()
        if changed:
            self.find("outside", f"files beside the cache changed: {changed}")
        for sent in doorbell().calls():
            self.find("outside", f"a host that only the cache names was contacted: {sent.splitlines()[:1]}")


def pick_world(trial: Trial) -> World:
    # Raw lines more often: their verbs take less time, and their rows are known from the source.
    return trial.draw.choice([*trial.worlds, *trial.worlds[:4], *trial.worlds[:4]])


def verb_call(*arguments: str) -> Callable[[], None]:
    return partial(command_line, arguments)


@contextmanager
def trial_in(folder: Path, seed: str, worlds: Sequence[World]) -> Iterator[Trial]:
    """A folder for one fault, gone afterwards."""
    folder.mkdir(parents=True)
    try:
        yield Trial(folder, seed, worlds)
    finally:
        remove(folder)


def as_record(finding: Finding, name: str, seed: str) -> dict[str, Any]:
    return {"class": name, "seed": seed, "cause": finding.cause, "verdict": finding.verdict, "seen": finding.seen}
