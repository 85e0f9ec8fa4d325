"""One process that crafts caches and runs verbs on them: its imports and its worlds are made once per test run."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.helpers.builders import REPOSITORY, script_environment


class Corpus:
    """Asks the process for what it finds; see `tests.hostile.cases`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def crafted(
        self, craft: str, world: str, seeds: Sequence[str], how: str = "verbs", part: Sequence[int | None] = (None,)
    ) -> list[str]:
        return self._ask({"craft": craft, "world": world, "seeds": list(seeds), "how": how, "part": list(part)})

    def input(self, name: str) -> list[str]:
        return self._ask({"input": name})

    def answer(self, name: str) -> list[str]:
        return self._ask({"answer": name})

    def _ask(self, question: dict[str, Any]) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process of the corpus ended with {self._process.wait()}"
        return [f"{record['verdict']}: {record['cause']}: {record['seen']}" for record in json.loads(answer)]


@pytest.fixture(scope="session")
def corpus() -> Iterator[Corpus]:
    command = [sys.executable, "-m", "tests.hostile.cases"]
    with subprocess.Popen(
        command,
        env=script_environment(),
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Corpus(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
