"""Run a causal language model over documents, each as a sequence by itself, and return the log-probs of their labels.

    row        ┌ a b c d ┬ e f g ┬ padding ┐      documents of a packed row, or a prompt with each candidate
    forward    a b c d                            right-padded, longest first, at most as many tokens as the batch has
               e f g ·
    values     b|a c|ab d|abc f|e g|ef            one per label, in the order of the row

No document can see another one, whatever attention the model has, and positions begin at 0 in each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import transformers

from forebay.columns import Array, Ragged
from forebay.errors import TeacherUnusable
from forebay.teachers.built_in import LogProbs
from forebay.teachers.protocol import Batch
from forebay.torch.batches import to_numpy
from forebay.torch.teachers.loading import load_model


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
            raise TeacherUnusable(teacher.model, f"top_k is {teacher.top_k}; it has {self._vocabulary:,} tokens")

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Ragged]:
        if self._teacher.over == "tokens":
            rows = [[_Sequence(tokens, 1) for tokens in row] for row in packed_documents(batch)]
        else:
            rows = _candidate_rows(batch)
        documents = [document for row in rows for document in row]
        self._check(documents)
        found = self._run(documents)
        counts = np.cumsum([0, *(len(row) for row in rows)]).tolist()
        made: dict[str, Ragged] = {}
        for output in self._teacher.outputs():
            empty = np.zeros((0, *output.shape), np.int64 if output.dtype == "uint32" else np.float32)
            each = [
                np.concatenate([empty, *(found[at][output.name] for at in range(counts[row], counts[row + 1]))])
                for row in range(len(rows))
            ]
            made[output.name] = Ragged.of(each, each[0].dtype, output.shape)
        return made

    def _check(self, documents: Sequence[_Sequence]) -> None:
        longest = max((len(document.tokens) for document in documents), default=0)
        if self._most is not None and longest > self._most:
            raise TeacherUnusable(
                self._teacher.model,
                f"it has {self._most:,} positions, and a document has {longest:,} tokens; build the cache with a "
                "smaller sequence_length",
            )
        largest = max((int(document.tokens.max()) for document in documents if len(document.tokens)), default=0)
        if largest >= self._vocabulary:
            raise TeacherUnusable(
                self._teacher.model,
                f"it has {self._vocabulary:,} tokens, and the cache the token {largest:,}; pass a model with the "
                "tokenizer of the cache",
            )

    def _run(self, documents: Sequence[_Sequence]) -> list[dict[str, Array]]:
        """Return the values of every document."""
        found: list[dict[str, Array]] = [{} for _ in documents]
        for group in document_groups([len(document.tokens) for document in documents]):
            tokens, real = padded([documents[at].tokens for at in group])
            tokens, mask = tokens.to(self._device), real.long().to(self._device)
            logits = self._model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            for row, at in enumerate(group):
                first, length = documents[at].first_label, len(documents[at].tokens)
                labels = tokens[row, first:length]
                found[at] = self._values(logits[row, first - 1 : length - 1], labels)
        return found

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
        kept = np.arange(self._teacher.top_k) < counts[:, None]
        return {f"{name}_top_ids": ids[kept], f"{name}_top_logps": values[kept], f"{name}_top_counts": counts}


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


def document_groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the documents that run together, longest first: with padding, at most as many tokens as all have."""
    most_tokens = sum(lengths)
    group: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        if group and lengths[group[0]] * (len(group) + 1) > most_tokens:
            yield group
            group = []
        group.append(at)
    if group:
        yield group


def padded(documents: Sequence[Array]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids `(documents, longest)`, padded at the end, and a mask, True where a token is not padding."""
    ids = torch.zeros(len(documents), max(map(len, documents)), dtype=torch.int64)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for row, tokens in enumerate(documents):
        ids[row, : len(tokens)], real[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64)), True
    return ids, real
