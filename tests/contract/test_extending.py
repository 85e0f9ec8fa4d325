"""What docs/extending.md shows keeps the contracts, and stays short."""

import ast
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import forebay as fb
from forebay.testing import SourceContract

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
MOST_LINES = 40
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def page() -> ModuleType:
    """The classes and functions of the page in a module, so that they can be pickled."""
    module = sys.modules["docs_extending"] = ModuleType("docs_extending")
    for block in BLOCKS:
        if "\nclass " in block:
            tree = ast.parse(block)
            tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS)]
            exec(compile(tree, str(PAGE), "exec"), module.__dict__)
    return module


PAGE_NAMES = page()


@pytest.mark.parametrize("name", ["LetterRecipe", "RecordSource"])
def test_each_example_is_short(name):
    (block,) = (block for block in BLOCKS if f"class {name}" in block)
    lines = [line for line in block[block.index(f"class {name}") :].splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES


class TestLetters(PAGE_NAMES.TestLetters):
    test_equal_samples_have_one_identity_of_16_bytes = None


class TestRecords(SourceContract):
    test_bad_content_is_a_failure_with_an_id_and_a_reason_whatever_the_cuts = None
    suffix = ".bin"
    size = 8

    def open_source(self, folder: Path) -> fb.Source:
        return PAGE_NAMES.RecordSource(os.fspath(folder), self.size)

    def stored(self, content: bytes) -> bytes:
        return content + b"." * (-len(content) % self.size)

    def samples_of(self, content: bytes) -> list[bytes]:
        stored = self.stored(content)
        return [stored[at : at + self.size] for at in range(0, len(stored), self.size)]
