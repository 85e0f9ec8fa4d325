"""A cache as a map-style dataset, for other loaders: torch's DataLoader, transformers, Lightning, Grain.

    dataset[i] ── index i among the selected rows ──▶ row number ──▶ one gather for a whole batch ──▶ one dict per row

A pickled dataset holds no rows: a worker opens the cache again, with the same rows selected.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from forebay.errors import ColumnNotFound
from forebay.feeding.prefetch import view_rows
from forebay.feeding.stream import PACKED_COLUMNS, Located, SelectionRule, checked_cache, checked_names, checked_rule
from forebay.masks.documents import LabelStyle, checked_label_style
from forebay.masks.train_on import Kind, TrainOn
from forebay.order.orders import Coins, Numbers
from forebay.read.cache import Cache
from forebay.torch.assemble import (
    Collate,
    FeaturesAt,
    Name,
    Times,
    Transform,
    add_tensors,
    beside,
    by_row,
    by_sample,
    check_caches,
    check_rows,
    checked_batch,
    checked_collate,
    default_columns,
    label_policy,
    refuse_packed,
    row_coins,
)
from forebay.torch.batches import Batch, Buffers, plain_batch
from forebay.torch.packed_batch import Derived, PackedTargets, refuse_without_training, training_batch

Row = dict[str, Tensor]


class CacheDataset(Dataset[Row]):
    """The rows of a cache, or those a rule selects, each a dict of tensors.

    A row of a token cache has `tokens`, `labels`, `positions` and `seq_lens`, as in a `Loader`; the lengths are padded
    with zeros to the longest of the rows that are read together. `names` selects tensors and renames them for a model:

        names = {"input_ids": "tokens", "labels": "labels", "position_ids": "positions"}
        CacheDataset(cache, labels="unshifted", names=names)

    With these names, `transformers` finds document boundaries in the positions and keeps documents apart (without
    `use_cache`).

    `columns`, `identify`, `features`, `train_on`, `loss_mask` and `max_documents` are those of a `Loader`. Rows of a
    ragged column are of different lengths: pass `collate_fn=dataset.collate_rows` to a DataLoader.

    `collate` makes the tensors, as in a `Loader`; without one, images and preferences come as they are stored, all
    columns or those of `columns`, for a `collate_fn`. With "stored", so do tokens.
    `transform` is called with batches, as in a `Loader`, and with the coins of the epoch last set by `set_epoch`.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        selection: SelectionRule | None = None,
        columns: Sequence[str] | None = None,
        identify: Sequence[Name] = (),
        labels: LabelStyle | Literal["auto"] | None = "auto",
        derive: Sequence[Derived] | None = None,
        train_on: TrainOn | Sequence[Kind] | Mapping[Kind, float] | None = None,
        loss_mask: str | None = None,
        max_documents: int | None = None,
        features: Mapping[str, Times | FeaturesAt] | None = None,
        names: Mapping[str, str] | None = None,
        collate: Collate | Literal["stored"] | None = None,
        transform: Transform | None = None,
        seed: int = 0,
    ) -> None:
        self.cache = checked_cache(cache)
        self.seed = seed
        rule = checked_rule(selection)
        self._selection = None if rule is None else rule.select(cache)
        labels = labels if labels == "auto" else checked_label_style("labels", labels)
        derive = None if derive is None else _row_derive(derive)
        columns = None if columns is None else checked_names("columns", columns)
        trains = collate is None and set(PACKED_COLUMNS) <= set(cache.columns)
        collate = None if collate is None else checked_collate(collate)
        if collate is not None:
            check_caches(collate, [cache])
            check_rows(collate, cache, self._selection)
        stored = () if trains or collate is not None else default_columns(cache)
        named, self._beside = beside([cache], columns or stored, identify, features)
        self._training: PackedTargets | None = None
        if trains:
            refuse_packed(columns or ())
            usual, policy = PackedTargets(), label_policy([cache], train_on, loss_mask)
            self._training = PackedTargets(
                usual.labels if labels == "auto" else labels,
                usual.derive if derive is None else derive,
                train_on=policy,
                loss_mask=loss_mask,
                max_documents=max_documents,
                further=named,
            )
        else:
            refuse_without_training(labels, derive, train_on, loss_mask, max_documents)
        self._columns = tuple(dict.fromkeys((*(self._training.columns if self._training else ()), *named)))
        self._names = None if names is None else _checked_names(names)
        self._collate = collate
        self._transform = transform
        # In shared memory, so that persistent workers see the next epoch too. torch declares no types here.
        self._epoch: Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.cache) if self._selection is None else len(self._selection)

    def __repr__(self) -> str:
        return f"<CacheDataset of {len(self):,} rows of {self.cache!r}>"

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Return many rows, read in one gather; torch's `DataLoader` calls this for each batch."""
        rows = self._rows(indices)
        batch = self._batch(rows)
        if self._transform is not None:
            batch = checked_batch(self._transform(batch, self._coins(rows)))
        split = {name: _split(batch, ours) for name, ours in self._names_in(batch).items()}
        return [{name: values[row] for name, values in split.items()} for row in range(len(rows))]

    def collate_rows(self, rows: Sequence[Row]) -> Batch:
        """Return a batch of rows, as a `Loader` has it: the `collate_fn` of a DataLoader if a column is ragged.

        A ragged column becomes `name` (flat values) and `name.offsets`; document lengths are padded to the longest.
        """
        batch: Batch = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            ours = name if self._names is None else self._names[name]
            if ours in self._columns and ours not in PACKED_COLUMNS and self.cache.column(ours).ragged:
                lengths = torch.tensor([0, *(len(each) for each in values)])
                batch[name], batch[f"{name}.offsets"] = torch.cat(values), lengths.cumsum(0)
            else:
                batch[name] = pad_sequence(values, batch_first=True) if ours == "seq_lens" else torch.stack(values)
        return batch

    @property
    def epoch(self) -> int:
        """The epoch that coins are drawn for."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the coins of this epoch from now on, also in worker processes that are running."""
        self._epoch.fill_(epoch)

    def _rows(self, indices: Sequence[int]) -> Numbers:
        count = len(self)
        places = np.array([operator.index(index) for index in indices], np.int64)
        wrong = places[(places < -count) | (places >= count)]
        if len(wrong):
            raise IndexError(f"there is no row {wrong[0]}; {self!r} has {count:,} rows")
        places %= count
        return places if self._selection is None else self._selection.rows(places)

    def _batch(self, rows: Numbers) -> Batch:
        buffers = Buffers(0, pinned=False)
        read = self.cache.read(rows, self._columns) if self._columns else {}
        if self._collate is not None:
            views = view_rows([self.cache], Located(rows), self._collate.columns)
            batch = self._collate.collate(views, self._coins(rows), buffers)
            add_tensors(batch, plain_batch(read, buffers))
        else:
            batch = training_batch(read, self._training, buffers) if self._training else plain_batch(read, buffers)
        add_tensors(batch, self._beside.batch([self.cache], Located(rows), lambda: self._coins(rows), buffers))
        return batch

    def _coins(self, rows: Numbers) -> Coins:
        naming = by_row if self._collate is None else by_sample
        return row_coins([self.cache], self.seed, self.epoch, rows, naming=naming)

    def _names_in(self, batch: Batch) -> Mapping[str, str]:
        """Return the name of each of a row's tensors -> its name in the batch."""
        known = [name for name in batch if not name.endswith(".offsets")]
        if self._names is None:
            return dict(zip(known, known, strict=True))
        for name in self._names.values():
            if name not in known:
                raise ColumnNotFound(self.cache.root, name, sorted(known))
        return self._names


def _checked_names(names: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(names, Mapping):
        raise TypeError(f"names must be a dict, {{'input_ids': 'tokens'}}: the model's names first (got {names!r})")
    return dict(names)


def _row_derive(derive: Sequence[Derived]) -> tuple[Derived, ...]:
    """Return what is derived for single rows; raise for what belongs to a whole batch."""
    if derive == "device":
        raise ValueError("derive='device' makes batches for derive_on_device, which only a Loader has; leave it out")
    names = checked_names("derive", derive)
    for name, way in _OF_BATCHES.items():
        if name in names:
            raise ValueError(f"{name} belongs to a whole batch, not to a row; {way}, or use a Loader")
    return names


_OF_BATCHES = {"cu_seqlens": "derive it from seq_lens", "num_label_tokens": "count (batch['labels'] != -100).sum()"}


def _split(batch: Batch, name: str) -> Sequence[Tensor]:
    """Return the tensor of every row."""
    offsets = batch.get(f"{name}.offsets")
    if offsets is None:
        return cast(Tensor, batch[name]).unbind(0)
    return torch.split(batch[name], offsets.diff().tolist())
