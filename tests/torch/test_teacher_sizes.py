"""Chunks of the size that teachers make, and states of real tokens only."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli.running import run
from tests.helpers.tiny_models import TinyModels
from tests.torch.taught import prompts_cache
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

import forebay as fb
from forebay.errors import NotFound, RecipeMismatch
from forebay.teachers import T5, Clip, GeometricSol, TeacherRecipe, check_alignment, empty_prompt, estimate_teachers
from forebay.torch import CacheDataset, Loader, Padded, StoredBatch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def t5(models: TinyModels, how: Mapping[str, object] | None = None, **fields: object) -> TeacherRecipe:
    return TeacherRecipe(teacher=T5(model=models.t5, max_length=8, **fields), batch_size=4, **(how or {}))


def test_states_of_real_tokens_only_read_back_as_padded_ones(tiny_models: TinyModels, tmp_path: Path) -> None:
    root = prompts_cache(tmp_path)
    padded, ragged = t5(tiny_models), t5(tiny_models, ragged=True, name="t5r")
    fb.build_layers(root, {"t5": padded, "t5r": ragged})
    cache = fb.open_cache(root, layers=["t5", "t5r"])
    rows = np.arange(len(cache))
    whole = cache.read(rows, ["t5_states"])["t5_states"]
    states = Padded("t5r_states", 8)
    dataset = CacheDataset(cache, columns=[states], collate=StoredBatch(cache, ["t5r_mask"]))
    kept = np.stack([row["t5r_states"].numpy() for row in dataset.__getitems__(rows.tolist())])
    mask = cache.read(rows, ["t5r_mask"])["t5r_mask"]
    assert whole.shape == kept.shape
    assert np.array_equal(mask, cache.read(rows, ["t5_mask"])["t5_mask"])
    assert np.array_equal(whole[mask], kept[mask])
    assert not kept[~mask].any()
    totals = cache.generation.table("t5r").totals()
    assert totals["tokens"] < totals["padded_tokens"]
    figures = next(layer.figures for layer in fb.info(root).layers if layer.layer == "t5r")
    assert figures["tokens_stored"] == f"{totals['tokens'] / totals['padded_tokens']:.1%} of the bytes with padding"
    assert figures["tokens_stored"] in run("info", root).out
    for batch in Loader(cache, global_batch_size=3, columns=[states, "t5r_mask", "row"]):
        assert np.array_equal(batch["t5r_states"], kept[batch["row"]], equal_nan=True)
        assert np.array_equal(batch["t5r_mask"], mask[batch["row"]])


def test_the_empty_prompt_is_encoded_once_for_a_layer(tiny_models: TinyModels, tmp_path: Path) -> None:
    root = prompts_cache(tmp_path)
    recipes = {
        "t5": TeacherRecipe(teacher=T5(model=tiny_models.t5, max_length=8), empty_prompt=True, stored="float32"),
        "t5r": TeacherRecipe(
            teacher=T5(model=tiny_models.t5, max_length=8, ragged=True, name="t5r"), empty_prompt=True
        ),
        "clip": TeacherRecipe(teacher=Clip(model=tiny_models.clip), empty_prompt=True, stored="float32"),
    }
    sizes = {size.column: size for size in estimate_teachers(recipes, 10).columns}
    assert (sizes["clip_states_empty"].row_bytes, sizes["clip_states_empty"].bytes) == (0, 8 * 16 * 4)
    fb.build_layers(root, recipes)
    cache = fb.open_cache(root)
    with torch.inference_mode():
        given = {"padding": "max_length", "max_length": 8, "return_tensors": "pt"}
        ids = AutoTokenizer.from_pretrained(tiny_models.clip)([""], **given)["input_ids"]
        clip = CLIPTextModel.from_pretrained(tiny_models.clip).eval()(input_ids=ids)
        tokens = AutoTokenizer.from_pretrained(tiny_models.t5)([""], **given)
        inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        t5_states = T5EncoderModel.from_pretrained(tiny_models.t5).eval()(**inputs).last_hidden_state[0]
    assert np.allclose(empty_prompt(cache, "clip_states"), clip.last_hidden_state[0], atol=1e-5)
    assert np.allclose(empty_prompt(cache, "clip_pooled"), clip.pooler_output[0], atol=1e-5)
    assert np.allclose(empty_prompt(cache, "t5_states"), t5_states, atol=1e-5)
    assert np.array_equal(empty_prompt(cache, "t5_mask"), tokens["attention_mask"][0].bool())
    real = empty_prompt(cache, "t5r_mask")
    assert np.allclose(empty_prompt(cache, "t5r_states"), t5_states[real], atol=1e-2)
    assert fb.verify(root, full=True).sound
    assert check_alignment(cache).aligned


def test_the_empty_prompt_is_asked_for_and_changes_nothing_where_it_is_not(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    root = prompts_cache(tmp_path)
    plain = TeacherRecipe(teacher=Clip(model=tiny_models.clip))
    fb.build(root, None, plain)
    with pytest.raises(NotFound, match="has no column 'clip_pooled_empty'"):
        _ = empty_prompt(fb.open_cache(root), "clip_pooled")
    with pytest.raises(RecipeMismatch, match="empty_prompt"):
        fb.build(root, None, TeacherRecipe(teacher=Clip(model=tiny_models.clip), empty_prompt=True))
    assert not TeacherRecipe(teacher=GeometricSol(), empty_prompt=True).empty_prompt
    other = TeacherRecipe(teacher=Clip(model=tiny_models.clip, name="other"), empty_prompt=True)
    fb.build(root, None, other)
    assert empty_prompt(fb.open_cache(root), "other_pooled").shape == (16,)


def test_each_option_of_a_prompt_teacher_changes_the_fingerprint(tiny_models: TinyModels) -> None:
    plain = t5(tiny_models)
    assert fb.fingerprint(plain) != fb.fingerprint(t5(tiny_models, ragged=True))
    assert fb.fingerprint(plain) != fb.fingerprint(t5(tiny_models, masked=False))


def test_an_estimate_names_chunks_that_are_too_large(tiny_models: TinyModels, tmp_path: Path) -> None:
    recipes = {"t5": TeacherRecipe(teacher=T5(model=tiny_models.t5, max_length=128))}
    row = 128 * 16 * 2
    fine = estimate_teachers(recipes, 10**6, chunk_rows=1000)
    assert fine.fits
    assert fine.notes == ()
    assert fine.largest_chunk_bytes == pytest.approx(1000 * row, rel=0.1)
    large = estimate_teachers(recipes, 10**7, chunk_rows=2_000_000)
    assert not large.fits
    assert "chunks of about 30,188 rows" in large.notes[0]
    root = prompts_cache(tmp_path)
    told = run("estimate", "teachers", root, "--t5", tiny_models.t5, "--max-length", 40_000_000, code=1)
    assert "build the base layer in chunks of" in " ".join((told.out + told.err).split())


LARGE = """
import resource, sys
import numpy as np
from typing import ClassVar
import forebay as fb
from forebay.teachers import Output, Teacher, TeacherRecipe


class Wide(Teacher, frozen=True, kw_only=True, tag="wide"):
    prompted: ClassVar[bool] = True
    depends_on: ClassVar[str] = "prompt"

    def outputs(self):
        return (Output("wide", (128, 32)),)

    def load(self, device, dtype):
        return lambda batch: {"wide": np.ones((len(batch), 128, 32), np.float32)}


root, rows = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, 400 << 20))
with open(f"{root}.txt", "w") as file:
    file.writelines(f"prompt {number}\\n" for number in range(rows))
fb.build(root, fb.sources.lines(f"{root}.txt"), fb.RawRecipe(chunk_rows=1000), workers=0, progress=False)
report = fb.build(root, None, TeacherRecipe(teacher=Wide(), batch_size=100), workers=0, progress=False)
print(report.chunks, report.written_bytes)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_prompts(tmp_path: Path) -> None:
    """820 MB of states are made with 400 MB of anonymous memory, Python and its libraries included."""
    run = [sys.executable, "-c", LARGE, str(tmp_path / "c"), "100000"]
    told = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    assert int(told[0]) > 90
    assert int(told[1]) > 800_000_000
