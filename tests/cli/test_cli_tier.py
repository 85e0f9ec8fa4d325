"""`forebay warm` fills a tier and goes on where it stopped; `forebay tier` shows, checks and empties one."""

import os
import signal
import subprocess
from pathlib import Path

import lmdb
import pytest
from tests.cli.running import COMMAND, run, run_process, wait_until
from tests.tiers.pictures import RECIPE, assert_same_rows, fresh_rows, write_pictures

import forebay as fb
from forebay.errors import WarmingFailed
from forebay.tiers import CachedImages, summarize_tier, warm
from forebay.tiers.environment import KEY_CHECK


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "photos")


def test_a_warmed_tier_gives_every_row_to_images_of_the_same_recipe(photos, tmp_path):
    tier = tmp_path / "tier"
    first = run_process("warm", photos, "--l2", tier, "--size", 32, "--workers", 2, "--json").json
    assert (first["made"], first["present"], first["samples"], first["left"]) == (12, 0, 12, 0)
    source = fb.sources.images(photos)
    with CachedImages(source, RECIPE, l2=tier) as images:
        assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
        assert images.statistics().l2_hits == 12
    again = run("warm", photos, "--l2", tier, "--size", 32, "--workers", 0, "--json").json
    assert (again["made"], again["present"], again["written_bytes"]) == (0, 12, 0)


def test_what_is_no_image_is_told_by_reason_with_an_example_and_the_rest_is_kept(photos, tmp_path):
    (photos / "00003.png").write_bytes(b"<html>")
    ran = run("warm", photos, "--l2", tmp_path / "tier", "--size", 32, "--workers", 0)
    assert "11 built, 0 already present" in ran.out
    assert "not-an-image" in ran.out
    assert "'00003.png'" in ran.out


def test_a_tier_that_takes_no_more_ends_the_warming_with_exit_code_1(photos, tmp_path):
    words = ["warm", photos, "--l2", tmp_path / "tier", "--workers", 0, "--max-bytes"]
    ran = run(*words, "40kB", "--json", "--size", 64, code=1)
    assert sum(ran.json["dropped"].values()) > 0
    assert "reached 40,000 bytes" in run(*words, "40kB", "--size", 64, code=1).out
    assert run(*words, "1GB", "--json", "--size", 64).json["dropped"] == {}


def test_a_worker_that_is_lost_is_replaced_and_its_samples_are_tried_again(photos, tmp_path):
    source, tier = fb.sources.images(write_pictures(tmp_path / "many", 200)), tmp_path / "tier"
    killed: list[int] = []

    def kill_one(progress: fb.Progress) -> None:
        if progress.done and not killed:
            killed.append(progress.pids[0])
            os.kill(progress.pids[0], signal.SIGKILL)

    report = warm(source, RECIPE, tier, workers=2, on_progress=kill_one)
    assert [f"process {pid}: killed by SIGKILL" in death for pid, death in zip(killed, report.deaths, strict=True)]
    assert (report.complete, report.left) == (True, 0)
    assert summarize_tier(str(tier)).values == 200


def test_samples_that_cannot_be_read_again_and_again_end_the_warming_by_number(photos, tmp_path):
    with pytest.raises(WarmingFailed, match=r"samples 0 to 11 .*no row of mine.*run the same command"):
        warm(fb.sources.images(photos), FaultyRecipe(), tmp_path / "tier", workers=0)


class FaultyRecipe(fb.ImageRecipe, frozen=True, kw_only=True):
    """Fails in a way that no recipe should."""

    def make_stored(self, sample: fb.Sample):
        raise RuntimeError("no row of mine")


