"""Public names of a package that are imported when they are first used."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, for the imports in its `if TYPE_CHECKING:` block.

    Type checkers read the block; at run time it is parsed once (under a millisecond), so each name is written once.
    """
    with open(file, encoding="utf-8") as source:
        homes = dict(_imported(ast.parse(source.read())))

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'", name=name, obj=sys.modules[package])
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(homes[name]), name)

    def dir_() -> list[str]:
        return sorted({*homes, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return getattr_, dir_, sorted(homes)


def _imported(module: ast.Module) -> list[tuple[str, str]]:
    """(name, module) of the imports in `if TYPE_CHECKING:`."""
    blocks = [one for one in module.body if isinstance(one, ast.If) and getattr(one.test, "id", "") == "TYPE_CHECKING"]
    imports = [one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom)]
    return [(alias.name, str(one.module)) for one in imports for alias in one.names]
