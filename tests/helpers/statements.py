"""The statements of a module, without the ten times as many expressions in them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A module, class, function or other statement, and all statements in it, however deep.

    >>> [type(each).__name__ for each in statements(ast.parse("try: import a\\nexcept E: raise B(lambda: 1)"))]
    ['Module', 'Try', 'Import', 'ExceptHandler', 'Raise']
    """
    yield node
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, name, ()):
            yield from statements(inner)
