"""The example as people run it: it learns; killed and run again it is as if nothing happened; it follows a growth."""

import random
import re
import runpy
import shutil
import signal
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pytest
from tests.helpers.byte_tokens import VOCABULARY, ByteTokens
from tests.helpers.processes import REPOSITORY, PythonProcess

import forebay as fb

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "examples" / "train_gpt.py"
STEP = re.compile(r"^step (\d+) epoch (\d+) batch (\w+) rate (\S+) loss (\S+)$", re.MULTILINE)
SAVED_EVERY, KILLED_AT = 5, 13


class Step(NamedTuple):
    number: int
    epoch: int
    batch: str
    rate: float
    loss: float


class Runs(NamedTuple):
    """What was printed by a run that nothing happened to, by one that was killed, by two that went on from it, and by
    one that gave the first run another epoch."""

    whole: str
    killed: str
    resumed: str
    resumed_after_growth: str
    one_more_epoch: str


def write_sentences(path: Path, count: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed).choice
    animals, verbs = ("the cat", "a dog", "the old owl", "some mouse"), ("sees", "follows", "hears", "likes")
    path.write_text("".join(f"{draw(animals)} {draw(verbs)} {draw(animals)}\n" for _ in range(count)))


def training(folder: Path, checkpoint: Path, epochs: int = 2, *options: str) -> list[str]:
    """The command that trains."""
    sizes = ["--vocabulary", str(VOCABULARY), "--dim", "32", "--heads", "2", "--layers", "1", "--learning-rate", "1e-2"]
    where = [str(folder / "cache"), "--checkpoint", str(checkpoint), "--save-every", str(SAVED_EVERY)]
    shapes = ["--micro-batches", "2", "--max-documents", "64"]
    return [str(EXAMPLE), *where, *sizes, *shapes, "--epochs", str(epochs), "--train-fraction", "0.8", *options]


def start_training(folder: Path, checkpoint: Path, epochs: int = 2) -> PythonProcess:
    return PythonProcess(*training(folder, checkpoint, epochs))


def printed_until_killed(process: PythonProcess) -> str:
    """Kill it, with no warning, once it has printed a certain step."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {KILLED_AT} "):
            process.send_signal(signal.SIGKILL)
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == -signal.SIGKILL, errors
    return "".join(lines)


def printed_to_the_end(process: PythonProcess) -> str:
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return out


def grown_copy(folder: Path, copy: Path) -> Path:
    """The same cache, source and checkpoint elsewhere, with half as much appended."""
    shutil.copytree(folder, copy)
    write_sentences(copy / "raw" / "b.txt", 350, seed=2)
    fb.update(copy / "cache", fb.sources.lines(copy / "raw"), recipe=ByteTokens(), workers=0)
    return copy


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("gpt") / "small"
    write_sentences(folder / "raw" / "a.txt", 700, seed=1)
    fb.build(folder / "cache", fb.sources.lines(folder / "raw"), ByteTokens(), workers=0)
    whole = start_training(folder, folder.with_name("whole.pt"))
    killed = printed_until_killed(start_training(folder, folder / "killed.pt"))
    larger = grown_copy(folder, folder.with_name("larger"))
    resumed = start_training(folder, folder / "killed.pt")
    grown = start_training(larger, larger / "killed.pt")
    printed = [printed_to_the_end(process) for process in (whole, resumed, grown)]
    more = printed_to_the_end(start_training(folder, folder.with_name("whole.pt"), epochs=3))
    return Runs(printed[0], killed, printed[1], printed[2], more)


def steps(printed: str) -> list[Step]:
    found = STEP.findall(printed)
    return [Step(int(step), int(epoch), batch, float(rate), float(loss)) for step, epoch, batch, rate, loss in found]


def test_the_loss_falls_on_rows_seen_and_not_seen(runs: Runs) -> None:
    losses = [step.loss for step in steps(runs.whole)]
    assert len(losses) > 2 * KILLED_AT
    assert mean(losses[-5:]) < 0.5 * mean(losses[:5])
    first, second = (float(loss) for loss in re.findall(r"validation (\S+)", runs.whole))
    assert second < first < losses[0]


def test_a_killed_run_goes_on_with_the_batches_and_losses_it_would_have_had(runs: Runs) -> None:
    whole = steps(runs.whole)
    assert steps(runs.killed) == whole[: len(steps(runs.killed))]
    assert steps(runs.resumed)[0].number == KILLED_AT // SAVED_EVERY * SAVED_EVERY + 1
    assert steps(runs.resumed) == whole[KILLED_AT // SAVED_EVERY * SAVED_EVERY :]


def test_after_a_growth_the_epoch_ends_as_it_began_and_the_next_one_has_all_rows(runs: Runs) -> None:
    whole, grown = steps(runs.whole), steps(runs.resumed_after_growth)
    assert "the cache has grown: " in runs.resumed_after_growth
    first_epoch = [step.batch for step in whole if step.epoch == 0]
    assert [step.batch for step in grown if step.epoch == 0] == first_epoch[grown[0].number - 1 :]
    second_epoch = [step.batch for step in grown if step.epoch == 1]
    assert len(second_epoch) > len(first_epoch)
    assert len(set(second_epoch)) == len(second_epoch)


def test_the_learning_rate_does_not_jump_at_a_growth(runs: Runs) -> None:
    before = steps(runs.killed)[KILLED_AT // SAVED_EVERY * SAVED_EVERY - 1].rate
    rates = [before, *(step.rate for step in steps(runs.resumed_after_growth))]
    peak = max(rates)
    assert max(abs(after - rate) for rate, after in pairwise(rates)) < peak / 10


def test_one_more_epoch_continues_with_the_rates_of_a_longer_run(runs: Runs) -> None:
    ended, more = steps(runs.whole), steps(runs.one_more_epoch)
    assert (more[0].number, {step.epoch for step in more}) == (ended[-1].number + 1, {2})
    peak = max(step.rate for step in ended)
    rates = [step.rate for step in more[1:]]  # the first step has the rate that the checkpoint holds
    assert 2 * ended[-1].rate < rates[0] < peak / 2, "a run of three epochs has not decayed as far by then"
    assert rates == sorted(rates, reverse=True)


@pytest.mark.filterwarnings("ignore:the train side of:UserWarning")  # of so small a cache
@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (["--vocabulary", "10"], r"^the cache has the token id \d+; run with --vocabulary \d+ or more$"),
        (["--batch", "5000"], r"^\d+ rows to train on fill no batch of 5000; run with a smaller --batch$"),
    ],
)
def test_options_that_do_not_fit_the_cache_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str], problem: str
) -> None:
    write_sentences(tmp_path / "raw" / "a.txt", 200, seed=1)
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "raw"), ByteTokens(), workers=0)
    monkeypatch.setattr(sys, "argv", training(tmp_path, tmp_path / "gpt.pt", 2, *option))
    with pytest.raises(SystemExit, match=problem):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
