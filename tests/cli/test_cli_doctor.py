"""The doctor: what is installed, what the disk can do, and what is wrong with a cache, each with the next command."""

from pathlib import Path

import pytest
from tests.cli.running import build_lines, chunk_path, run

import forebay


def checks(ran: object, group: str) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in ran.json["checks"] if check["group"] == group}  # type: ignore[attr-defined]


def test_a_sound_installation_has_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    ran = run("doctor", "--json")
    assert forebay.__version__ in checks(ran, "Python")["forebay"]["detail"]
    assert checks(ran, "Libraries")["numpy"]["state"] == "ok"
    assert {"tokens", "images", "torch"} <= checks(ran, "Extras").keys()
    assert not {"dev", "docs", "release"} & checks(ran, "Extras").keys()
    assert checks(ran, "Disk")["writing"]["state"] == "ok"
    assert str(tmp_path) in checks(ran, "Disk")["space"]["detail"]
    assert list(tmp_path.iterdir()) == []
    assert "no problem found" in run("doctor").out


def test_libraries_that_are_missing_or_too_old_are_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    about = tmp_path / "site" / "forebay-9.dist-info"
    about.mkdir(parents=True)
    needs = ["numpy>=999", "no-such-library>=1", "soup>=2; extra == 'soups'", "rich>=1 ; extra == 'lines'"]
    lines = [*(f"Requires-Dist: {one}" for one in needs), ""]
    (about / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", "Name: forebay", "Version: 9", *lines]))
    monkeypatch.syspath_prepend(tmp_path / "site")
    ran = run("doctor", "--json", code=1)
    found = checks(ran, "Libraries")
    assert found["numpy"]["command"] == "pip install -U 'numpy>=999'"
    assert "is too old, >=999 is needed" in found["numpy"]["detail"]
    assert found["no-such-library"]["detail"] == "missing"
    extras = checks(ran, "Extras")
    assert (extras["soups"]["state"], extras["soups"]["detail"]) == ("note", "soup missing")
    assert extras["soups"]["command"] == "pip install -U 'forebay[soups]'"
    assert extras["lines"]["state"] == "ok"
    assert ran.error["message"] == "2 problems: numpy, no-such-library"
    assert ran.error["command"] == "pip install -U 'numpy>=999'"


def test_the_cache_may_be_a_store(tmp_path: Path):
    store = forebay.MemoryStore()
    report = forebay.doctor(store)
    assert [check.name for check in report.problems] == [store.address]
    assert repr(report) == f"DoctorReport({len(report.checks)} checks, problems: {store.address})"
    assert "there is no cache at" in report.problems[0].detail


def test_a_folder_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir("/proc")
    assert "a cache cannot be built here" in run("doctor", code=1).out


def test_what_is_wrong_with_a_cache_is_named_with_the_next_command(tmp_path: Path):
    root, source = build_lines(tmp_path)
    assert "chunks, 60 rows" in run("doctor", root).out
    chunk_path(root, 2).unlink()
    source.write_text("other\n")
    found = checks(run("doctor", root, "--json", code=1), "Cache")
    assert found["chunks of raw"]["detail"] == "1 chunk suspect or lost"
    assert found["chunks of raw"]["command"] == f"forebay repair {root}"
    assert found["source"]["command"] == f"forebay status {root}"
    ran = run("doctor", tmp_path / "nowhere", "--json", code=1)
    assert checks(ran, "Cache")[str(tmp_path / "nowhere")]["detail"] == f"there is no cache at '{tmp_path / 'nowhere'}'"
