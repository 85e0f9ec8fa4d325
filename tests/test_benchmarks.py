"""Benchmarks run, and the documented figures are those that a run wrote."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.lib.result import Result, compared
from benchmarks.report import DOCS, load_runs, results_section, section_of
from tests.helpers.processes import REPOSITORY, script_environment


def test_ratio_is_the_median_of_rounds_and_decides_the_goal() -> None:
    result = compared("a", "work", "peer", [10, 40, 30], [10, 20, 10], unit="rows/s", at_least=2.5)
    assert result.ratio == 2
    assert result.goal == "≥ 2.5, missed"
    assert Result(case="a", work="wait", unit="ms", ours=0.5, at_most=1.0).is_met


@pytest.mark.skipif(not (DOCS / "benchmarks.json").exists(), reason="no run was recorded")
def test_documented_tables_are_those_of_the_recorded_runs() -> None:
    assert section_of((DOCS / "benchmarks.md").read_text()) == results_section(load_runs())


@pytest.mark.slow
def test_a_quick_run_prints_a_table_and_writes_its_results(tmp_path: Path) -> None:
    arguments = ["read.rows", "--quick", "--rounds", "2", "--folder", tmp_path, "--json", tmp_path / "results.json"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)], env=script_environment(), cwd=REPOSITORY,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (recorded,) = load_runs(tmp_path / "results.json")
    assert {result.case for result in recorded.results} == {"read.rows"}
    assert all(result.work in run.stdout for result in recorded.results)
