"""Print the sizes of the code and their limits: `python tools/figures.py`."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent
FUNCTION_LINES = 40
MODULE_LINES = 500
BROAD = {"Exception", "BaseException"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Tree:
    """The Python and C code below a folder."""

    root: Path

    @cached_property
    def modules(self) -> dict[Path, ast.Module]:
        return {path: ast.parse(path.read_text()) for path in sorted(self.root.rglob("*.py"))}

    @cached_property
    def lines(self) -> dict[Path, int]:
        return {path: len(path.read_text().splitlines()) for path in self.modules}

    @property
    def c_lines(self) -> int:
        return sum(len(path.read_text().splitlines()) for path in self.root.rglob("*.c"))

    @property
    def long_functions(self) -> list[str]:
        return [
            f"{path.relative_to(self.root)}:{node.name} {length(node)}"
            for path, tree in self.modules.items()
            for node in ast.walk(tree)
            if isinstance(node, Function) and length(node) > FUNCTION_LINES
        ]

    @property
    def long_modules(self) -> list[str]:
        return [f"{path.relative_to(self.root)} {count}" for path, count in self.lines.items() if count > MODULE_LINES]

    @property
    def broad_handlers(self) -> list[str]:
        return [f"{path.relative_to(self.root)}:{line}" for path, tree in self.modules.items() for line in broad(tree)]

    @property
    def error_classes(self) -> list[str]:
        tree = self.modules[self.root / "errors.py"]
        return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]

    def package_lines(self) -> dict[str, int]:
        """Lines per folder at the top; modules at the top count as one."""
        packages: dict[str, int] = {}
        for path, count in self.lines.items():
            first = path.relative_to(self.root).parts
            name = first[0] if len(first) > 1 else "(top)"
            packages[name] = packages.get(name, 0) + count
        return dict(sorted(packages.items(), key=lambda item: -item[1]))


def length(function: Function) -> int:
    """Lines of a function, of its docstring only the first."""
    docstring = ast.get_docstring(function, clean=False) or ""
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring.count("\n")


def broad(tree: ast.Module) -> Iterator[int]:
    """Lines that catch every exception and do not raise it again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            is_broad = node.type is None or names(node.type) & BROAD
            if is_broad and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None):
                yield node.lineno
        elif (
            isinstance(node, ast.Call) and names(node.func) == {"suppress"} and any(names(a) & BROAD for a in node.args)
        ):
            yield node.lineno


def names(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def concepts(root: Path = ROOT) -> list[str]:
    """The words of the glossary, one row each."""
    page = root / "docs" / "glossary.md"
    return re.findall(r"^\| \*\*(.+?)\*\*", page.read_text(), re.MULTILINE) if page.exists() else []


def figures(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """What is measured: its value now and its limit."""
    source, tests = Tree(root / "src" / "forebay"), Tree(root / "tests")
    return {
        "Python lines in src": (sum(source.lines.values()), 51_500),
        "C lines": (source.c_lines, 1_400),
        "core concepts (docs/glossary.md)": (len(concepts(root)), 85),
        "error classes": (len(source.error_classes), 26),
        f"functions over {FUNCTION_LINES} lines": (len(source.long_functions), 0),
        f"modules over {MODULE_LINES} lines": (len(source.long_modules), 0),
        "broad except": (len(source.broad_handlers), 15),
        "test lines": (sum(tests.lines.values()), 58_000),
    }


def main() -> None:
    for name, (value, limit) in figures().items():
        print(f"{name:<34}{value:>8,}   at most {limit:>6,}{'' if value <= limit else '   over'}")
    source = Tree(ROOT / "src" / "forebay")
    print("\nlines per package:", ", ".join(f"{name} {count:,}" for name, count in source.package_lines().items()))
    for title, places in (
        (f"functions over {FUNCTION_LINES} lines", source.long_functions),
        (f"modules over {MODULE_LINES} lines", source.long_modules),
        ("broad except", source.broad_handlers),
    ):
        print(f"\n{title}:", ", ".join(places) or "none")


if __name__ == "__main__":
    main()
