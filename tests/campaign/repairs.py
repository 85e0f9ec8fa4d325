"""A cache with an update and a layer above the base, with and without a key, and copies of it to repair from."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.campaign.syscalls import Strike, Traced, run_traced
from tests.campaign.trial import LEASE_SECONDS, Ending, run_call
from tests.campaign.worlds import chunk_digests
from tests.helpers.layer_recipes import LengthLayer, LineRecipe, write_lines

import forebay as fb
from forebay.errors import ForebayError
from forebay.format.tensors import VARIABLE

KEY = "0123456789abcdef" * 4


@dataclass(frozen=True)
class LayeredWorld:
    """A pristine cache, copies of it by name, and the content of its rows."""

    cache: Path
    base: Path  # without its layer
    copies: dict[str, Path]  # fresh: as it is; older: before the update; diverged: updated with another file
    rows: frozenset[str] = field(repr=False)
    files: dict[str, str] = field(repr=False)  # the SHA-256 of every chunk, by key
    keyed: bool


@cache
def layered_world(folder: Path, keyed: bool) -> LayeredWorld:
    """Numbers with the layer `length` on top, one file of them added later."""
    place = folder / ("keyed" if keyed else "layered")
    _run(lambda: _make(place), keyed, seconds=120.0)
    answer = _run(lambda: read_all(place / "cache"), keyed).answer
    assert len(answer["rows"]) == 40, answer
    copies = {name: place / name for name in ("fresh", "older", "diverged")}
    files = chunk_digests(place / "cache")
    return LayeredWorld(place / "cache", place / "base", copies, frozenset(answer["rows"]), files, keyed)


def _make(place: Path) -> None:
    root, source = place / "cache", fb.sources.lines(place / "raw")
    write_lines(place / "raw/a.txt", 0, 24)
    fb.build(root, source, LineRecipe(), workers=0)
    fb.copy(root, place / "older")
    shutil.copytree(place / "raw", place / "other")
    shutil.copytree(root, place / "diverged")
    write_lines(place / "other/z.txt", 900, 8)
    fb.update(place / "diverged", fb.sources.lines(place / "other"), recipe=LineRecipe(), workers=0)
    write_lines(place / "raw/b.txt", 24, 16)
    fb.update(root, source, recipe=LineRecipe(), workers=0)
    shutil.copytree(root, place / "base")
    fb.build(root, None, LengthLayer(), workers=0)
    fb.copy(root, place / "fresh")


def _run(call: Callable[[], Any], keyed: bool, seconds: float = 20.0) -> Ending:
    return run_call(lambda: _in_environment(call, keyed), seconds=seconds)


def _in_environment(call: Callable[[], Any], keyed: bool) -> Any:
    if keyed:
        os.environ[VARIABLE] = KEY
    return call()


def read_all(root: Path) -> dict[str, Any]:
    """Every row that can be read, over the columns of all layers, with constants; and the errors met."""
    rows, errors = [], []
    try:
        opened = fb.open_cache(root)
        opened = fb.open_cache(root, layers=[name for name in opened.layers if name != "numbers"])
        constants = {layer: opened.constants(layer) for layer in opened.layers}
        seen = sorted(
            f"{layer}.{name}={values.tolist()}" for layer in constants for name, values in constants[layer].items()
        )
        for number in range(len(opened)):
            try:
                columns = opened.read([number])
                row = {name: np.asarray(columns[name][0]).tolist() for name in sorted(columns)}
                rows.append(f"{row} {seen}" if "length" in columns else f"{number} without its layer")
            except ForebayError as error:
                errors.append(type(error).__name__)
    except ForebayError as error:
        errors.append(type(error).__name__)
    return {"rows": rows, "errors": errors}


def read_layered(world: LayeredWorld, root: Path) -> Ending:
    return _run(lambda: read_all(root), world.keyed)


def verify_layered(world: LayeredWorld, root: Path) -> Ending:
    def verify() -> Any:
        try:
            return {"sound": fb.verify(root, full=True).sound, "error": ""}
        except ForebayError as error:
            return {"sound": False, "error": str(error)}

    return _run(verify, world.keyed)


def repair_both(world: LayeredWorld, root: Path, copy: Path | None) -> Ending:
    """Repair with the recipe of the base, then with that of the layer; what failed, or the error."""
    return _run(lambda: _repair(root, copy), world.keyed)


def _repair(root: Path, copy: Path | None) -> dict[str, str]:
    failed: dict[str, str] = {}
    for recipe in (LineRecipe(), LengthLayer()):
        try:
            failed = dict(fb.repair(root, recipe=recipe, copy=copy, workers=0).failed)
        except ForebayError as error:
            failed = {"": str(error)}
    return failed


def call_layered(world: LayeredWorld, name: str, root: Path) -> Ending:
    """Build, drop or repair the layer; what a repair could not do is an error."""
    return _run(lambda: _call(world, name, root), world.keyed)


def strike_layered(world: LayeredWorld, name: str, root: Path, at: int) -> Traced:
    """As `call_layered`, killed as a system call on the cache begins."""
    return run_traced(lambda: _in_environment(lambda: _call(world, name, root), world.keyed), root, Strike(at))


def _call(world: LayeredWorld, name: str, root: Path) -> None:
    if name == "build":
        fb.build(root, None, LengthLayer(), workers=0, lease_seconds=LEASE_SECONDS)
    elif name == "repair":
        if failed := _repair(root, world.copies["fresh"]):
            raise ForebayError(f"{failed}")
    elif "length" in fb.open_cache(root).layers:
        fb.drop(root, "length")
