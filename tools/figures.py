"""Print the figures of the source tree: `python tools/figures.py [FOLDER]` (src/forebay unless another is named).

Files and lines, the median file, file and class names that occur more than once, functions per file and their length,
and function bodies that are written twice.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

SHOWN = 12
TWIN_STATEMENTS = 3  # a shorter body is alike by chance

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(root: Path) -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    lines = {path: len(path.read_text().splitlines()) for path in trees}
    functions = {path: list(functions_of(tree)) for path, tree in trees.items()}
    lengths = [length(function) for found in functions.values() for function in found]
    comments = sum(line.lstrip().startswith("#") for path in trees for line in path.read_text().splitlines())

    print(f"files                      {len(trees):>7,}")
    print(
        f"lines                      {sum(lines.values()):>7,}   {comments / sum(lines.values()):.1%} of them comments"
    )
    print(f"lines of a file            {median(lines.values()):>7,.0f}   median; {outside(lines)}")
    print(f"functions                  {len(lengths):>7,}   {len(lengths) / len(trees):.1f} per file")
    print(
        f"lines of a function        {median(lengths):>7,.0f}   median; {share_within(lengths, 30):.0%} have at most 30"
    )
    several("file names twice or more", repeated(path.name for path in trees if path.stem[:2] != "__"))
    several("class names twice or more", repeated(name for tree in trees.values() for name in classes_of(tree)))
    several("function bodies twice", twins(functions, root))
    rooms = Counter(path.relative_to(root).parts[0].removesuffix(".py") for path in trees)
    several("rooms", {name: count for name, count in rooms.most_common() if (root / name).is_dir()}, shown=99)


def outside(lines: dict[Path, int]) -> str:
    return f"{sum(n < 40 for n in lines.values())} files below 40, {sum(n > 350 for n in lines.values())} above 350"


def functions_of(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def classes_of(tree: ast.Module) -> Iterator[str]:
    return (node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def share_within(lengths: list[int], limit: int) -> float:
    return sum(one <= limit for one in lengths) / len(lengths)


def repeated(names: Iterator[str]) -> dict[str, int]:
    return {name: count for name, count in Counter(names).most_common() if count > 1}


def twins(functions: dict[Path, list[Function]], root: Path) -> dict[str, int]:
    """Bodies that are equal but for their docstrings, by the places they are in."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, found in functions.items():
        for function in found:
            body = function.body[1:] if ast.get_docstring(function) is not None else function.body
            if len(body) >= TWIN_STATEMENTS:
                places["\n".join(ast.dump(statement) for statement in body)].append(
                    f"{path.relative_to(root)}:{function.name}"
                )
    return {" = ".join(same): len(same) for same in places.values() if len(same) > 1}


def several(title: str, counted: dict[str, int], shown: int = SHOWN) -> None:
    listed = ", ".join(f"{name} {count}" for name, count in list(counted.items())[:shown])
    more = f", and {len(counted) - shown} more" if len(counted) > shown else ""
    print(f"{title:<27}{len(counted):>7,}   {listed}{more}".rstrip())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "src" / "forebay")
