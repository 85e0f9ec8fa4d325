"""Arrows point one way: the table is the picture."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.helpers.statements import parsed

import forebay

SRC = Path(forebay.__file__).parent

WORDS = {"errors", "columns", "source", "failure_reasons", "file_table", "recipe", "fields", "records"}
INDEX = WORDS | {"store", "format", "cache"}  # bytes, and what a cache says it holds
CORE = INDEX | {"read", "engine", "building"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "kernels": set(),
    "records": set(),
    "fields": {"errors"},
    "columns": {"errors"},
    "source": {"errors"},
    "file_table": {"source"},
    "failure_reasons": {"source"},
    "recipe": {"errors", "columns", "source", "fields"},
    "exports": set(),
    "store": {"errors"},
    "format": WORDS | {"store"},
    "cache": WORDS | {"store", "format"},  # knows no kind of data
    "read": INDEX | {"kernels", "order", "tokens"},  # of tokens, what decodes a row for `Cache.text`
    "engine": {"errors", "recipe", "store"},
    "building": INDEX | {"read", "engine", "kinds"},
    "globs": set(),
    "hub": {"errors", "globs", "store"},
    "sources": WORDS | {"exports", "globs", "kernels", "hub", "store"},  # of store, the objects of a bucket
    "raw": WORDS,
    "tokens": WORDS | {"kernels", "hub", "format"},  # reads its constants as tensors
    "masks": {"exports", "kernels", "errors", "fields"},
    "order": {"kernels", "errors", "columns"},  # functions of numbers
    "images": WORDS | {"exports", "masks"},
    "chat": INDEX
    | {"exports", "kernels", "read", "tokens", "masks", "sources"},  # reads a built cache to pack it again
    "teachers": INDEX | {"exports", "read", "hub", "masks", "order"},  # reads a cache; `torch` runs the models
    "kinds": WORDS | {"store"},  # of store, whether a root is a URL
    "named_sources": INDEX | {"building", "kinds", "sources"},
    "api": CORE | {"feeding", "kinds", "named_sources", "preview"},  # of preview, the progress bar
    "installation": INDEX | {"api", "kernels", "preview"},  # of preview, its sentences
    "testing": CORE | {"raw"},  # the simplest recipe
    "row_cache": INDEX | {"building", "images"},  # decoded images by key, without a build
    "feeding": INDEX | {"read", "order", "masks"},  # numpy only
    "torch": INDEX | {"exports", "kernels", "read", "feeding", "images", "masks", "order", "teachers", "tokens"},
    "compat": CORE | {"api", "images", "order", "raw", "sources", "teachers", "torch"},
    "preview": INDEX | {"read", "building", "kinds", "images", "masks", "teachers", "tokens"},
    # The same records as the command line, from the same rooms; it prints nothing and writes to no cache.
    "viewer": INDEX
    | {"read", "building", "api", "kinds", "preview", "images", "masks", "order", "feeding", "teachers", "tokens"},
    "__main__": {"cli"},
    "cli": CORE
    | {
        "api",
        "feeding",
        "installation",
        "kinds",
        "images",
        "named_sources",
        "preview",
        "raw",
        "sources",
        "teachers",
        "tokens",
        "viewer",
    },
}
ONLY_IN = {
    "torch": {"torch", "compat"},
    "PIL": {"images", "preview"},
    "click": {"cli"},
    "rich": {"cli", "preview"},  # preview: the progress bar, which Python and the command line share
    "pytest": {"testing"},
    "huggingface_hub": {"hub"},
    "httpx2": {"hub"},
    "lmdb": {"row_cache"},
    "obstore": {"store"},
    "ray": {"engine"},
    "uvicorn": {"viewer"},
    "jinja2": {"chat"},
}


def _room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def _modules() -> list[Path]:
    return [path for path in SRC.rglob("*.py") if path != SRC / "__init__.py"]


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_room_imports_only_what_the_table_allows() -> None:
    wrong = []
    for path in _modules():
        room = _room(path)
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "forebay" and len(parts) > 1 and parts[1] not in MAY_IMPORT[room] | {room}:
                wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert not wrong


def test_the_table_names_exactly_the_rooms_there_are() -> None:
    assert {_room(path) for path in _modules()} == set(MAY_IMPORT)


def test_the_table_has_no_cycle() -> None:
    order: list[str] = []
    left = dict(MAY_IMPORT)
    while left:
        free = [room for room, below in left.items() if below <= set(order)]
        assert free, f"a cycle among {sorted(left)}"
        order += free
        left = {room: below for room, below in left.items() if room not in free}


def test_heavy_libraries_stay_in_their_room() -> None:
    wrong = []
    for path in _modules():
        for name in _imports(path):
            library = name.split(".")[0]
            if library in ONLY_IN and _room(path) not in ONLY_IN[library]:
                wrong.append(f"{path.relative_to(SRC)} imports {name}")
    assert not wrong


def test_only_few_modules_read_the_environment() -> None:
    reads = re.compile(r"\b(environ|environb|getenv)\b")
    readers = {str(path.relative_to(SRC)) for path in _modules() if reads.search(path.read_text())}
    # engine/local.py reads none of it: it hands the whole of it on to its workers; engine/base.py sets some for Ray.
    assert {reader for reader in readers if not reader.startswith("cli/")} == {
        "format/tensors.py",
        "engine/local.py",
        "engine/base.py",
        "store/bucket_client.py",  # the endpoint, which obstore reads too
        "torch/ranks.py",
    }


def test_hooks_are_declared_and_never_asked_for_by_name() -> None:
    """A caller that asks whether a recipe, a source or a job has some member would not notice that it is misspelled.

    What differs between platforms and their libraries is asked for by name; `recipe.hooks_of` does it for all.
    """
    rooms = (
        "api",
        "installation",
        "kinds",
        "source",
        "building",
        "cache",
        "engine",
        "row_cache",
        "cli",
        "sources",
        "preview",
        "teachers",
    )
    asked = [
        f"{path.relative_to(SRC)}:{call.lineno} asks {ast.unparse(call)}"
        for path in _modules()
        if _room(path) in rooms
        for call in _nodes(path)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")
        if isinstance(call.args[1], ast.Constant) and not str(call.args[1].value).startswith("__")
    ]
    assert [line for line in asked if not re.search(r"asks \w+\((os|full), ", line)] == []
