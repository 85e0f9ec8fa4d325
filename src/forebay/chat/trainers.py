"""Write chat and preference caches as the tokenized data sets that other trainers read.

    write_sft(cache, "sft.arrow")                         # input_ids, attention_mask, labels, completion_mask
    data = datasets.Dataset.from_file("sft.arrow")        # mapped, not loaded

    SFTTrainer(model, SFTConfig(…, dataset_kwargs={"skip_prepare_dataset": True}), train_dataset=data)
    prepared(DPOTrainer)(model, args=DPOConfig(…), train_dataset=Dataset.from_file("dpo.arrow"), …)

Labels are token ids, −100 where nothing is trained; models shift them. A file is written chunk by chunk: memory is that
of one chunk. A name that ends with `.parquet` gives a Parquet file, any other an Arrow stream.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np

from forebay.columns import Array, Ragged
from forebay.errors import LibraryMissing, choice_error
from forebay.masks import candidate_weights, labels, token_weights
from forebay.masks.train_on import Kind, TrainOn, label_weights
from forebay.read.cache import Cache

_PACKED = ("tokens", "seq_lens")
_SPANS = ("spans", "last_turn")
_SUFFIXES = (".arrow", ".parquet")
SFT_COLUMNS = ("input_ids", "attention_mask", "labels", "completion_mask")
Policy = TrainOn | Sequence[Kind] | Mapping[Kind, float]


def write_sft(
    cache: Cache, path: str | os.PathLike[str], *, train_on: Policy | None = None, packed: bool = False,
    columns: Sequence[str] | None = None,
) -> int:  # fmt: skip
    """Write a token or chat cache, one row per document or, with `packed`, per packed row; return the number of rows.

    Columns are `input_ids`, `attention_mask`, `labels` and `completion_mask`; packed rows have `seq_lengths` too, and
    no padding. Train on packed rows with position ids from `seq_lengths`: TRL does with `padding_free=True`. `columns`
    writes only some: Axolotl wants exactly the first three.
    """
    known = (*SFT_COLUMNS, *(["seq_lengths"] if packed else []))
    chosen = known if columns is None else tuple(columns)
    if not chosen or (unknown := [name for name in chosen if name not in known]):
        raise ValueError(
            f"columns must name some of {', '.join(known)} (got {list(chosen) if not chosen else unknown})"
        )
    if not set(_PACKED) <= set(cache.columns):
        kind = cache.recipe(cache.generation.base).kind
        raise ValueError(f"'{cache.root}' is a cache of {kind}; write_sft reads token and chat caches")
    with_spans = set(_SPANS) <= set(cache.columns)
    if train_on is not None and not with_spans:
        raise ValueError(f"'{cache.root}' has no spans, so nothing says which of its tokens are responses")
    policy = _checked_policy(train_on) if with_spans else None
    chunks = _sft_chunks(cache, policy, packed)
    return _write(path, ({name: chunk[name] for name in chosen} for chunk in chunks))


def write_dpo(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    reference: str | None = None,
    train_on: Policy | None = None,
    untrained: Literal["error", "drop"] = "error",
) -> int:
    """Write a preference cache, the best and the worst candidate of every row; return the number of rows.

    Columns are `prompt_ids`, `chosen_ids` and `rejected_ids`. `reference` names a column of log-probs, such as
    `ref_logps`; their sums become `ref_chosen_logps` and `ref_rejected_logps`. TRL trains on every token of a
    candidate: rows with tokens that `train_on` leaves out, such as results of tools, are an error, or dropped.
    """
    if untrained not in ("error", "drop"):
        raise choice_error("untrained", untrained, ("error", "drop"))
    if (kind := cache.recipe(cache.generation.base).kind) != "preferences":
        raise ValueError(f"'{cache.root}' is a cache of {kind}; write_dpo reads caches of preferences")
    return _write(path, _dpo_chunks(cache, _checked_policy(train_on), reference, untrained == "drop"))


def prepared(trainer: type[Any]) -> type[Any]:
    """Return a trainer class of TRL that takes data sets with `prompt_ids` as they are.

    TRL's `DPOTrainer` renders and tokenizes any data set that it is passed, and with `precompute_ref_log_probs` it runs
    the reference model over it; this one does neither if the columns are there.
    """

    class PreparedRows(trainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *arguments: Any, **named: Any) -> Any:
            if {"prompt_ids", "chosen_ids", "rejected_ids"} <= set(dataset.column_names or ()):
                return dataset
            return super()._prepare_dataset(dataset, *arguments, **named)

        def _precompute_ref_logps(self, dataset: Any, *arguments: Any, **named: Any) -> Any:
            if {"ref_chosen_logps", "ref_rejected_logps"} <= set(dataset.column_names or ()):
                return dataset
            return super()._precompute_ref_logps(dataset, *arguments, **named)

    PreparedRows.__name__ = PreparedRows.__qualname__ = trainer.__name__
    return PreparedRows


def _checked_policy(train_on: Policy | None) -> TrainOn:
    policy = TrainOn() if train_on is None else TrainOn.of(train_on)
    if policy.is_weighted:
        raise ValueError("train_on has weights other than 0 and 1, which these data sets have no column for")
    return policy


def _sft_chunks(cache: Cache, policy: TrainOn | None, packed: bool) -> Iterator[dict[str, Array | Ragged]]:
    for rows in cache.chunks((*_PACKED, *(_SPANS if policy else ()))):
        tokens, lengths = rows["tokens"], rows["seq_lens"]
        assert not isinstance(tokens, Ragged)
        assert isinstance(lengths, Ragged)
        seq_lens = lengths.padded()[0].astype(np.int64)
        targets = labels(tokens, seq_lens, "unshifted")
        if policy is not None:
            spans: Any = rows["spans"]
            last_turn: Any = rows["last_turn"]
            weights = token_weights(spans.values, spans.offsets, seq_lens, last_turn.values, tokens.shape[1], policy)
            label_weights(targets, weights, "unshifted")
        used = seq_lens.sum(axis=1)
        inside = np.arange(tokens.shape[1]) < used[:, None]
        first = np.concatenate([[0], np.cumsum(lengths.values, dtype=np.int64)])
        edges = first[lengths.offsets.astype(np.int64)] if packed else first
        used_targets = targets[inside]
        chunk: dict[str, Array | Ragged] = {
            "input_ids": Ragged(tokens[inside].astype(np.int32), edges),
            "attention_mask": Ragged(np.ones(len(used_targets), np.int8), edges),
            "labels": Ragged(used_targets, edges),
            "completion_mask": Ragged((used_targets >= 0).astype(np.int8), edges),
        }
        if packed:
            chunk["seq_lengths"] = Ragged(lengths.values.astype(np.int32), lengths.offsets)
        yield chunk


def _dpo_chunks(
    cache: Cache, policy: TrainOn, reference: str | None, drop: bool
) -> Iterator[dict[str, Array | Ragged]]:
    columns = ["prompt", "candidates", "candidate_lens", "spans", *([reference] if reference else [])]
    int32, first = np.dtype(np.int32), 0
    for rows in cache.chunks(columns):
        pairs = [_pair(cache, rows, row, first + row, policy, reference) for row in range(len(rows["prompt"]))]
        first += len(pairs)
        if not drop and None in pairs:
            raise ValueError(
                f"row {first - len(pairs) + pairs.index(None)} of '{cache.root}' has tokens in a candidate that "
                "train_on leaves out, and TRL would train on them; pass untrained='drop' to leave such rows out"
            )
        whole = [pair for pair in pairs if pair is not None]
        chunk: dict[str, Array | Ragged] = {
            "prompt_ids": Ragged.of([pair.prompt for pair in whole], int32),
            "chosen_ids": Ragged.of([pair.ids[0] for pair in whole], int32),
            "rejected_ids": Ragged.of([pair.ids[1] for pair in whole], int32),
        }
        if reference:
            chunk["ref_chosen_logps"] = np.array([pair.sums[0] for pair in whole], np.float64)
            chunk["ref_rejected_logps"] = np.array([pair.sums[1] for pair in whole], np.float64)
        yield chunk


class _Pair(NamedTuple):
    """The best and the worst candidate of a row, and the sums of their log-probs."""

    prompt: Array
    ids: tuple[Array, Array]
    sums: tuple[float, float]


def _pair(
    cache: Cache, rows: Mapping[str, Any], row: int, number: int, policy: TrainOn, reference: str | None
) -> _Pair | None:
    """The pair of a row of a chunk; None if `policy` leaves out tokens of it."""
    prompt, candidates, lens, spans = (rows[name][row] for name in ("prompt", "candidates", "candidate_lens", "spans"))
    weights = candidate_weights(spans, len(prompt), lens, policy)
    if not (weights[0].all() and weights[-1].all()):
        return None
    values = rows[reference][row].astype(np.float64) if reference else np.zeros(len(candidates))
    if len(values) != len(candidates):
        raise ValueError(
            f"row {number} of '{cache.root}' has no '{reference}': it was not computed; build the rest of that layer, "
            "or see `forebay status` for its failures"
        )
    ends = slice(0, int(lens[0])), slice(len(candidates) - int(lens[-1]), len(candidates))
    return _Pair(prompt, (candidates[ends[0]], candidates[ends[1]]), (values[ends[0]].sum(), values[ends[1]].sum()))


def _write(path: str | os.PathLike[str], chunks: Iterator[dict[str, Array | Ragged]]) -> int:
    """Write a temporary file in the same folder, and rename it when it is complete."""
    try:
        arrow: Any = import_module("pyarrow")
    except ModuleNotFoundError as missing:
        raise LibraryMissing(
            "writing data sets for trainers needs 'pyarrow', which is not installed",
            hint="pip install 'forebay[tokens]'",
            extra="tokens",
        ) from missing
    target = os.fspath(path)
    if not target.endswith(_SUFFIXES):
        raise ValueError(f"path must end with {' or '.join(_SUFFIXES)} (got '{target}')")
    unfinished = f"{target}.unfinished"
    writer: Any = None
    count = 0
    try:
        for chunk in chunks:
            table = arrow.table({name: _arrow(arrow, values) for name, values in chunk.items()})
            if writer is None:
                writer = _writer(target, unfinished, table.schema)
            writer.write_table(table)
            count += table.num_rows
        if writer is None:
            raise ValueError("the cache has no rows to write")
        writer.close()
        os.replace(unfinished, target)
    finally:
        if writer is not None:
            with suppress(FileNotFoundError):
                os.remove(unfinished)
    return count


def _writer(target: str, unfinished: str, schema: Any) -> Any:
    if target.endswith(".parquet"):
        return import_module("pyarrow.parquet").ParquetWriter(unfinished, schema)
    return import_module("pyarrow.ipc").new_stream(unfinished, schema)


def _arrow(arrow: Any, values: Array | Ragged) -> Any:
    if isinstance(values, Ragged):
        offsets = arrow.array((values.offsets - values.offsets[0]).astype(np.int32))
        flat = values.values[int(values.offsets[0]) : int(values.offsets[-1])]
        return arrow.ListArray.from_arrays(offsets, arrow.array(flat))
    return arrow.array(values)
