"""python -m forebay.testing.campaign --seed 7 --minutes 2 [--processes 2] [--classes kill,damage] [--json OUT]

Exit code 0 where no fault led to a finding, 1 where one did. A finding names the seed that repeats it:
`python -m forebay.testing.campaign --repeat CLASS:SEED`.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from forebay.testing.campaign.faults import CLASSES, Finding, as_record, run_fault
from forebay.testing.campaign.trial import VERDICTS, remove
from forebay.testing.campaign.worlds import make_worlds


def main() -> int:
    asked = _arguments()
    begun = time.monotonic()
    if asked.repeat:
        name, _, seed = asked.repeat.partition(":")
        done, findings = _one_process(asked.seed, [name], [seed], float("inf"), 0)
    else:
        done, findings = _in_parallel(asked, begun + asked.minutes * 60)
    for record in findings if asked.repeat or asked.all else _examples(findings):
        print(f"{record['verdict']:<9} {record['cause']}\n          {record['seen']}")
        print(f"          --repeat {record['class']}:{record['seed']}")
    print(_table(done, findings))
    print(f"{sum(done.values()):,} faults in {time.monotonic() - begun:,.0f} s, seed {asked.seed}")
    if asked.json:
        Path(asked.json).write_text(json.dumps({"faults": dict(done), "findings": findings}, indent=1))
    return 1 if findings else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m forebay.testing.campaign", description="Run a fault campaign.")
    parser.add_argument("--seed", type=int, default=0, help="Chooses the faults.")
    parser.add_argument("--minutes", type=float, default=2.0, help="Stop after this time.")
    parser.add_argument("--faults", type=int, default=None, help="Stop after this many faults.")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="Run side by side.")
    parser.add_argument("--classes", default=",".join(CLASSES), help=f"Of: {', '.join(CLASSES)}.")
    parser.add_argument("--repeat", metavar="CLASS:SEED", help="Repeat one fault.")
    parser.add_argument("--all", action="store_true", help="Print every finding, not one of each kind.")
    parser.add_argument("--json", metavar="FILE", help="Write counts and findings to a file.")
    asked = parser.parse_args()
    unknown = set(asked.classes.split(",")) - set(CLASSES)
    if unknown:
        parser.error(f"unknown class {', '.join(sorted(unknown))}; choose from {', '.join(CLASSES)}")
    return asked


def _in_parallel(asked: argparse.Namespace, deadline: float) -> tuple[Counter[str], list[dict[str, Any]]]:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    names = asked.classes.split(",")
    share = None if asked.faults is None else -(-asked.faults // asked.processes)

    def work(number: int) -> None:
        seeds = [f"{asked.seed}-{number}-{index}" for index in range(share or 10**6)]
        try:
            answers.put(_one_process(asked.seed, names, seeds, deadline, number))
        except BaseException:
            answers.put(traceback.format_exc())

    started = [context.Process(target=work, args=(number,)) for number in range(asked.processes)]
    for process in started:
        process.start()
    done: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    for _ in started:
        answer = answers.get()
        if isinstance(answer, str):
            raise RuntimeError(f"a process of the campaign failed:\n{answer}")
        counts, found = answer
        done += counts
        findings += found
    for process in started:
        process.join()
    return done, findings


def _one_process(
    seed: int, names: list[str], seeds: list[str], deadline: float, number: int
) -> tuple[Counter[str], list[dict[str, Any]]]:
    folder = Path(tempfile.mkdtemp(prefix="forebay-campaign-"))
    done: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    try:
        worlds = make_worlds(folder / "worlds", seed)
        for index, one in enumerate(seeds):
            if time.monotonic() > deadline:
                break
            name = random.Random(f"class {one}").choices(names, [CLASSES[each][1] for each in names])[0]
            try:
                found = run_fault(name, one, folder / f"trial-{index}", worlds)
            except Exception:  # a mistake of the campaign must not lose what hours of it found
                found = [Finding("the campaign itself failed", "unclear", traceback.format_exc())]
            done[name] += 1
            findings += [as_record(each, name, one) for each in found]
    finally:
        remove(folder)
    return done, findings


def _examples(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first finding of each class and verdict."""
    seen: dict[tuple[str, str], dict[str, Any]] = {}
    for record in findings:
        seen.setdefault((record["class"], record["verdict"]), record)
    return list(seen.values())


def _table(done: Counter[str], findings: list[dict[str, Any]]) -> str:
    """Faults per class, and how many of them led to a finding of each kind."""
    struck = {(record["class"], record["verdict"], record["seed"]) for record in findings}
    counts = Counter((name, verdict) for name, verdict, _ in struck)
    rows = [["class", "faults", *VERDICTS]]
    for name in CLASSES:
        rows.append([name, f"{done[name]:,}", *(str(counts[name, verdict]) for verdict in VERDICTS)])
    totals = [str(sum(counts[name, verdict] for name in CLASSES)) for verdict in VERDICTS]
    rows.append(["all", f"{sum(done.values()):,}", *totals])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
