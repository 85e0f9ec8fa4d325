"""Run encoders and language models: VAE latents of letterboxed images, T5 and CLIP states of prompts, log-probs.

A causal language model reads each document as a sequence by itself, and returns the log-probs of its labels.

    row        ┌ a b c d ┬ e f g ┬ padding ┐      documents of a packed row, or a prompt with each candidate
    forward    a b c d                            right-padded, longest first, at most as many tokens as the batch has
               e f g ·
    values     b|a c|ab d|abc f|e g|ef            one per label, in the order of the row

No document can see another one, whatever attention the model has, and positions begin at 0 in each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel

from forebay.columns import Array, Ragged
from forebay.images import ImageRecipe
from forebay.teachers.built_in import T5, Clip, Latents, LogProbs
from forebay.teachers.model_families import VAES, vae_class
from forebay.teachers.protocol import Batch, config_of, model_folder, tokenizer_of, unusable
from forebay.torch.batches import to_device, to_numpy
from forebay.torch.teachers.loading import LOADING_ERRORS, NO_CODE, class_named, input_like, load_model

Value = TypeVar("Value")


class Tokens:
    """Tokenizes prompts to ids of one length, truncated and padded as the tokenizer does."""

    def __init__(self, model: str, length: int, device: torch.device) -> None:
        self._length, self._device = length, device
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(model), local_files_only=True, **NO_CODE)
        except LOADING_ERRORS as error:
            raise unusable(model, f"its tokenizer cannot be loaded: {' '.join(str(error).split())[:300]}") from error

    def __call__(self, prompts: tuple[str, ...]) -> dict[str, torch.Tensor]:
        tokens = self._tokenizer(
            list(prompts), padding="max_length", max_length=self._length, truncation=True, return_tensors="pt"
        )
        return {name: tokens[name].to(self._device) for name in ("input_ids", "attention_mask")}


class LoadedT5:
    def __init__(self, teacher: T5, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._model = load_model(T5EncoderModel, teacher.model, None, device, dtype)
        self._tokens = Tokens(tokenizer_of(teacher.model, teacher.tokenizer), teacher.max_length, self._model.device)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array | Ragged]:
        tokens = self._tokens(batch.prompts)
        arguments = tokens if self._teacher.masked else {"input_ids": tokens["input_ids"]}
        states = to_numpy(self._model(**arguments).last_hidden_state)
        name, mask = self._teacher.name, tokens["attention_mask"].bool().cpu().numpy()
        stored: Array | Ragged = states
        if self._teacher.ragged:
            stored = Ragged.of([row[real] for row, real in zip(states, mask, strict=True)], states.dtype)
        return {f"{name}_states": stored, f"{name}_mask": mask}


class LoadedClip:
    def __init__(self, teacher: Clip, device: str, dtype: str) -> None:
        self._teacher = teacher
        known = config_of(teacher.model).get("architectures") or ()
        if "CLIPTextModelWithProjection" in known and "pooled" in teacher.keeps and not teacher.projected:
            hint = "pass projected=True (--clip-projected) to apply it, or keeps=('states',)"
            raise unusable(teacher.model, "its pooled output has a projection", hint)
        family = CLIPTextModelWithProjection if teacher.projected else CLIPTextModel
        self._model = load_model(family, teacher.model, None, device, dtype)
        self._tokens = Tokens(tokenizer_of(teacher.model, teacher.tokenizer), teacher.length, self._model.device)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        name, layer = self._teacher.name, self._teacher.states_layer
        outputs = self._model(input_ids=self._tokens(batch.prompts)["input_ids"], output_hidden_states=layer != -1)
        pooled = outputs.text_embeds if self._teacher.projected else outputs.pooler_output
        states = outputs.last_hidden_state if layer == -1 else outputs.hidden_states[layer]
        return {f"{name}_pooled": to_numpy(pooled), f"{name}_states": to_numpy(states)}


class LoadedVae:
    def __init__(self, teacher: Latents, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._images = ImageRecipe(size=teacher.size, storage=teacher.storage)
        kind = vae_class(teacher.vae)
        self._of_videos = VAES[kind].of_videos
        self._vae: Any = load_model(class_named(kind, teacher.vae), teacher.vae, None, device, dtype)
        self._like = input_like(self._vae)
        config = self._vae.config
        self._scale, self._shift = config.get("scaling_factor"), config.get("shift_factor") or 0.0
        self._mean, self._std = (self._per_channel(config.get(name)) for name in ("latents_mean", "latents_std"))

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        pixels = self._canvases(batch).astype(np.float32) / 127.5 - 1.0
        images = to_device(pixels, self._like)
        posterior = self._vae.encode(images.unsqueeze(2) if self._of_videos else images).latent_dist
        latents, std = (part.squeeze(2) if self._of_videos else part for part in (posterior.mean, posterior.std))
        if self._teacher.sample == "seeded":
            noise = batch.noise(tuple(latents.shape[1:]), "latents")
            latents = latents + std * to_device(noise, latents)
        return {self._teacher.name: to_numpy(self._scaled(latents.float()))}

    def _scaled(self, latents: torch.Tensor) -> torch.Tensor:
        """Return latents as the VAE's pipelines scale them, in the same order of operations."""
        if self._mean is None or self._std is None:  # SD1.5; with a shift SD3 and Flux
            return torch.mul(latents - self._shift, self._scale)
        if self._scale is None:  # Wan, Qwen-Image
            return torch.mul(latents - self._mean, 1.0 / self._std)
        return torch.mul(latents - self._mean, self._scale).div(self._std)

    def _per_channel(self, numbers: Sequence[float] | None) -> torch.Tensor | None:
        if numbers is None:
            return None
        channels = self._teacher.outputs()[0].shape[0]
        if len(numbers) != channels:
            raise unusable(
                self._teacher.vae, f"its latents_mean or latents_std has {len(numbers)} numbers, not {channels}"
            )
        return torch.tensor(numbers, dtype=torch.float32, device=self._like.device).view(1, channels, 1, 1)

    def _canvases(self, batch: Batch) -> NDArray[np.uint8]:
        """Return canvases `(samples, 3, size, size)`: content in its rectangle, the pad color around it."""
        size, stored = self._teacher.size, self._teacher.inputs()[0]
        canvases = np.empty((len(batch), 3, size, size), np.uint8)
        canvases[:] = np.array(self._teacher.pad_color, np.uint8).reshape(3, 1, 1)
        for canvas, content, box, name in zip(canvases, batch.rows(stored), batch.array("box"), batch.ids, strict=True):
            left, top, width, height = box.tolist()
            if (left, top) != ((size - width) // 2, (size - height) // 2):
                raise unusable(
                    self._teacher.vae,
                    f"the box of image '{name}', {box.tolist()}, is not that of a canvas of {size}",
                    hint="pass the size that the images were built with",
                )
            canvas[:, top : top + height, left : left + width] = self._images.unpacked({stored: content, "box": box})
        return canvases


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """Tokens to run, and the first of them that is a label."""

    tokens: Array
    first_label: int


class LoadedLanguageModel:
    """Returns the log-probs of labels, or the most likely tokens with theirs."""

    def __init__(self, teacher: LogProbs, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._model = load_model(transformers.AutoModelForCausalLM, teacher.model, teacher.weights, device, dtype)
        self._device = next(self._model.parameters()).device
        self._vocabulary = int(self._model.get_output_embeddings().weight.shape[0])
        self._most = getattr(self._model.config, "max_position_embeddings", None)
        most = self._vocabulary if teacher.top_p == 1 else self._vocabulary - 1  # with top_p, some are always left
        if teacher.top_k > most:
            raise unusable(teacher.model, f"top_k is {teacher.top_k}; it has {self._vocabulary:,} tokens")

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Ragged]:
        if self._teacher.over == "tokens":
            rows = [[_Sequence(tokens, 1) for tokens in row] for row in packed_documents(batch)]
        else:
            rows = _candidate_rows(batch)
        documents = [document for row in rows for document in row]
        self._check(documents)
        values = self._run(documents)
        columns: dict[str, Ragged] = {}
        for output in self._teacher.outputs():
            empty = np.zeros((0, *output.shape), np.int64 if output.dtype == "uint32" else np.float32)
            each = [np.concatenate([empty, *(one[output.name] for one in row)]) for row in by_row(values, rows)]
            columns[output.name] = Ragged.of(each, each[0].dtype, output.shape)
        return columns

    def _check(self, documents: Sequence[_Sequence]) -> None:
        longest = max((len(document.tokens) for document in documents), default=0)
        if self._most is not None and longest > self._most:
            raise unusable(
                self._teacher.model,
                f"it has {self._most:,} positions, and a document has {longest:,} tokens",
                hint="build the cache with a smaller sequence_length",
            )
        largest = max((int(document.tokens.max()) for document in documents if len(document.tokens)), default=0)
        if largest >= self._vocabulary:
            raise unusable(
                self._teacher.model,
                f"it has {self._vocabulary:,} tokens, and the cache the token {largest:,}",
                hint="pass a model with the tokenizer of the cache",
            )

    def _run(self, documents: Sequence[_Sequence]) -> list[dict[str, Array]]:
        """Return the values of every document."""
        values: list[dict[str, Array]] = [{} for _ in documents]
        for group, tokens, real in document_batches([document.tokens for document in documents]):
            tokens, mask = tokens.to(self._device), real.long().to(self._device)
            logits = self._model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            for row, at in enumerate(group):
                first, length = documents[at].first_label, len(documents[at].tokens)
                labels = tokens[row, first:length]
                values[at] = self._values(logits[row, first - 1 : length - 1], labels)
        return values

    def _values(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, Array]:
        log_probs = logits.float().log_softmax(dim=-1)
        name = self._teacher.name
        if not self._teacher.top_k:
            return {f"{name}_logps": to_numpy(log_probs.gather(1, labels[:, None])[:, 0])}
        top = log_probs.topk(self._teacher.top_k, dim=-1)
        ids, values = top.indices.cpu().numpy(), to_numpy(top.values)
        if self._teacher.top_p == 1:
            return {f"{name}_top_ids": ids, f"{name}_top_logps": values}
        missing = top.values.exp().cumsum(dim=-1) < self._teacher.top_p
        counts = (missing.sum(dim=-1) + 1).clamp(max=self._teacher.top_k).cpu().numpy()
        is_used = np.arange(self._teacher.top_k) < counts[:, None]
        return {f"{name}_top_ids": ids[is_used], f"{name}_top_logps": values[is_used], f"{name}_top_counts": counts}


def packed_documents(batch: Batch) -> list[list[Array]]:
    """Return the tokens of the documents of each packed row."""
    rows = []
    for tokens, lengths in zip(batch.array("tokens"), batch.rows("seq_lens"), strict=True):
        ends = np.cumsum(lengths, dtype=np.int64)
        rows.append(np.split(tokens[: ends[-1]], ends[:-1]) if len(ends) else [])
    return rows


def _candidate_rows(batch: Batch) -> list[list[_Sequence]]:
    """The prompt of each row with each of its candidates, whose tokens are the labels."""
    rows = []
    columns = (batch.rows(name) for name in ("prompt", "candidates", "candidate_lens"))
    for prompt, candidates, lengths in zip(*columns, strict=True):
        parts = np.split(candidates, np.cumsum(lengths, dtype=np.int64)[:-1])
        rows.append([_Sequence(np.concatenate([prompt, part]), max(1, len(prompt))) for part in parts])
    return rows


def document_batches(documents: Sequence[Array]) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Yield the documents that run together, longest first: with padding, at most as many tokens as all have.

    Yields their numbers, ids `(documents, longest)` padded at the end, and a mask, True where a token is not padding.
    """
    most_tokens = sum(map(len, documents))
    numbers = sorted(range(len(documents)), key=lambda number: -len(documents[number]))
    while numbers:
        longest = len(documents[numbers[0]])
        count = most_tokens // longest if longest else len(numbers)
        group, numbers = numbers[:count], numbers[count:]
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        real = torch.zeros_like(ids, dtype=torch.bool)
        for row, tokens in enumerate(documents[number] for number in group):
            ids[row, : len(tokens)], real[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64)), True
        yield group, ids, real


def by_row(values: Sequence[Value], rows: Sequence[Sequence[object]]) -> list[Sequence[Value]]:
    """Return the values of all documents as one list for each row of documents."""
    ends = accumulate(map(len, rows), initial=0)
    return [values[start:stop] for start, stop in pairwise(ends)]
