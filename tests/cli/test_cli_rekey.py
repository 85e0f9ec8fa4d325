"""`forebay rekey`: a key is added and changed after a check of every byte; it never stands on a command line."""

from pathlib import Path

import pytest
from tests.cli.running import Ran, build_lines, chunk_path, flip, run

import forebay as fb
from forebay.format.tensors import VARIABLE

FIRST, SECOND = "the first key of this test", "the second key of this test"


def keyed(monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    monkeypatch.delenv(VARIABLE) if key is None else monkeypatch.setenv(VARIABLE, key)


def rekey(root: Path, *words: object, code: int = 0) -> Ran:
    return run("rekey", root, *words, code=code)


def grown(tmp_path: Path) -> Path:
    """A cache with several generations."""
    root, _ = build_lines(tmp_path, "--end-chunk", 0)
    run("build", root, "--workers", 0)
    assert len(list((root / "generations").iterdir())) > 1
    return root


def test_a_key_is_added_to_every_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = grown(tmp_path)
    rows = len(fb.open_cache(root))
    numbers = sorted(int(path.stem) for path in (root / "generations").iterdir())
    keyed(monkeypatch, FIRST)
    report = rekey(root, "--json").json
    assert (report["tagged"], report["removed"]) == (numbers, {})
    for number in numbers:
        assert fb.open_cache(root, generation=number).generation.tagged
    assert len(fb.open_cache(root, digest=report["digest"], cache_id=report["cache_id"])) == rows
    run("verify", root, "--full")
    run("clean", root)
    run("repair", root, "--workers", 0)
    keyed(monkeypatch, None)
    assert "it is tagged" in run("info", root, code=1).err


@pytest.mark.parametrize("way", ["variable", "file"])
def test_a_key_is_changed_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    keyed(monkeypatch, FIRST)
    root = grown(tmp_path)
    monkeypatch.setenv("OLD", FIRST)
    monkeypatch.setenv("NEW", SECOND)
    (tmp_path / "key").write_text(f"{FIRST}\n")
    old = ["--old-key-env", "OLD"] if way == "variable" else ["--old-key-file", tmp_path / "key"]
    assert "generations signed with the new key" in rekey(root, *old, "--new-key-env", "NEW").out
    assert "was not made with the key" in run("verify", root, code=1).err
    keyed(monkeypatch, SECOND)
    run("verify", root)
    run("build", root, "--workers", 0)
    signed = {path: path.read_bytes() for path in (root / "generations").iterdir()}
    again = rekey(root, *old)
    assert "nothing changed: 2 generations already signed with this key" in again.out
    assert {path: path.read_bytes() for path in (root / "generations").iterdir()} == signed


def test_what_is_not_sound_is_not_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = grown(tmp_path)
    flip(chunk_path(root, 0), 4300)
    before = {path: path.read_bytes() for path in (root / "generations").iterdir()}
    keyed(monkeypatch, FIRST)
    assert "is not sound (layers/raw/000000.safetensors), and a key signs only what is" in rekey(root, code=1).err
    assert {path: path.read_bytes() for path in (root / "generations").iterdir()} == before


def test_an_older_generation_that_is_damaged_is_removed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = grown(tmp_path)
    flip(root / "generations/000000.safetensors", 4150)
    keyed(monkeypatch, FIRST)
    assert "0" in rekey(root, "--json").json["removed"]
    run("verify", root)


def test_a_wrong_old_key_and_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed(monkeypatch, FIRST)
    root = grown(tmp_path)
    monkeypatch.setenv("OLD", "a guess of 16 bytes")
    keyed(monkeypatch, SECOND)
    wrong = rekey(root, "--old-key-env", "OLD", code=1).err
    assert "its tag was made with neither the old key nor the new one; pass the key that the cache has now" in wrong
    assert "it is tagged; pass the key that the cache has now with --old-key-env or --old-key-file" in (
        rekey(root, code=1).err
    )
    assert "'ABSENT' is not set or empty" in rekey(root, "--old-key-env", "ABSENT", code=2).err
    both = ["--old-key-env", "OLD", "--old-key-file", __file__]
    assert "use one of them" in rekey(root, *both, code=2).err
    keyed(monkeypatch, None)
    assert f"'{VARIABLE}' is not set or empty" in rekey(root, code=2).err


def test_a_live_builder_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = grown(tmp_path)
    (root / "claims/raw").mkdir(parents=True, exist_ok=True)
    (root / "claims/raw/000007.1.json").write_text('{"owner": "0123456789ab-1-1", "host": "elsewhere", "pid": 1}')
    keyed(monkeypatch, FIRST)
    assert "says that a builder works on it" in rekey(root, code=1).err


def test_a_generation_of_another_key_below_the_newest_is_found_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a change of keys leaves it that was killed half-way."""
    root = grown(tmp_path)
    untagged = (root / "generations/000000.safetensors").read_bytes()
    keyed(monkeypatch, FIRST)
    rekey(root)
    (root / "generations/000000.safetensors").write_bytes(untagged)
    assert "it has no tag" in run("verify", root, code=1).out
    run("clean", root)
    run("repair", root, "--workers", 0)
    run("verify", root)
    assert not (root / "generations/000000.safetensors").exists()


def test_an_old_key_of_a_cache_without_a_tag_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = grown(tmp_path)
    monkeypatch.setenv("OLD", FIRST)
    keyed(monkeypatch, SECOND)
    assert "it carries no tag; leave --old-key-env and --old-key-file out" in (
        rekey(root, "--old-key-env", "OLD", code=1).err
    )


def test_an_empty_key_is_refused_and_a_short_one_signs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = grown(tmp_path)
    for key in (b"", b"15 bytes of key"):
        with pytest.raises(fb.errors.ForebayError, match=rf"the new key has {len(key)} bytes; use at least 16"):
            fb.rekey(root, new_key=key)
    with pytest.raises(fb.errors.ForebayError, match=r"the old key is empty"):
        fb.rekey(root, old_key=b"", new_key=FIRST.encode())
    keyed(monkeypatch, "short")
    assert "the new key has 5 bytes; use at least 16" in rekey(root, code=1).err
    assert not fb.rekey(root, old_key=None, new_key=b"16 bytes of key!").removed
    keyed(monkeypatch, "")
    for verb in ("verify", "info", "status"):
        assert f"{VARIABLE} is set but empty; set it to the key, or unset it" in run(verb, root, code=1).err


def test_a_build_with_a_short_key_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed(monkeypatch, "short")
    root, source = build_lines(tmp_path)
    report = fb.build(root, fb.sources.lines(source), fb.RawRecipe(chunk_bytes=400), workers=0)
    assert any(f"{VARIABLE} has only 5 bytes" in note for note in report.notes)
    keyed(monkeypatch, None)


def test_adding_a_key_changes_the_digest_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = grown(tmp_path)
    before = fb.summarize(root).digest
    keyed(monkeypatch, FIRST)
    shown = rekey(root).out
    assert before in shown
    assert "update pinned digests" in " ".join(shown.split())
    after = fb.summarize(root).digest
    assert after != before
    monkeypatch.setenv("OLD", FIRST)
    keyed(monkeypatch, SECOND)
    assert "pinned" not in rekey(root, "--old-key-env", "OLD").out
    assert fb.summarize(root).digest == after, "a key that is replaced by another changes only the tag"
