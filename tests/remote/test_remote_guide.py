"""Every block of docs/guide-remote.md runs against a service on loopback, section by section."""

import re
import shlex
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.helpers.image_caches import sample
from tests.remote.servers import (
    azure_environment,
    gcs_environment,
    make_container,
    request,
    s3_environment,
)

from forebay.store import open_store

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "guide-remote.md"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SECTIONS = re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)[1:]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for number in range(2):
        lines = (f'{{"text": "document {line} of part {number}"}}\n' for line in range(2000))
        (tmp_path / "data" / f"part-{number}.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_blocks(sections, names) -> int:
    ran = 0
    for section in sections:
        for language, block in BLOCK.findall(section):
            ran += 1
            if language == "python":
                exec(compile(block, f"guide-remote.md: {block.splitlines()[0]}", "exec"), names)
            else:
                for line in block.splitlines():
                    run(*shlex.split(line.removeprefix("$ forebay ")))
    return ran


def set_environment(monkeypatch, values) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_the_blocks_for_s3_run(s3, folder, monkeypatch):
    set_environment(monkeypatch, s3_environment(s3))
    request("PUT", f"{s3}/my-bucket")
    for path in sorted((folder / "data").iterdir()):
        open_store("s3://my-bucket/raw").replace(path.name, [path.read_bytes()])
    open_store("s3://my-bucket/photos").replace("a.png", [sample(0).data.content])
    names = {"__name__": "docs_guide_remote"}
    assert run_blocks([one for one in SECTIONS if not one.startswith(("Google", "Azure"))], names) >= 5


def test_the_blocks_for_google_run(gcs, folder, monkeypatch):
    set_environment(monkeypatch, gcs_environment(gcs, str(folder)))
    request("PUT", f"{gcs}/my-bucket")
    assert run_blocks([one for one in SECTIONS if one.startswith("Google")], {}) == 1


def test_the_blocks_for_azure_run(azure, folder, monkeypatch):
    set_environment(monkeypatch, azure_environment(azure))
    make_container(azure, "my-container")
    assert run_blocks([one for one in SECTIONS if one.startswith("Azure")], {}) == 1
