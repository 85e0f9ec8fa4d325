"""Which files of a data set are the Parquet shards of a subset and a split.

Its README says so, in the `configs` of its head; where it does not, the names of folders and files do.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import yaml
from fsspec.utils import glob_translate

from forebay.errors import HubNotFound
from forebay.hub.listing import Listing, RemoteFile

_HEAD = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
_CONVERTED = "refs/convert/parquet"


def parquet_shards(listing: Listing, what: str, subset: str | None, split: str) -> list[RemoteFile]:
    """The shards, in the order of their names."""
    shards = [file for file in listing.files if file.path.endswith(".parquet")]
    if not shards:
        raise HubNotFound(f"Parquet files of {what}", _kinds(listing), f"try revision='{_CONVERTED}', made by the hub")
    configs = _configs(listing.readme)
    found = _by_config(shards, configs, what, subset, split) if configs else _by_name(shards, subset, split)
    if not found:
        wanted = f"split '{split}'" + (f" of subset '{subset}'" if subset else "")
        raise HubNotFound(f"{wanted} of {what}", "no Parquet file matches", f"there are: {_choices(shards, configs)}")
    return found


def _configs(readme: str) -> dict[str, dict[str, Any]]:
    """The subsets that a README describes, by name."""
    head = _HEAD.match(readme)
    try:
        facts = yaml.safe_load(head[1]) if head else None
    except (yaml.YAMLError, ValueError):  # a date of no calendar is a ValueError
        return {}  # a README is prose first; the names of the files are left
    configs = facts.get("configs") if isinstance(facts, dict) else None
    known = [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []
    return {str(config.get("config_name", "default")): config for config in known if "data_files" in config}


def _by_config(
    shards: Sequence[RemoteFile], configs: dict[str, dict[str, Any]], what: str, subset: str | None, split: str
) -> list[RemoteFile]:
    name = _default(configs) if subset is None else subset
    if name is None:
        raise HubNotFound(what, "it has several subsets", f"choose one: {_listed(configs)}")
    if name not in configs:
        raise HubNotFound(f"subset '{name}' of {what}", "there is none of that name", f"there are: {_listed(configs)}")
    config = configs[name]
    folder = str(config.get("data_dir", "")).strip("/")
    patterns = [f"{folder}/{pattern}".lstrip("/") for pattern in _patterns(config["data_files"], split)]
    matchers = [re.compile(glob_translate(pattern)) for pattern in patterns]
    return [file for file in shards if any(matcher.match(file.path) for matcher in matchers)]


def _default(configs: dict[str, dict[str, Any]]) -> str | None:
    marked = [name for name, config in configs.items() if config.get("default")]
    if marked or "default" in configs:
        return [*marked, "default"][0]
    return next(iter(configs)) if len(configs) == 1 else None


def _patterns(data_files: Any, split: str) -> Iterable[str]:
    """The patterns of a split; what is not put into a split is for training."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    for entry in entries:
        described = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = described.get("path", [])
        if described.get("split", "train") == split:
            yield from (str(path).removeprefix("./") for path in (paths if isinstance(paths, list) else [paths]))


def _by_name(shards: Sequence[RemoteFile], subset: str | None, split: str) -> list[RemoteFile]:
    of_subset = [file for file in shards if subset is None or _has_word(file.path, subset)]
    of_split = [file for file in of_subset if _has_word(file.path, split)]
    if not of_split and split == "train" and not any(_has_word(file.path, word) for file in shards for word in _SPLITS):
        return of_subset
    return of_split


def _has_word(path: str, word: str) -> bool:
    """Whether a folder or a name has a word of its own.

    >>> _has_word("en/train-00000-of-00002.parquet", "train"), _has_word("en/training.parquet", "train")
    (True, False)
    """
    return re.search(rf"(?:^|[/._-]){re.escape(word)}(?:[/._-]|$)", path) is not None


def _choices(shards: Sequence[RemoteFile], configs: dict[str, dict[str, Any]]) -> str:
    if configs:
        return _listed(configs)
    return _listed(sorted({file.path.rpartition("/")[0] or file.path for file in shards}))


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(f"'{name}'" for name in shown[:12]) + more


def _kinds(listing: Listing) -> str:
    kinds = sorted({file.path.rpartition(".")[2] for file in listing.files if "." in file.path})
    return f"it has only files of kind {_listed(kinds)}" if kinds else "it has no files"
