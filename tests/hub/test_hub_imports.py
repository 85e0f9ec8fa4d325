"""The hub is an extra: nothing else needs it, and without it the error is the install line."""

import subprocess
import sys

import pytest


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("library", ["huggingface_hub", "pyarrow"])
def test_a_missing_library_is_named_with_its_install_line(library):
    code = f"import sys; sys.modules[{library!r}] = None\n"
    code += "import forebay as fb\ntry: fb.sources.hub('org/set')\nexcept fb.errors.ForebayError as error: print(error)"
    said = run(code)
    assert said.startswith(f"'{library}' is not installed")
    assert "pip install 'forebay[" in said


def test_other_sources_do_not_import_it():
    code = "import sys, forebay as fb; fb.sources.lines, fb.build; "
    assert run(code + "print([n for n in ('huggingface_hub', 'httpx2', 'pyarrow') if n in sys.modules])") == "[]"
