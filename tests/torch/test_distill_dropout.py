"""Teacher dropout is a function of (seed, step, sample, teacher)."""

import numpy as np
import pytest
import torch

from forebay.torch.distill import TeacherDropout, TeacherRows

SAMPLES = np.arange(20_000)


def kept(rate: float = 0.1, seed: int = 0, teacher: str = "lune", step: int = 5, dataset: object = 0) -> np.ndarray:
    return TeacherDropout(rate, seed).keep(teacher, step, SAMPLES, dataset).numpy()


def test_a_tenth_of_the_samples_learns_without_the_teacher() -> None:
    # 20,000 draws: a share within five standard deviations.
    assert np.mean(kept()) == pytest.approx(0.9, abs=5 * (0.09 / len(SAMPLES)) ** 0.5)
    assert kept(rate=0).all()
    assert not kept(rate=1).any()
    with pytest.raises(ValueError, match=r"rate must be from 0 to 1 \(got 1\.5\)"):
        TeacherDropout(rate=1.5)


def test_order_and_company_do_not_matter() -> None:
    order = np.random.default_rng(0).permutation(len(SAMPLES))[:100]
    alone = [TeacherDropout().keep("lune", 5, [sample]).item() for sample in order]
    assert alone == kept()[order].tolist()


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"step": 6}, {"teacher": "sol"}, {"dataset": 1}], ids=lambda other: next(iter(other))
)
def test_another_seed_step_teacher_or_data_set_drops_others_independently(other: dict[str, object]) -> None:
    together = np.mean(~kept() & ~kept(**other))  # type: ignore[arg-type]
    assert together == pytest.approx(0.01, abs=5 * (0.0099 / len(SAMPLES)) ** 0.5)


def test_samples_of_several_data_sets_have_their_own_coins_in_one_batch() -> None:
    datasets = SAMPLES % 3
    mixed = kept(dataset=datasets)
    for dataset in range(3):
        here = datasets == dataset
        assert (mixed[here] == kept(dataset=dataset)[here]).all()


def test_row_ids_beyond_32_bits_are_samples_too() -> None:
    far = (SAMPLES.astype(np.uint64) << np.uint64(32)) | np.uint64(7)
    assert (TeacherDropout().keep("lune", 5, far).numpy() != kept()).mean() == pytest.approx(0.18, abs=0.02)


def test_dropped_rows_are_absent_and_the_rest_as_it_was() -> None:
    rows = TeacherRows(torch.arange(6.0).view(3, 2), torch.tensor([True, True, False]))
    dropped = rows.where(torch.tensor([False, True, True]))
    assert dropped.present.tolist() == [False, True, False]
    assert dropped.filled(torch.full((3, 2), -1.0)).tolist() == [[-1, -1], [2, 3], [-1, -1]]
    with pytest.raises(ValueError, match=r"present must be bool \(3,\)"):
        TeacherRows(torch.zeros(3, 2), torch.ones(2, dtype=torch.bool))
