"""Teacher caches of the old format: imported bit for bit, and nothing else is ever unpickled."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.cache_files import chunk_path

import forebay as fb
from forebay.compat.pt_import import OldCacheSource, import_pt_cache
from forebay.compat.tinyflux import DatasetCache
from forebay.errors import SourceInvalid

ROWS = 7
BUCKETS = torch.linspace(0.05, 0.95, 10)


def old_cache(rows: int = ROWS, dtype: torch.dtype = torch.float16) -> dict[str, object]:
    """As the document saves it, with smaller shapes."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=generator).to(dtype)

    return {
        "name": "portraits",
        "encodings": {"latents": drawn(4, 8, 8), "t5_embeds": drawn(6, 12), "clip_pooled": drawn(12)},
        "lune": {"features": drawn(10, 16), "t_buckets": BUCKETS},
        "sol": {"stats": drawn(10, 4).abs(), "spatial": drawn(10, 8, 8).abs(), "t_buckets": BUCKETS},
    }


class Bomb:
    """What a pickle may do to whoever loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_tensor_of_an_old_cache_is_there_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    old = old_cache(dtype=dtype)
    torch.save(old, tmp_path / "cache.pt")
    report = import_pt_cache(tmp_path / "cache.pt", tmp_path / "cache")
    assert report.rows == ROWS
    assert list(report.layers) == ["latents", "t5", "clip", "lune", "sol"]
    assert fb.verify(tmp_path / "cache", full=True).sound
    data = DatasetCache.load(tmp_path / "cache")
    rows = torch.tensor([3, 0, 6])
    assert data.encodings is not None
    assert data.lune is not None
    assert data.sol is not None
    for name, tensor in old["encodings"].items():  # type: ignore[attr-defined]
        assert torch.equal(getattr(data.encodings, name)[rows], tensor[rows])
    assert torch.equal(data.lune.features[rows], old["lune"]["features"][rows])  # type: ignore[index]
    assert torch.equal(data.sol.stats[rows], old["sol"]["stats"][rows])  # type: ignore[index]
    assert torch.equal(data.sol.spatial[rows], old["sol"]["spatial"][rows])  # type: ignore[index]
    assert torch.allclose(data.lune.t_buckets, BUCKETS, atol=0, rtol=1.2e-7)  # to one step of float32
    assert data.lune.features.shape == (ROWS, 10, 16)
    for bucket in range(10):
        stored = old["lune"]["features"][rows, bucket].float()  # type: ignore[index]
        for moment in (BUCKETS[bucket], fb.teachers.BUCKETS[bucket], BUCKETS[bucket].half()):
            assert torch.equal(data.lune.get(rows, moment), stored)


def test_importing_again_makes_nothing_and_another_old_cache_is_refused(tmp_path: Path) -> None:
    torch.save(old_cache(), tmp_path / "cache.pt")
    import_pt_cache(tmp_path / "cache.pt", tmp_path / "cache")
    again = import_pt_cache(tmp_path / "cache.pt", tmp_path / "cache")
    assert {report.built for report in again.layers.values()} == {0}
    changed = old_cache()
    changed["lune"]["features"] += 1  # type: ignore[index]
    torch.save(changed, tmp_path / "other.pt")
    with pytest.raises(fb.errors.ForebayError):
        import_pt_cache(tmp_path / "other.pt", tmp_path / "cache")


def test_alignment_is_that_of_the_document_for_imported_layers_too(tmp_path: Path) -> None:
    old = old_cache(dtype=torch.float32)
    old["sol"]["spatial"] /= old["sol"]["spatial"].sum(dim=(2, 3), keepdim=True)  # type: ignore[index, operator]
    torch.save(old, tmp_path / "cache.pt")
    import_pt_cache(tmp_path / "cache.pt", tmp_path / "cache")
    found = {each.layer: each for each in fb.teachers.check_alignment(fb.open_cache(tmp_path / "cache")).layers}
    assert list(found) == ["clip", "latents", "lune", "sol", "t5"]
    assert found["lune"].columns == {"lune": (10, 16)}
    assert found["lune"].usual_buckets
    assert not found["lune"].problems
    assert "does not record its teacher" in found["lune"].notes[0]
    # Statistics of this old cache are drawn without a bound; its maps sum to 1.
    assert [problem for problem in found["sol"].problems if "must be from 0 to 1" in problem]
    assert not [problem for problem in found["sol"].problems if "sol_spatial" in problem]


def test_a_lost_chunk_is_made_again_from_the_old_cache(tmp_path: Path) -> None:
    torch.save(old_cache(), tmp_path / "cache.pt")
    import_pt_cache(tmp_path / "cache.pt", tmp_path / "cache")
    chunk = chunk_path(tmp_path / "cache", "lune", 0)
    before = chunk.read_bytes()
    chunk.unlink()
    assert not fb.repair(tmp_path / "cache", workers=0).failed
    assert chunk.read_bytes() == before


def test_rows_without_a_teachers_word_are_absent_and_told(tmp_path: Path) -> None:
    old = old_cache()
    features = old["lune"]["features"]  # type: ignore[index]
    features[2, 4] = 0  # where the old builder's hook had not fired
    features[5, 1, 3] = torch.nan
    for name in ("stats", "spatial"):
        old["sol"][name][6] = torch.inf  # type: ignore[index]
    torch.save(old, tmp_path / "cache.pt")
    import_pt_cache(tmp_path / "cache.pt", tmp_path / "cache")
    data = DatasetCache.load(tmp_path / "cache")
    assert data.lune is not None
    values = data.lune.get(torch.arange(ROWS), 0.5)
    assert values[[2, 5]].isnan().all()
    assert values[[0, 1, 3, 4, 6]].isfinite().all()
    one_bucket = data.lune.features[torch.tensor([2, 3]), torch.tensor([4, 4])]  # as the document gathers
    assert one_bucket[0].isnan().all()
    assert torch.equal(one_bucket[1], features[3, 4])
    failed = [(each.sample, each.reason) for each in fb.status(tmp_path / "cache").failed_samples]
    assert sorted(failed) == [("2", "all-zero"), ("5", "not-finite"), ("6", "not-finite")]  # each row once


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    torch.save({**old_cache(), "name": Bomb(tmp_path / "owned")}, tmp_path / "cache.pt")
    torch.save({"name": bytearray(b"x")}, tmp_path / "other.pt", pickle_protocol=5)
    for name in ("cache.pt", "other.pt"):
        for load in (lambda path: import_pt_cache(path, tmp_path / "cache"), DatasetCache.load):
            with pytest.raises(SourceInvalid, match="holds more than tensors") as raised:
                load(tmp_path / name)
            assert "weights_only" not in str(raised.value), "torch advises to open the file anyway"
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda old: old.pop("encodings") and old.pop("lune") and old.pop("sol"),
            "no rows of any of encodings, lune, sol",
        ),
        (lambda old: old.update(extra=1), r"it has the unknown entries \['extra'\]"),
        (lambda old: old["lune"].pop("t_buckets"), r"'lune' holds \['features'\]"),
        (lambda old: old["lune"].update(features=old["lune"]["features"][:3]), "different numbers of rows"),
        (lambda old: old["sol"].update(t_buckets=BUCKETS.flip(0)), "does not rise"),
        (lambda old: old["sol"].update(stats=old["sol"]["stats"][:, :9]), "second axis is not the 10 buckets"),
        (lambda old: old["sol"].update(t_buckets=1000 * BUCKETS), "between 0 and 1"),
        (lambda old: old["lune"].update(features=torch.randn(7, 1, 4), t_buckets=torch.tensor([torch.nan])), "between"),
        (lambda old: old["lune"].update({3: 1}), r"'lune' holds \['3', 'features', 't_buckets'\]"),
        (lambda old: old["lune"].update(features=old["lune"]["features"].to_sparse()), "not a dense tensor"),
        (lambda old: old["encodings"].update(latents=[1, 2]), "'encodings.latents' is not a dense tensor of floats"),
    ],
)
def test_what_is_not_of_the_format_is_named(tmp_path: Path, spoil: object, problem: str) -> None:
    old = old_cache()
    spoil(old)  # type: ignore[operator]
    torch.save(old, tmp_path / "cache.pt")
    with pytest.raises(SourceInvalid, match=problem):
        import_pt_cache(tmp_path / "cache.pt", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_files_that_are_no_old_cache_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("not a pickle")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(old_cache(), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    for name, problem in (
        ("text", r"not a file of torch\.save"),
        ("legacy", "can be saved again"),
        ("list", "a list, not a dict"),
    ):
        with pytest.raises(SourceInvalid, match=problem):
            import_pt_cache(tmp_path / f"{name}.pt", tmp_path / "cache")
    with pytest.raises(SourceInvalid):
        import_pt_cache(tmp_path / "plain.pt", tmp_path / "cache")
    empty = {"features": torch.empty(0, 10, 4), "t_buckets": BUCKETS}
    torch.save({"lune": empty}, tmp_path / "empty.pt")
    with pytest.raises(SourceInvalid, match="no rows"):
        import_pt_cache(tmp_path / "empty.pt", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    with pytest.raises(fb.errors.SourceNotFound, match="no such file"):
        import_pt_cache(tmp_path / "gone.pt", tmp_path / "cache")


def test_a_file_of_the_document_is_loaded_by_its_name(tmp_path: Path) -> None:
    old = old_cache()
    torch.save(old, tmp_path / "cache.pt")
    before = sorted(tmp_path.iterdir())
    data = DatasetCache.load(tmp_path / "cache.pt")
    assert sorted(tmp_path.iterdir()) == before  # nothing is written next to it
    assert data.name == "portraits"
    assert data.lune is not None
    assert torch.equal(data.lune.features[[5, 2]], old["lune"]["features"][[5, 2]])  # type: ignore[index]
    data.save(tmp_path / "saved")
    assert DatasetCache.load(tmp_path / "saved").name == "saved"
    assert DatasetCache.load(tmp_path / "saved", name="renamed").name == "renamed"
    assert fb.verify(tmp_path / "saved").sound


def test_an_import_records_the_time_direction(tmp_path: Path) -> None:
    torch.save(old_cache(), tmp_path / "cache.pt")
    import_pt_cache(tmp_path / "cache.pt", tmp_path / "noise")
    import_pt_cache(tmp_path / "cache.pt", tmp_path / "data", time_direction="t0_data")
    noise, data = (fb.open_cache(tmp_path / name) for name in ("noise", "data"))
    assert fb.teachers.features(noise, "lune").time_direction == "t0_noise"
    forward = fb.teachers.features(noise, "lune").at([0, 1], 0.35)["lune"]
    backward = fb.teachers.features(data, "lune").at([0, 1], 0.65, direction="t0_noise")["lune"]
    assert np.array_equal(forward, backward)


def test_an_import_reads_chunk_by_chunk(tmp_path: Path) -> None:
    torch.save({"lune": old_cache(rows=1200)["lune"]}, tmp_path / "cache.pt")
    source = OldCacheSource(str(tmp_path / "cache.pt"))
    report = import_pt_cache(tmp_path / "cache.pt", tmp_path / "cache")
    assert {each.chunks for each in report.layers.values()} == {3}
    assert source.weight(source.files()[0]) == 1200


def test_encodings_that_are_absent_are_not_zeros(tmp_path: Path) -> None:
    old = old_cache()
    old["encodings"]["clip_pooled"][4] = torch.inf  # type: ignore[index]
    torch.save(old, tmp_path / "cache.pt")
    import_pt_cache(tmp_path / "cache.pt", tmp_path / "cache")
    encodings = DatasetCache.load(tmp_path / "cache").encodings
    assert encodings is not None
    pooled = encodings.clip_pooled[[3, 4]]
    assert pooled[0].isfinite().all()
    assert pooled[1].isnan().all()
