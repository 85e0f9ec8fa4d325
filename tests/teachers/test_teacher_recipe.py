"""A teacher's layer: aligned with the base rows, the same bytes however it is built, errors that name a sample."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.cache_files import chunk_path
from tests.helpers.layer_recipes import flip
from tests.helpers.processes import PythonProcess
from tests.teachers.own_teachers import (
    ASKED,
    LOADED,
    SENTENCES,
    Heavy,
    Hidden,
    Letters,
    Noisy,
    Overflowing,
    Ramp,
    Twice,
    Wrong,
    chunks_of,
    prompt_cache,
    ramp,
)

import forebay as fb
from forebay.cache.reports import Progress
from forebay.columns import Columns
from forebay.errors import BuildStopped, EngineUnusable, LibraryMissing, ModelUnusable, RecipeInvalid, RecipeMismatch
from forebay.kinds import reopen_recipe
from forebay.teachers import BUCKETS, Clip, GeometricSol, Latents, Lune, Teacher, TeacherRecipe, unload
from forebay.teachers.protocol import hashes
from forebay.teachers.teacher_samples import Prompts


@pytest.fixture(autouse=True)
def _begin_anew() -> Iterator[None]:
    ASKED.clear()
    LOADED.clear()
    yield
    assert unload() == (), "a build has left its teacher loaded"


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> list[Columns]:
    """Rows as a build gives them to a recipe."""
    cache = fb.open_cache(prompt_cache(tmp_path_factory.mktemp("chunks")))
    found = list(cache.chunks(["id", "data"]))
    assert len(found) > 2
    return found


def made_of(recipe: TeacherRecipe, chunks: list[Columns]) -> list[dict[str, bytes]]:
    """The bytes of every column of these chunks, made one after the other by a teacher that was just loaded."""
    made = [recipe.make(rows).columns for rows in chunks]
    recipe.release()
    return [{name: getattr(values, "values", values).tobytes() for name, values in one.items()} for one in made]


def test_a_teacher_of_ones_own_adds_a_layer(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    recipe = TeacherRecipe(teacher=Ramp(), buckets=(0.1, 0.6, 0.7), stored="float32", batch_size=2)
    report = fb.build(root, None, recipe)
    assert (report.layer, report.rows, report.failures) == ("ramp", 10, 0)
    cache = fb.open_cache(root)
    stored = cache.read(range(10), ["ramp"])
    assert stored["ramp.present"].all()
    for bucket, moment in enumerate((0.1, 0.6, 0.7)):
        expected = ramp([len(one) for one in SENTENCES], np.full(10, moment))
        assert np.allclose(stored["ramp"][:, bucket], expected)
    assert LOADED == ["ramp"]
    assert any("'ramp' was loaded" in note for note in report.notes)


@pytest.mark.parametrize("together", [False, True])
def test_every_forward_has_the_same_number_of_samples(chunks: list[Columns], together: bool) -> None:
    made_of(TeacherRecipe(teacher=Ramp(), buckets=(0.1, 0.6), batch_size=3, batch_timesteps=together), chunks)
    assert {len(batch) for batch in ASKED} == {6 if together else 3}
    assert {tuple(batch.t.tolist()) for batch in ASKED} == (
        {tuple(np.float32([0.1, 0.6] * 3).tolist())}
        if together
        else {tuple(np.float32([t] * 3).tolist()) for t in (0.1, 0.6)}
    )


@pytest.mark.slow
def test_bytes_do_not_depend_on_range_order_or_interruption(tmp_path: Path) -> None:
    whole, parts = prompt_cache(tmp_path / "whole"), prompt_cache(tmp_path / "parts")
    for teacher in (Noisy(), Letters()):
        recipe = TeacherRecipe(teacher=teacher, batch_size=3)
        layer = recipe.default_layer
        fb.build(whole, None, recipe)

        def stop(progress: Progress) -> None:
            if progress.done >= 2:
                raise KeyboardInterrupt

        with pytest.raises(BuildStopped):
            fb.build(parts, None, recipe, start_chunk=1, on_progress=stop)
        made = set(chunks_of(parts, layer))
        assert "000000.safetensors" not in made
        assert fb.build(parts, None, recipe, mode="inverse").built == len(chunks_of(whole, layer)) - len(made) > 0
        assert chunks_of(whole, layer) == chunks_of(parts, layer)


@pytest.mark.slow
def test_a_layer_of_a_layer_is_repaired_after_it_whatever_their_names(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    fb.build_layers(root, {"z": TeacherRecipe(teacher=Letters()), "a": TeacherRecipe(teacher=Twice())})
    before = {layer: chunks_of(root, layer) for layer in ("z", "a")}
    read = fb.open_cache(root).read(range(10), ["twice"])["twice"]
    assert np.array_equal(read, 2 * fb.open_cache(root).read(range(10), ["letters"])["letters"])
    for layer in before:
        path = chunk_path(root, layer, 1)
        flip(path, path.stat().st_size - 1)
    assert not fb.repair(root).failed
    assert {layer: chunks_of(root, layer) for layer in ("z", "a")} == before


def test_a_layer_of_a_layer_begins_wherever_that_one_has_chunks(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    with pytest.raises(
        RecipeInvalid,
        match=r"(?s)reads the columns 'letters', 'letters_row', which no layer .*build the layer that makes",
    ):
        fb.build(root, None, TeacherRecipe(teacher=Twice()))
    last = fb.build(root, None, TeacherRecipe(teacher=Letters()), start_chunk=2).chunks
    assert last > 1
    assert fb.build(root, None, TeacherRecipe(teacher=Twice()), start_chunk=2).built == last


def test_what_is_complete_is_passed_over_without_its_model(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    recipes = {"a": TeacherRecipe(teacher=Letters()), "b": TeacherRecipe(teacher=Ramp())}
    fb.build_layers(root, recipes)
    assert LOADED == ["letters", "ramp"]
    again = fb.build_layers(root, recipes)
    assert [(report.built, report.notes) for report in again] == [(0, ()), (0, ())]
    assert LOADED == ["letters", "ramp"]


def test_equal_prompts_of_a_chunk_are_stored_once_and_computed_once(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path, chunk_bytes=100)
    fb.build(root, None, TeacherRecipe(teacher=Letters(), batch_size=2, stored="float32"))
    cache = fb.open_cache(root)
    read = cache.read(range(10), ["letters"])["letters"]
    assert np.array_equal(read, [[sentence.count(letter) for letter in "adegortu"] for sentence in SENTENCES])
    assert cache.read([4, 8, 0, 2], ["long"])["long"].tolist() == [False, False, False, False]
    stored = sum(len(np.unique(chunk["letters_row"])) for chunk in cache.chunks(["letters_row"]))
    assert stored < 10
    prompts = [prompt for batch in ASKED for prompt in dict.fromkeys(batch.prompts)]
    assert len(prompts) - 1 == stored, "one before the first chunk, then those of each chunk"
    statistics = {layer.layer: layer.statistics for layer in fb.info(root).layers}
    assert statistics["letters"] == {"prompts": 10, "distinct_prompts": stored}


@pytest.mark.parametrize("teacher", [Letters(), Letters(seats=0.25), Hidden(loud="red cat")])
def test_bytes_do_not_depend_on_the_order_of_chunks(chunks: list[Columns], teacher: Teacher) -> None:
    recipe = TeacherRecipe(teacher=teacher, batch_size=3)
    assert made_of(recipe, chunks) == made_of(recipe, chunks[::-1])[::-1]


def test_a_sample_without_a_prompt_is_absent_and_recorded(tmp_path: Path) -> None:
    lines = tuple(json.dumps({"caption": one} if one != "hill" else {"title": one}) for one in SENTENCES)
    root = prompt_cache(tmp_path, (*lines, "no json"), chunk_bytes=100)
    assert Prompts("data").of(np.frombuffer(b"\xff\xfe", np.uint8)) is None
    report = fb.build(root, None, TeacherRecipe(teacher=Letters(), prompt_key="caption"))
    assert report.failures == 2
    present = fb.open_cache(root).read(range(11), ["letters.present"])["letters.present"]
    assert np.flatnonzero(~present).tolist() == [7, 10]
    assert {layer.layer: layer.reasons for layer in fb.status(root).layers}["letters"] == {"no-prompt": 2}
    read = fb.open_cache(root).read([6, 7], ["letters"])["letters"]
    assert np.isnan(read).all(axis=1).tolist() == [False, True]


def test_a_key_that_no_row_has_is_told_with_the_build(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path, tuple(json.dumps({"caption": one}) for one in SENTENCES), chunk_bytes=100)
    report = fb.build(root, None, TeacherRecipe(teacher=Letters(), prompt_key="captoin"))
    assert any("no text in 'captoin' of 'data'; are prompt_column and prompt_key right?" in one for one in report.notes)


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (
            Wrong(how="shape"),
            r"returned 'wrong' of shape \(8, 3\) for sample 'prompts.txt.*'; it declares the shape \(8, 2\)",
        ),
        (Wrong(how="raise"), r"'wrong' raised ZeroDivisionError on sample 'prompts.txt.*': "),
        (Wrong(how="name"), "returned no 'wrong' for sample 'prompts.txt.*'; it declares the shape"),
    ],
)
def test_what_a_teacher_does_wrong_is_an_error_that_names_the_sample(
    chunks: list[Columns], teacher: object, said: str
) -> None:
    recipe = TeacherRecipe(teacher=teacher, buckets=(0.1, 0.6, 0.7), batch_timesteps=True)
    with pytest.raises(fb.errors.ForebayError, match=said):
        made_of(recipe, chunks)
    unload()


def test_a_sample_whose_numbers_are_not_finite_is_an_absent_row_with_a_reason(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path, chunk_bytes=60)
    own = TeacherRecipe(teacher=Ramp(ends="house"), buckets=(0.1, 0.6, 0.7), batch_timesteps=True)
    bad = [row for row, sentence in enumerate(SENTENCES) if sentence.endswith("house")]
    assert bad
    report = fb.build(root, None, own)
    assert report.failures == len(bad)
    read = fb.open_cache(root).read(range(len(SENTENCES)), ["ramp", "ramp.present"])
    assert np.flatnonzero(~read["ramp.present"]).tolist() == bad
    assert np.flatnonzero(~np.isfinite(read["ramp"]).all(axis=(1, 2))).tolist() == bad
    failed = fb.status(root, failures=None).failed_samples
    assert {failure.reason for failure in failed} == {"not-finite"}
    assert all("NaN or infinity in 'ramp' at t = 0.7, as float16" in failure.detail for failure in failed)
    assert fb.verify(root, full=True).sound


def test_a_prompt_whose_numbers_are_not_finite_leaves_all_its_rows_absent(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path, chunk_bytes=400)
    fb.build(root, None, TeacherRecipe(teacher=Overflowing(word="house")))
    bad = [row for row, sentence in enumerate(SENTENCES) if "house" in sentence]
    assert len(bad) > 1  # the same prompt twice
    cache = fb.open_cache(root)
    every = cache.read(range(len(SENTENCES)), ["overflowing.present"])["overflowing.present"]
    assert np.flatnonzero(~every).tolist() == bad
    good = [row for row in range(len(SENTENCES)) if row not in bad]
    assert cache.read(good, ["overflowing"])["overflowing"].tolist() == [[float(len(SENTENCES[row]))] for row in good]
    assert fb.verify(root, full=True).sound


def test_a_chunk_of_too_many_rows_is_told_before_anything_is_asked(chunks: list[Columns]) -> None:
    recipe = TeacherRecipe(teacher=Ramp(width=1_000_000_000))
    with pytest.raises(RecipeInvalid, match=r"(?s)a chunk of \d rows takes .* build the base layer again in chunks of"):
        recipe.make(chunks[0])
    assert ASKED == []


def test_a_batch_that_memory_does_not_hold_is_halved_before_the_first_chunk_and_kept(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    recipe = TeacherRecipe(teacher=Letters(most=3), batch_size=8)
    report = fb.build(root, None, recipe, end_chunk=1)
    assert any("batch_size is 2, not 8" in note for note in report.notes)
    kept = fb.open_cache(root).recipe("letters").fields
    assert (kept["batch_size"], kept["requested_batch_size"]) == (2, 8)
    assert {len(batch) for batch in ASKED} == {2}
    fb.build(root, None, recipe)
    fb.build(root, None, TeacherRecipe(teacher=Letters(most=3), batch_size=2))
    with pytest.raises(RecipeMismatch, match="batch_size"):
        fb.build(root, None, TeacherRecipe(teacher=Letters(most=3), batch_size=4))


IN_LITTLE_MEMORY = """
import sys
from tests.teachers.own_teachers import Heavy
import forebay as fb
from forebay.teachers import TeacherRecipe
from forebay.teachers.batched_forward import peak_bytes, resolved_device

