"""Other processes, as a test has them: forked from it, or started afresh."""

import multiprocessing
from typing import Any

FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")


def run(context: Any, target: Any, *arguments: object) -> None:
    """Call something in a process of its own; whatever goes wrong there is wrong here."""
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0
