"""python -m tests.campaign --seed 7 --minutes 2 [--processes 2] [--classes kill,damage] [--json OUT]

Findings are printed as they come. Exit code 0 if no fault led to a finding, 1 if one did. A finding includes the
seed that repeats it: `python -m tests.campaign --repeat CLASS:SEED`. `--sweep update,repair` kills at each system call
of these commands in turn.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaign.faults import CLASSES, run_fault
from tests.campaign.oracle import OUTCOMES, Finding, Outcome, as_record, trial_in
from tests.campaign.strikes import JOBS, calls_of, swept
from tests.campaign.trial import VERDICTS, remove, warm_up
from tests.campaign.worlds import World, make_worlds

_SAVE_EVERY = 250  # faults
_SWEEPS = [job.name.replace(" ", "_") for job in JOBS]


def main() -> int:
    asked = _arguments()
    begun = time.monotonic()
    log = Log(asked)
    warm_up()
    folder = Path(tempfile.mkdtemp(prefix="forebay-campaign-"))
    try:
        worlds = make_worlds(folder / "worlds", _world_seed(asked))
        if asked.repeat:
            name, _, seed = asked.repeat.partition(":")
            _run_faults([(name, seed)], float("inf"), folder / "0", worlds, log.add)
        else:
            _in_parallel(asked, begun + asked.minutes * 60, folder, worlds, log)
    finally:
        remove(folder)
    log.save()
    print(log.table())
    print(f"{sum(log.done.values()):,} faults in {time.monotonic() - begun:,.0f} s, seed {asked.seed}")
    return 1 if log.findings else 0


@dataclass(frozen=True, slots=True)
class Result:
    """What one fault led to."""

    name: str
    outcome: Outcome
    findings: list[dict[str, Any]]
    covered: Counter[tuple[str, str]]


class Log:
    """Prints findings as they come, and counts; a campaign that is stopped has said and saved what it found."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.done: Counter[str] = Counter()
        self.findings: list[dict[str, Any]] = []
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._covered: Counter[tuple[str, str]] = Counter()
        self._asked = asked
        self._shown: set[tuple[str, str]] = set()

    def add(self, result: Result) -> None:
        self.done[result.name] += 1
        self._outcomes[result.name, result.outcome] += 1
        self._covered += result.covered
        self.findings += result.findings
        for record in result.findings:
            self._show(record)
        if sum(self.done.values()) % _SAVE_EVERY == 0:
            self.save()
            print(f"{sum(self.done.values()):,} faults, {len(self.findings)} findings", file=sys.stderr, flush=True)

    def _show(self, record: dict[str, Any]) -> None:
        kind = record["class"], record["verdict"]
        if kind not in self._shown or self._asked.all or self._asked.repeat:
            print(f"{record['verdict']:<9} {record['cause']}\n          {record['seen']}")
            print(f"          --repeat {record['class']}:{record['seed']}", flush=True)
        self._shown.add(kind)

    def save(self) -> None:
        if self._asked.json:
            outcomes = {name: {each: self._outcomes[name, each] for each in OUTCOMES} for name in self.done}
            covered = [[*key, count] for key, count in sorted(self._covered.items())]
            record = {"faults": dict(self.done), "outcomes": outcomes, "findings": self.findings, "covered": covered}
            Path(self._asked.json).write_text(json.dumps(record, indent=1))

    def table(self) -> str:
        """Faults per class, what came of them, and how many led to a finding of each kind."""
        struck = {(record["class"], record["verdict"], record["seed"]) for record in self.findings}
        counts = Counter((name, verdict) for name, verdict, _ in struck) + self._outcomes
        columns = [*OUTCOMES, *VERDICTS]
        rows = [["class", "faults", *columns]]
        for name in sorted(self.done, key=list(CLASSES).index):
            rows.append([name, f"{self.done[name]:,}", *(f"{counts[name, column]:,}" for column in columns)])
        totals = [f"{sum(counts[name, column] for name in self.done):,}" for column in columns]
        rows.append(["all", f"{sum(self.done.values()):,}", *totals])
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:], "", *self._coverage()])

    def _coverage(self) -> list[str]:
        """What was damaged, run and killed, and how often."""
        titles = {
            "file": "files damaged",
            "count": "damaged at once",
            "copy": "repaired from a copy",
            "verb": "verbs run",
        }
        titles |= {"kill": "killed", "call": "killed at each system call"}
        counts = {
            what: [f"{name} {count:,}" for (kind, name), count in sorted(self._covered.items()) if kind == what]
            for what in titles
        }
        return [f"{title}: {', '.join(counts[what])}" for what, title in titles.items() if counts[what]]