resolved_device("auto")  # imports torch, which takes more than the batches
heavy = Heavy(sample_bytes=64 << 20, load_bytes=192 << 20)  # what loading takes for a moment halves no batch
# A batch of one takes 64 MiB, one of two 128; modules that are imported later take up to 10.
recipe = TeacherRecipe(teacher=heavy, batch_size=4, memory_limit=peak_bytes() + (100 << 20))
print(*fb.build(sys.argv[1], None, recipe).notes)
"""


def test_a_batch_fits_the_memory_limit(tmp_path: Path) -> None:
    """In another process: one that ran other tests has memory that it takes again, or keeps what was freed."""
    root = prompt_cache(tmp_path)
    process = PythonProcess("-c", IN_LITTLE_MEMORY, str(root))
    notes, errors = process.communicate()
    assert process.returncode == 0, errors
    assert fb.open_cache(root).recipe("heavy").fields["batch_size"] == 1
    assert "to fit in memory" in notes
    with pytest.raises(EngineUnusable):
        fb.build(root, None, TeacherRecipe(teacher=Heavy(sample_bytes=1), memory_limit=1 << 20), layer="small")


def test_what_changes_bytes_changes_the_fingerprint_and_what_does_not_does_not() -> None:
    one = TeacherRecipe(teacher=Ramp())
    same = (TeacherRecipe(teacher=Ramp(), device="cuda:1", memory_limit=7),)
    others = (
        TeacherRecipe(teacher=Ramp(width=7)),
        TeacherRecipe(teacher=Ramp(), buckets=(0.1, 0.2)),
        TeacherRecipe(teacher=Ramp(), batch_size=4),
        TeacherRecipe(teacher=Ramp(), batch_timesteps=True),
        TeacherRecipe(teacher=Ramp(), dtype="bfloat16"),
        TeacherRecipe(teacher=Ramp(), stored="float32"),
        TeacherRecipe(teacher=Ramp(), seed=1),
        TeacherRecipe(teacher=Noisy()),
    )
    assert {fb.fingerprint(recipe) for recipe in same} == {fb.fingerprint(one)}
    assert len({fb.fingerprint(recipe) for recipe in (one, *others)}) == 1 + len(others)


def test_a_recipe_reads_back_from_its_cache(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    recipe = TeacherRecipe(teacher=Ramp(width=3), buckets=(0.25, 0.5))
    fb.build(root, None, recipe)
    assert reopen_recipe(fb.open_cache(root).recipe("ramp")) == recipe


def test_a_teacher_that_nobody_gave_is_never_imported(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match=r"no teacher of kind 'os.system' is installed"):
        TeacherRecipe(teacher={"kind": "os.system"})
    with pytest.raises(RecipeInvalid, match="teacher must be a teacher"):
        TeacherRecipe(teacher="lune")
    with pytest.raises(RecipeInvalid, match="field of the wrong type"):
        TeacherRecipe(teacher={"kind": "lune", "unet": 3})


@pytest.mark.parametrize(
    "fields",
    [{"batch_size": 0}, {"stored": "int8"}, {"stored": "half"}, {"dtype": "fp16"}, {"buckets": ["a"]}, {"buckets": 3}],
)
def test_fields_that_mean_nothing_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RecipeInvalid):
        TeacherRecipe(teacher=GeometricSol(), **fields)


@pytest.mark.parametrize(
    "teacher",
    [
        Lune(unet="x", noise="Noised"),
        Lune(unet="x", time_direction="t1_noise"),
        Latents(vae="x", sample="random"),
        Clip(model="x", keeps=("pooled", "stats")),
        Wrong(how="other"),
    ],
)
def test_a_word_that_a_teacher_does_not_know_does_not_pass_for_another(teacher: Teacher) -> None:
    with pytest.raises(RecipeInvalid, match="field of the wrong type: Invalid enum value"):
        TeacherRecipe(teacher=teacher)


def test_what_a_teacher_does_not_use_is_no_part_of_its_identity() -> None:
    pairs = (
        (GeometricSol(), {"batch_size": 2, "dtype": "float16", "stored": "bfloat16", "seed": 4, "prompt_key": "a"}),
        (Heavy(sample_bytes=1), {"buckets": (0.1, 0.2), "batch_timesteps": True, "prompt_column": "metadata"}),
        (Ramp(), {"requested_batch_size": 64, "prompt_key": "caption", "buckets": list(BUCKETS)}),
    )
    for teacher, fields in pairs:
        assert fb.fingerprint(TeacherRecipe(teacher=teacher)) == fb.fingerprint(
            TeacherRecipe(teacher=teacher, **fields)
        )


def test_noise_policy_and_time_direction_are_part_of_a_teacher(tmp_path: Path) -> None:
    config = {"block_out_channels": [8, 16], "in_channels": 4, "sample_size": 8}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "diffusion_pytorch_model.safetensors").write_bytes(b"weights")
    one = str(tmp_path / "one")
    teachers = (
        Lune(unet=one),
        Lune(unet=one, noise="noised"),
        Lune(unet=one, noise="noised", time_direction="t0_data"),
    )
    marks = [fb.fingerprint(TeacherRecipe(teacher=teacher)) for teacher in teachers]
    assert len(set(marks)) == 3
    moved = fb.fingerprint(TeacherRecipe(teacher=Lune(unet=str(tmp_path / "two"))))
    assert moved == marks[0]
    (tmp_path / "two/diffusion_pytorch_model.safetensors").write_bytes(b"weight!")
    assert fb.fingerprint(TeacherRecipe(teacher=Lune(unet=str(tmp_path / "two")))) != marks[0]


def test_every_file_of_weights_that_a_library_may_choose_is_part_of_a_teacher(tmp_path: Path) -> None:
    """A folder may hold whole weights and shards, under the names of either library."""
    (tmp_path / "config.json").write_text("{}")
    names = ("model.safetensors", "diffusion_pytorch_model.safetensors", "part-1.safetensors")
    for name in names:
        (tmp_path / name).write_bytes(b"weights")
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    assert set(hashes("m", str(tmp_path))) == {f"m/{name}" for name in (*names, index.name, "config.json")}
    index.write_text("{}")
    with pytest.raises(ModelUnusable, match="names no weights\nhint: save the model again"):
        hashes("m", str(tmp_path))