def test_a_warming_that_was_stopped_goes_on(tmp_path):
    photos = write_pictures(tmp_path / "photos", 400)
    tier = tmp_path / "tier"
    process = subprocess.Popen(
        [*COMMAND, "warm", str(photos), "--l2", str(tier), "--size", "32", "--workers", "1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: (tier / "data.mdb").exists() and summarize_tier(str(tier)).values > 0, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "stopped; run the same command to start again" in err
    kept = summarize_tier(str(tier)).values
    assert 0 < kept < 400
    report = run("warm", photos, "--l2", tier, "--size", 32, "--workers", 0, "--json").json
    assert (report["made"] + report["present"], report["present"]) == (400, kept)


def test_stats_verify_and_clear(photos, tmp_path):
    tier = tmp_path / "tier"
    run("warm", photos, "--l2", tier, "--size", 32, "--workers", 0)
    run("warm", photos, "--l2", tier, "--size", 16, "--workers", 0)
    stats = run("tier", "stats", tier, "--json").json
    assert (stats["values"], stats["tagged"], stats["unreadable"]) == (24, 0, 0)
    assert [share["values"] for share in stats["recipes"]] == [12, 12]
    assert stats["bytes"] < stats["file_bytes"] == os.path.getsize(tier / "data.mdb")
    assert "24 values" in run("tier", "stats", tier).out

    assert "24 values" in run("tier", "verify", tier).out
    key = damage(tier)
    ran = run("tier", "verify", tier, code=1)
    assert "not sound" in ran.out
    assert "checksum" in ran.out
    [bad] = run("tier", "verify", tier, "--json", code=1).json["bad"]
    assert (bad["key"], bad["reason"]) == (key.hex(), "checksum")

    assert "24 values removed" in run("tier", "clear", tier).out
    assert "there is no tier of rows in it" in run("tier", "stats", tier, code=1).err


def damage(tier: Path) -> bytes:
    """Flip a bit of the last value."""
    with lmdb.open(str(tier), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        cursor = transaction.cursor()
        cursor.last()
        if len(cursor.key()) != 16:
            cursor.prev()
        key, value = cursor.item()
        transaction.put(key, value[:-20] + bytes([value[-20] ^ 1]) + value[-19:])
    return key


def test_a_value_under_the_name_of_another_is_not_sound(photos, tmp_path):
    tier = tmp_path / "tier"
    run("warm", photos, "--l2", tier, "--size", 32, "--workers", 0)
    with lmdb.open(str(tier), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        [*_, value] = [bytes(value) for key, value in transaction.cursor() if len(key) == 16]
        transaction.put(bytes(16), value)
    [bad] = run("tier", "verify", tier, "--json", code=1).json["bad"]
    assert (bad["key"], bad["reason"]) == ("00" * 16, "identity")


def test_a_tier_with_a_key_is_verified_with_it_only(photos, tmp_path, monkeypatch):
    tier = tmp_path / "tier"
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "a secret")
    run("warm", photos, "--l2", tier, "--size", 32, "--workers", 0)
    assert run("tier", "stats", tier, "--json").json["tagged"] == 12
    run("tier", "verify", tier)
    monkeypatch.delenv("FOREBAY_HMAC_KEY")
    assert {bad["reason"] for bad in run("tier", "verify", tier, "--json", code=1).json["bad"]} == {"key-needed"}


def test_a_tier_with_a_key_is_not_warmed_without_it(photos, tmp_path, monkeypatch):
    """Nobody who has the key would take the rows, and nobody else can read those that are there."""
    tier = tmp_path / "tier"
    words = ["warm", photos, "--l2", tier, "--workers", 0, "--size"]
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "a secret")
    run(*words, 32)
    monkeypatch.delenv("FOREBAY_HMAC_KEY")
    for size in (32, 16):
        ran = run(*words, size, code=1)
        assert "FOREBAY_HMAC_KEY is not set; set FOREBAY_HMAC_KEY to the key of the tier" in ran.err
        assert "built" not in ran.out
    with lmdb.open(str(tier), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        assert transaction.delete(KEY_CHECK)  # as a tier of an earlier version has none
    assert "FOREBAY_HMAC_KEY is not set" in run(*words, 32, code=1).err
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "a secret")
    assert run(*words, 32, "--json").json["present"] == 12


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["warm", "photos"], "Pass --tier DIR, or set FOREBAY_TIER, to fetch chunks of a cache; or --l2 PATH"),
        (["warm", "--l2", "tier"], "Missing argument 'SOURCE...'"),
        (["warm", "-", "--l2", "tier"], "save it first"),
        (["tier", "frobnicate"], "No such command"),
        (["tier", "stats"], "Missing argument 'PATH'"),
    ],
)
def test_wrong_usage_of_tiers_is_exit_code_2_with_a_hint(words: list[str], hint: str):
    assert hint in run(*words, code=2).err


def test_the_rows_of_one_recipe_can_be_removed(photos, tmp_path):
    tier = tmp_path / "tier"
    for size in (32, 16):
        run("warm", photos, "--l2", tier, "--size", size, "--workers", 0)
    one, other = (share["fingerprint"] for share in run("tier", "stats", tier, "--json").json["recipes"])
    assert "12 values removed" in run("tier", "clear", tier, "--recipe", one[:8]).out
    left = run("tier", "stats", tier, "--json").json
    assert (left["values"], [share["fingerprint"] for share in left["recipes"]]) == (12, [other])
    assert run("tier", "verify", tier, "--json").json["values"] == 12
    assert other[:12] in run("tier", "clear", tier, "--recipe", one[:8], code=1).err