def _world_seed(asked: argparse.Namespace) -> int:
    """The seed of the campaign; that of a fault to repeat begins with it."""
    found = re.fullmatch(r"\w[\w-]*:([0-9]+)-\w+-[0-9]+", asked.repeat or "")
    return int(found[1]) if found else int(asked.seed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description="Run a fault campaign.")
    parser.add_argument("--seed", type=int, default=0, help="Chooses the faults.")
    parser.add_argument("--minutes", type=float, default=2.0, help="Stop after this time.")
    parser.add_argument("--each", type=int, default=None, help="This many faults of every class, instead of by weight.")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="Run side by side.")
    parser.add_argument("--classes", default=",".join(CLASSES), help=f"Of: {', '.join(CLASSES)}.")
    parser.add_argument("--sweep", default="", metavar="JOBS", help=f"Of: {', '.join(_SWEEPS)}.")
    parser.add_argument("--repeat", metavar="CLASS:SEED", help="Repeat one fault.")
    parser.add_argument("--all", action="store_true", help="Print every finding, not one of each kind.")
    parser.add_argument("--json", metavar="FILE", help="Write counts and findings to a file.")
    asked = parser.parse_args()
    unknown = set(asked.classes.split(",")) - set(CLASSES)
    if unknown:
        parser.error(f"unknown class {', '.join(sorted(unknown))}; choose from {', '.join(CLASSES)}")
    if asked.sweep and set(asked.sweep.split(",")) - set(_SWEEPS):
        parser.error(f"--sweep takes {', '.join(_SWEEPS)}")
    return asked


def _in_parallel(asked: argparse.Namespace, deadline: float, folder: Path, worlds: Sequence[World], log: Log) -> None:
    """Divide the faults among processes, which share the worlds: nothing may change those."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def work(number: int) -> None:
        try:
            place = folder / str(number)
            _run_faults(_chosen(asked, number, place, worlds), deadline, place, worlds, results.put)
            results.put(None)
        except BaseException:
            results.put(traceback.format_exc())

    started = [context.Process(target=work, args=(number,)) for number in range(asked.processes)]
    for process in started:
        process.start()
    running = len(started)
    while running:
        result = results.get()
        if isinstance(result, str):
            raise RuntimeError(f"a process of the campaign failed:\n{result}")
        if result is None:
            running -= 1
        else:
            log.add(result)
    for process in started:
        process.join()


def _chosen(asked: argparse.Namespace, number: int, folder: Path, worlds: Sequence[World]) -> Iterator[tuple[str, str]]:
    """The faults of one process, each as class and seed."""
    if asked.sweep:
        for name in asked.sweep.split(","):
            with trial_in(folder / "counted", "", worlds) as trial:
                calls = calls_of(trial, *swept(trial, name))
            yield from (
                ("each-call", f"{asked.seed}-{name}-{at}") for at in range(1 + number, 1 + calls, asked.processes)
            )
        return
    names = asked.classes.split(",")
    names = [name for name in names if CLASSES[name][1]]
    if asked.each is not None:
        rounds = range(number, asked.each, asked.processes)
        yield from ((name, f"{asked.seed}-{number}-{index}") for index in rounds for name in names)
        return
    weights = [CLASSES[name][1] for name in names]
    for index in range(10**6):
        seed = f"{asked.seed}-{number}-{index}"
        yield random.Random(f"class {seed}").choices(names, weights)[0], seed


def _run_faults(
    chosen: Iterable[tuple[str, str]],
    deadline: float,
    folder: Path,
    worlds: Sequence[World],
    report: Callable[[Result], None],
) -> None:
    for index, (name, one) in enumerate(chosen):
        if time.monotonic() > deadline:
            break
        try:
            trial = run_fault(name, one, folder / f"trial-{index}", worlds)
        except Exception:  # a mistake of the campaign must not lose what hours of it found
            failed = Finding("the campaign itself failed", "unclear", traceback.format_exc())
            report(Result(name, "finding", [as_record(failed, name, one)], Counter()))
        else:
            found = [as_record(each, name, one) for each in trial.findings]
            report(Result(name, trial.outcome, found, trial.covered))


if __name__ == "__main__":
    sys.exit(main())
