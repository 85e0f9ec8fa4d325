"""The viewer on a cache in a bucket, and through a local tier."""

import json
from pathlib import Path

import pytest
from tests.viewer.test_view_security import ask, served

import forebay as fb
from forebay.cli.machine_verbs import through_tier
from forebay.viewer.page_records import ENDPOINTS
from forebay.viewer.web_app import Server

NOT_TOKENS = {"images", "image", "teacher"}


def answers(server: Server) -> dict[str, object]:
    """Every record of the cache that has one."""
    names = [name for name in ENDPOINTS if name not in NOT_TOKENS]
    query = "layer=tokens&chunk=1&row=3&text=one&path=a.jsonl"
    return {name: json.loads(ask(server, f"/api/0/{name}.json?{query}")[1]) for name in names}


@pytest.fixture
def root(bucket: str, tmp_path: Path) -> str:
    lines = "".join(json.dumps({"text": f"one two {number} " * 9}) + "\n" for number in range(60))
    (tmp_path / "a.jsonl").write_text(lines)
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64, chunk_rows=4)
    fb.build(f"{bucket}/cache", fb.sources.jsonl(tmp_path / "a.jsonl", text="text"), recipe, workers=0)
    return f"{bucket}/cache"


@pytest.mark.parametrize("tier", [False, True])
def test_every_record_of_a_cache_in_a_bucket(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: bool
) -> None:
    if tier:
        monkeypatch.setenv("FOREBAY_TIER", str(tmp_path / "tier"))
    with served(through_tier(root)) as server:  # type: ignore[arg-type]
        found = answers(server)
    assert not [name for name, record in found.items() if isinstance(record, dict) and "error" in record]
    assert found["summary"]["root"] == root  # type: ignore[index]
    assert set(found["chunks"]["layers"][0]["states"]) == {"p"}  # type: ignore[index]
    assert found["row"]["tokens"] == fb.open_cache(root)[3]["tokens"].tolist()  # type: ignore[index]
    times = [one["written"] for one in found["overview"]["generations"]]  # type: ignore[index]
    assert None not in times
    assert times == sorted(times)
    assert found["search"]["hits"]  # type: ignore[index]
    kept = list((tmp_path / "tier").rglob("*.safetensors"))
    assert bool(kept) == tier
