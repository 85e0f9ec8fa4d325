"""Training with teachers under the document's names: `TrainerConfig`, losses, teachers of several data sets."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay.compat.tinyflux.datasets import DatasetCache
from forebay.compat.tinyflux.experts import at_flow_times
from forebay.order.coins import row_keys
from forebay.read.cache import Cache
from forebay.torch.batches import to_array
from forebay.torch.distill.flow import MIN_SNR_GAMMA, SHIFT
from forebay.torch.distill.losses import LossMode, Warmup, feature_loss, loss_weights
from forebay.torch.distill.timed_features import TeacherDropout, TeacherRows, TorchFeatures


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Weights, warm-ups and dropout of both teachers.

    >>> config = TrainerConfig(use_spatial_weighting=True)
    >>> config.lune(500), config.sol(500)
    (0.05, 0.0125)
    """

    lune_weight: float = 0.1
    lune_warmup_steps: int = 1000
    lune_dropout: float = 0.1
    lune_loss_mode: LossMode = "cosine"
    sol_weight: float = 0.05
    sol_warmup_steps: int = 2000
    sol_dropout: float = 0.1
    use_spatial_weighting: bool = False
    min_snr_gamma: float = MIN_SNR_GAMMA
    shift: float = SHIFT
    seed: int = 0

    def lune(self, step: int) -> float:
        """Return the weight of Lune's loss at a step."""
        return Warmup(self.lune_weight, self.lune_warmup_steps)(step)

    def sol(self, step: int) -> float:
        """Return the weight of Sol's loss at a step."""
        return Warmup(self.sol_weight, self.sol_warmup_steps)(step)

    def loss_weights(
        self, spatial: TeacherRows | None, content: Tensor | None = None, size: tuple[int, int] = (64, 64)
    ) -> Tensor | None:
        """Return loss weights per position: 0 in padding, and Sol's maps with `use_spatial_weighting`."""
        return loss_weights(spatial if self.use_spatial_weighting else None, content, size)

    def dropout(self, teacher: str) -> TeacherDropout:
        rates = {"lune": self.lune_dropout, "sol": self.sol_dropout}
        if teacher not in rates:
            raise ValueError(f"teacher must be one of lune, sol (got {teacher!r})")
        return TeacherDropout(rates[teacher], self.seed)


Targets = Tensor | TeacherRows


def compute_lune_loss(predicted: Tensor, features: Targets, mode: LossMode = "cosine") -> Tensor:
    """Return the loss against Lune, over its present rows."""
    values, present = _parts(features)
    return feature_loss(predicted, values, mode, present=present)


def compute_sol_loss(stats_predicted: Tensor, spatial_predicted: Tensor, stats: Targets, spatial: Targets) -> Tensor:
    """Return the MSE of the statistics plus the MSE of the maps, each over its present rows."""
    (stats_values, stats_present), (maps, maps_present) = _parts(stats), _parts(spatial)
    of_stats = feature_loss(stats_predicted, stats_values, "mse", present=stats_present)
    return of_stats + feature_loss(spatial_predicted, maps, "mse", present=maps_present)


def _parts(targets: Targets) -> tuple[Tensor, Tensor | None]:
    return (targets.values, targets.present) if isinstance(targets, TeacherRows) else (targets, None)


Numbers = Tensor | ArrayLike


