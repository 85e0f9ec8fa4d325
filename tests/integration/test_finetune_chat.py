"""The example as people run it: it learns to answer, and proves that nothing else was trained."""

from tests.helpers.processes import REPOSITORY, PythonProcess


def test_the_example_learns_to_answer_and_trains_nothing_else() -> None:
    run = PythonProcess(str(REPOSITORY / "examples" / "finetune_chat.py"))
    out, errors = run.communicate()
    assert run.returncode == 0, errors
    assert "and no other logit has a gradient" in out
    for answer in ("apple<|im_end|>", "lemon<|im_end|>", "pear<|im_end|>", "plum<|im_end|>"):
        assert answer in out
