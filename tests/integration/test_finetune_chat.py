"""The example as people run it: it learns to answer, and proves that nothing else was trained."""

import subprocess
import sys

from tests.builders import REPOSITORY, script_environment


def test_the_example_learns_to_answer_and_trains_nothing_else() -> None:
    command = [sys.executable, str(REPOSITORY / "examples" / "finetune_chat.py")]
    run = subprocess.run(command, env=script_environment(), capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "and no other logit has a gradient" in run.stdout
    for answer in ("apple<|im_end|>", "lemon<|im_end|>", "pear<|im_end|>", "plum<|im_end|>"):
        assert answer in run.stdout
