"""Every Python block of the README and the docs runs; blocks of one page share their names, in order."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for part in range(3):
        lines = [f'{{"text": "document {number} of part {part}"}}\n' for number in range(2000)]
        (tmp_path / "data" / f"part-{part}.jsonl").write_text("".join(lines))
    names: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for number, block in enumerate(_blocks(page)):
        exec(compile(block, f"{page.name} block {number}", "exec"), names)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_draws_the_tree_as_it_is() -> None:
    text = (ROOT / "README.md").read_text()
    rooms = {path.name for path in (ROOT / "src" / "forebay").iterdir() if not path.name.startswith("_")}
    missing = [room for room in rooms - {"py.typed"} if room not in text]
    assert not missing
