"""The files around the code agree with it: workflows, the site, the version, the extras."""

import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

import forebay
import forebay.torch

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _run_lines(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_that_exist(workflow: Path) -> None:
    lines = _run_lines(workflow)
    assert lines
    for line in lines:
        program, *targets = [word for word in line.split() if "=" not in word]
        assert program == "make"
        assert set(targets) <= TARGETS, line


def test_the_workflows_test_every_version_that_is_stated() -> None:
    stated = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    tested = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert tested["jobs"]["test"]["strategy"]["matrix"]["python"] == stated
    assert PROJECT["project"]["requires-python"] == f">={stated[0]}"


def test_templates_and_hooks_are_yaml() -> None:
    for path in [*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".pre-commit-config.yaml"]:
        assert yaml.safe_load(path.read_text()), path


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert "version" in PROJECT["project"]["dynamic"]
    written = re.findall(
        r'^__version__ = "(.+?)"', (ROOT / "src" / "forebay" / "__init__.py").read_text(), re.MULTILINE
    )
    assert written == [forebay.__version__]
    assert f"\n## {forebay.__version__} — " in (ROOT / "CHANGELOG.md").read_text()


def test_the_site_has_every_page_and_its_reference_every_public_name() -> None:
    nav = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(nav) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    for module, page in ((forebay, "python.md"), (forebay.torch, "torch.md")):
        named = re.findall(r"^::: (\S+)", (ROOT / "docs" / "reference" / page).read_text(), re.MULTILINE)
        assert sorted(named) == sorted(f"{module.__name__}.{name}" for name in module.__all__)


def test_an_error_names_an_extra_that_exists() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for named in re.findall(r"forebay\[([a-z,]+)\]", path.read_text()):
            assert set(named.split(",")) <= extras, f"{path}: {named}"


def test_the_wheel_check_tries_every_extra() -> None:
    tools = {"dev", "docs", "release"}  # for development: nothing of the wheel needs them
    tried = re.search(r"^EXTRAS = \((.*?)\)", (ROOT / "tools" / "check_wheel.py").read_text(), re.MULTILINE | re.DOTALL)
    assert tried is not None
    names = set(re.findall(r'"(\w+)"', tried[1]))
    in_makefile = re.search(r"^EXTRAS \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert in_makefile is not None
    assert set(in_makefile[1].split(",")) == names
    assert names - {"core"} == set(PROJECT["project"]["optional-dependencies"]) - tools
    assert set(runpy.run_path(str(ROOT / "tools" / "smoke.py"))["SMOKES"]) == names - {"core"}


@pytest.mark.parametrize(
    ("tag", "rejected"),
    [
        ("cp311-abi3-linux_x86_64", True),
        ("cp311-abi3-manylinux_2_17_x86_64.linux_aarch64", True),
        ("cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64", False),
        ("cp311-abi3-macosx_11_0_universal2", False),
        ("py3-none-any", False),
    ],
)
def test_a_wheel_with_a_tag_that_pypi_rejects_is_an_error(tag: str, rejected: bool) -> None:
    check = [
        sys.executable,
        str(ROOT / "tools" / "check_wheel.py"),
        f"dist/forebay-0.1.0-{tag}.whl",
        "--extras",
        "none",
    ]
    ran = subprocess.run(check, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ("PyPI rejects the tag 'linux_" in ran.stderr) is rejected
    assert ("unknown extra" in ran.stderr) is not rejected


def test_the_workflow_uploads_a_wheel_for_every_platform() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "wheel.yml").read_text())["jobs"].values()
    artifacts = [
        step["with"]["name"] for job in jobs for step in job["steps"] if "upload-artifact" in step.get("uses", "")
    ]
    assert artifacts == ["dist-linux", "dist-macos", "dist-arm"]
    target = re.search(r"^wheel:.*?\n\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert target is not None
    assert "auditwheel repair" in target[0]


def test_ci_runs_all_tests_but_the_long_ones_and_then_two_minutes_of_faults() -> None:
    steps = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert steps[0] == "set -euo pipefail"  # the first step that fails ends it
    assert steps[2:] == ["make test", "make test-slow", "make campaign"]
    on_github = [line.split()[1] for line in _run_lines(ROOT / ".github" / "workflows" / "test.yml")]
    assert {step.removeprefix("make ") for step in steps[2:]} <= set(on_github)
    target = re.search(r"^campaign:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target is not None
    assert target[1] == "$(BIN)/python -m tests.campaign --seed $(SEED) --minutes 2 --all"


def test_modules_of_tests_have_different_names() -> None:
    """pytest imports them by their file name alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_sizes_of_the_code_stay_within_their_limits() -> None:
    figures = runpy.run_path(str(ROOT / "tools" / "figures.py"))["figures"]()
    assert {name: sizes for name, sizes in list(figures.items())[1:] if sizes[0] > sizes[1]} == {}
