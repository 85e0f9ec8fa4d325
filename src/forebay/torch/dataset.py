"""A cache as a map-style dataset, for other loaders: torch's DataLoader, transformers, Lightning, Grain.

    dataset[i] ── index i among the selected rows ──▶ row number ──▶ one gather for a whole batch ──▶ one dict per row

A pickled dataset holds no rows: a worker opens the cache again, with the same rows selected.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from forebay.columns import Ragged
from forebay.errors import not_found
from forebay.feeding.stream import PACKED_COLUMNS, SelectionRule, checked_cache, checked_rule
from forebay.fields import checked_whole
from forebay.order.shuffle import Numbers
from forebay.read.cache import Cache
from forebay.read.rows import ROW_NAMES, Located
from forebay.read.views import View
from forebay.torch.batches import Batch, Buffers
from forebay.torch.collate import Assembler, Collate, StoredBatch, Transform, checked_collate
from forebay.torch.token_batch import TokenBatch

Row = dict[str, Tensor]


class CacheDataset(Dataset[Row]):
    """The rows of a cache, or those a rule selects, each a dict of tensors.

    A row of a token cache has `tokens`, `labels`, `positions` and `seq_lens`, as in a `Loader`; the lengths are padded
    with zeros to the longest of the rows that are read together. `names` selects tensors and renames them for a model:

        names = {"input_ids": "tokens", "labels": "labels", "position_ids": "positions"}
        CacheDataset(cache, collate=TokenBatch(cache, labels="unshifted"), names=names)

    With these names, `transformers` finds document boundaries in the positions and keeps documents apart (without
    `use_cache`).

    `collate` makes the tensors, as in a `Loader`; without one, images and preferences come as they are stored, for a
    `collate_fn`. `columns` are those of a `Loader`. Rows of a ragged column are of different lengths: pass
    `collate_fn=dataset.collate_rows` to a DataLoader. `transform` is called with batches, as in a `Loader`, and with
    the coins of the epoch last set by `set_epoch`.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        collate: Collate | None = None,
        columns: Sequence[str | View] = (),
        selection: SelectionRule | None = None,
        names: Mapping[str, str] | None = None,
        transform: Transform | None = None,
        seed: int = 0,
    ) -> None:
        self.cache, self.seed = checked_cache(cache), checked_whole("seed", seed)
        rule = checked_rule(selection)
        self._selection = None if rule is None else rule.select(cache)
        collate = self._usual(columns) if collate is None else checked_collate(collate)
        if not collate.by_row:
            raise ValueError(
                f"this {type(collate).__name__} makes tensors of whole batches, which cannot be split into rows; use a "
                "Loader, or a TokenBatch without cu_seqlens, num_label_tokens and on_device"
            )
        self._assembler = Assembler.of([cache], collate, columns, transform, Buffers(0, pinned=False), seed)
        self._assembler.check([self._selection])
        if names is not None and not isinstance(names, Mapping):
            raise TypeError(f"names must be a dict, {{'input_ids': 'tokens'}}: the model's names first (got {names!r})")
        self._names = None if names is None else dict(names)
        # In shared memory, so that persistent workers see the next epoch too. torch declares no types here.
        self._epoch: Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def _usual(self, columns: Sequence[str | View]) -> Collate:
        """Return the collate of tokens; other rows come as they are stored, those of `columns` or all."""
        if set(PACKED_COLUMNS) <= set(self.cache.columns):
            return TokenBatch(self.cache)
        named = [name for name in columns if isinstance(name, str) and name not in ROW_NAMES]
        return StoredBatch(self.cache, named or None)

    def __len__(self) -> int:
        return len(self.cache) if self._selection is None else len(self._selection)

    def __repr__(self) -> str:
        return f"<CacheDataset of {len(self):,} rows of {self.cache!r}>"

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Return many rows, read in one gather; torch's `DataLoader` calls this for each batch."""
        rows = self._rows(indices)
        located = Located(rows)
        coins = self._assembler.coins(self.epoch, located)
        batch = self._assembler.batch(self._assembler.reader.read(located, coins), coins)
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
            if isinstance(self._assembler.reader.like.get(ours), Ragged) and ours in self._assembler.extra:
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
        numbers = np.array([operator.index(index) for index in indices], np.int64)
        wrong = numbers[(numbers < -count) | (numbers >= count)]
        if len(wrong):
            raise IndexError(f"there is no row {wrong[0]}; {self!r} has {count:,} rows")
        numbers %= count
        return numbers if self._selection is None else self._selection.rows(numbers)

    def _names_in(self, batch: Batch) -> Mapping[str, str]:
        """Return the name of each of a row's tensors -> its name in the batch."""
        known = [name for name in batch if not name.endswith(".offsets")]
        if self._names is None:
            return dict(zip(known, known, strict=True))
        for name in self._names.values():
            if name not in known:
                raise not_found("column", name, self.cache.root, sorted(known))
        return self._names


def _split(batch: Batch, name: str) -> Sequence[Tensor]:
    """Return the tensor of every row."""
    offsets = batch.get(f"{name}.offsets")
    if offsets is None:
        return cast(Tensor, batch[name]).unbind(0)
    return torch.split(batch[name], offsets.diff().tolist())
