"""Find the Parquet shards of a subset and a split of a data set.

They are listed in the `configs` of its README's head; otherwise the names of folders and files decide.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from glob import has_magic
from typing import Any

import yaml

from forebay.errors import SourceNotFound
from forebay.globs import Glob
from forebay.hub.repository import RemoteFile
from forebay.hub.session import not_found

_HEAD = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
_LARGEST_HEAD = 1 << 20  # characters; the YAML parser takes seconds for that
_MOST_MATCHES = 4_000_000  # of a pattern with a path; half a minute


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it comes without types
    """YAML without aliases, which could expand a few lines to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias ('*name') in it is not supported")
        return super().compose_node(parent, index)


def parquet_shards(
    files: Sequence[RemoteFile], readme: str, what: str, subset: str | None, split: str
) -> list[RemoteFile]:
    """The shards among the files of a data set, in their order."""
    shards = [file for file in files if file.path.endswith(".parquet")]
    if not shards:
        hint = "try the revision 'refs/convert/parquet', which the hub makes"
        raise not_found(f"Parquet files of {what}", _kinds(files), hint)
    configs = _configs(readme, what)
    matching = _by_config(shards, configs, what, subset, split) if configs else _by_name(shards, subset, split)
    if not matching:
        wanted = f"split '{split}'" + (f" of subset '{subset}'" if subset else "")
        hint = f"there are: {_choices(shards, configs, subset)}"
        raise not_found(f"{wanted} of {what}", "no Parquet file matches", hint)
    return matching


def _configs(readme: str, what: str) -> dict[str, dict[str, Any]]:
    """The subsets that a README describes, by name."""
    head = _HEAD.match(readme)
    if head and len(head[1]) > _LARGEST_HEAD:
        raise _unreadable(what, f"its head is longer than {_LARGEST_HEAD:,} characters")
    try:
        facts = yaml.load(head[1], _Loader) if head else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an invalid date is a ValueError
        raise _unreadable(what, f"its head is not readable YAML: {str(error).partition(chr(10))[0]}") from error
    configs = facts.get("configs") if isinstance(facts, dict) else None
    known = [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []
    return {str(config.get("config_name", "default")): config for config in known if "data_files" in config}


def _unreadable(what: str, problem: str) -> SourceNotFound:
    return not_found(f"the subsets in README.md of {what}", problem, "download its files and build from those")


def _by_config(
    shards: Sequence[RemoteFile], configs: dict[str, dict[str, Any]], what: str, subset: str | None, split: str
) -> list[RemoteFile]:
    name = _default(configs) if subset is None else subset
    if name is None:
        raise not_found(what, "it has several subsets", f"choose one: {_listed(configs)}")
    if name not in configs:
        raise not_found(f"subset '{name}' of {what}", "it does not exist", f"there are: {_listed(configs)}")
    folder = str(configs[name].get("data_dir") or "").strip("/")
    patterns = {f"{folder}/{pattern}".lstrip("/") for pattern in _patterns(configs[name]["data_files"], split)}
    globs = [Glob.of(pattern.split("/")) for pattern in patterns if has_magic(pattern)]
    if len(globs) * len(shards) > _MOST_MATCHES:
        raise _unreadable(what, f"{len(globs):,} patterns over {len(shards):,} files would take minutes to match")
    parts = {file: file.path.split("/") for file in shards}
    return [file for file in shards if file.path in patterns or any(glob.matches(parts[file])[1] for glob in globs)]


def _default(configs: dict[str, dict[str, Any]]) -> str | None:
    marked = [name for name, config in configs.items() if config.get("default")]
    if marked or "default" in configs:
        return [*marked, "default"][0]
    return next(iter(configs)) if len(configs) == 1 else None


def _patterns(data_files: Any, split: str) -> Iterator[str]:
    """The patterns of a split."""
    for entry in _entries(data_files):
        paths = entry.get("path", [])
        if entry.get("split", "train") == split:
            yield from (str(path).removeprefix("./") for path in (paths if isinstance(paths, list) else [paths]))


def _entries(data_files: Any) -> list[dict[str, Any]]:
    """Files by split; those without a split belong to `train`."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    return [entry if isinstance(entry, dict) else {"path": entry} for entry in entries]


def _by_name(shards: Sequence[RemoteFile], subset: str | None, split: str) -> list[RemoteFile]:
    of_subset = [file for file in shards if subset is None or _has_word(file.path, subset)]
    of_split = [file for file in of_subset if _has_word(file.path, split)]
    if not of_split and split == "train" and not any(_has_word(file.path, word) for file in shards for word in _SPLITS):
        return of_subset
    return of_split


def _has_word(path: str, word: str) -> bool:
    """Whether a path contains a word between separators.

    >>> _has_word("en/train-00000-of-00002.parquet", "train"), _has_word("en/training.parquet", "train")
    (True, False)
    """
    return re.search(rf"(?:^|[/._-]){re.escape(word)}(?:[/._-]|$)", path) is not None


def _choices(shards: Sequence[RemoteFile], configs: dict[str, dict[str, Any]], subset: str | None) -> str:
    """The splits of a subset from the README, otherwise the folders of the shards."""
    name = _default(configs) if subset is None else subset
    if name in configs:
        splits = {str(entry.get("split", "train")) for entry in _entries(configs[name]["data_files"])}
        return f"the splits {_listed(sorted(splits))}"
    return _listed(sorted({file.path.rpartition("/")[0] or file.path for file in shards}))


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(f"'{name}'" for name in shown[:12]) + more


def _kinds(files: Sequence[RemoteFile]) -> str:
    kinds = sorted({file.path.rpartition(".")[2] for file in files if "." in file.path})
    return f"it only has files of type {_listed(kinds)}" if kinds else "it has no files"