class MultiSourceCache:
    """Caches by data set id; the `dataset_id` and `local_index` of a `Mixture` batch identify a sample.

        cache = MultiSourceCache(device="cuda")
        cache.add(portraits, dataset_id=0)
        lune = cache.get_lune(batch["local_index"], batch["dataset_id"], t)        # TeacherRows, or None

    Rows of a data set without that teacher are absent; if none has it, the result is None.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._caches: dict[int, Cache] = {}
        self._teachers: dict[str, dict[int, TorchFeatures]] = {"lune": {}, "sol": {}}

    def add(self, cache: DatasetCache | Cache, dataset_id: int) -> None:
        """Add a cache, with the teachers that it has."""
        opened = cache.cache if isinstance(cache, DatasetCache) else cache
        if dataset_id in self._caches:
            raise ValueError(f"dataset_id {dataset_id} is already '{self._caches[dataset_id].root}'; choose another")
        for teacher, known in self._teachers.items():
            if teacher in opened.generation.recipes:
                features = TorchFeatures(opened, teacher, self.device)
                self._check_alike(teacher, features)
                known[dataset_id] = features
        self._caches[dataset_id] = opened

    def get_lune(self, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers) -> TeacherRows | None:
        """Return (rows, 1280) at the timesteps."""
        found = self._at("lune", local_indices, dataset_ids, timesteps)
        return None if found is None else found["lune"]

    def get_sol(
        self, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers
    ) -> tuple[TeacherRows, TeacherRows] | tuple[None, None]:
        """Return statistics (rows, 4) and maps (rows, 8, 8) at the timesteps."""
        found = self._at("sol", local_indices, dataset_ids, timesteps)
        return (None, None) if found is None else (found["sol_stats"], found["sol_spatial"])

    def sample_keys(self, local_indices: Numbers, dataset_ids: Numbers) -> NDArray[np.uint64]:
        """Return the permanent numbers of samples, from their row ids, for `TeacherDropout.kept(…, dataset_ids)`."""
        rows, datasets = _routed(local_indices, dataset_ids)
        keys = np.empty(len(rows), np.uint64)
        for dataset, here in self._by_dataset(datasets):
            ids = self._caches[dataset].row_ids(rows[here])
            keys[here] = row_keys([name.chunk for name in ids], [name.row for name in ids])
        return keys

    def _at(
        self, teacher: str, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers
    ) -> dict[str, TeacherRows] | None:
        known = self._teachers[teacher]
        rows, datasets = _routed(local_indices, dataset_ids)
        routes = self._by_dataset(datasets)
        if not known:
            return None
        t = to_array(timesteps)
        if t.shape not in ((), rows.shape):
            raise ValueError(f"pass one timestep for all, or one per sample: {len(rows)} (got shape {t.shape})")
        t = np.broadcast_to(t, rows.shape)
        if len(routes) == 1 and routes[0][0] in known:
            return at_flow_times(known[routes[0][0]], rows, t)
        found = {
            dataset: (here, at_flow_times(known[dataset], rows[here], t[here]))
            for dataset, here in routes
            if dataset in known
        }
        return self._joined(next(iter(known.values())), len(rows), found)

    def _joined(
        self, like: TorchFeatures, count: int, features: Mapping[int, tuple[NDArray[np.int64], dict[str, TeacherRows]]]
    ) -> dict[str, TeacherRows]:
        """Return the rows of all data sets in the order of the batch."""
        present = torch.zeros(count, dtype=torch.bool, device=self.device)
        values = {
            column: torch.full((count, *like.shape(column)), torch.nan, dtype=torch.float32, device=self.device)
            for column in like.columns
        }
        for here, columns in features.values():
            places = torch.from_numpy(here).to(self.device)
            for column, rows in columns.items():
                values[column][places] = rows.values
                present[places] = rows.present
        return {column: TeacherRows(found, present) for column, found in values.items()}

    def _by_dataset(self, datasets: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        routes = [(dataset, np.flatnonzero(datasets == dataset)) for dataset in np.unique(datasets).tolist()]
        for dataset, _ in routes:
            if dataset not in self._caches:
                known = ", ".join(map(str, self._caches)) or "none"
                raise KeyError(f"no cache was added for data set {dataset}; known are: {known}")
        return routes

    def _check_alike(self, teacher: str, features: TorchFeatures) -> None:
        for other in self._teachers[teacher].values():
            one, two = ({column: each.shape(column) for column in each.columns} for each in (features, other))
            if one != two:
                raise ValueError(
                    f"'{teacher}' is {one} in '{features.numpy.cache.root}' but {two} in '{other.numpy.cache.root}'; "
                    "all data sets need teachers of the same shape"
                )


def _routed(local_indices: Numbers, dataset_ids: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows, datasets = _whole("local_indices", local_indices), _whole("dataset_ids", dataset_ids)
    if rows.ndim != 1 or datasets.shape not in ((), rows.shape):
        raise ValueError(
            f"pass one local index and one dataset id per sample (got shapes {rows.shape} and {datasets.shape})"
        )
    return rows, np.broadcast_to(datasets, rows.shape)


def _whole(name: str, numbers: Numbers) -> NDArray[np.int64]:
    found = to_array(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be whole numbers (got {found.dtype})")
    return found.astype(np.int64)
