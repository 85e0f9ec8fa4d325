"""Builders killed again and again, two at a time: the cache comes out as if nothing had happened.

Every kill is aimed at a number of chunks: it is dealt when so many files are there, after a random moment more. So the
kills spread over the whole build however slow the machine is, and the test says where each one landed. The last chunks
wait until one builder is stopped, so that there is something that it holds.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.builders import (
    children_of,
    chunk_count,
    chunk_digests,
    ending,
    every_file,
    start_builder,
    wait_until,
)
from tests.helpers.cache_files import chunk_path
from tests.helpers.obedient_recipes import ObedientRecipe, let_begin, makes, orders, write_orders

import forebay as fb

LEASE_SECONDS = 2.0
HELD = 8  # chunks: more than two builders of two workers claim at once


class Campaign:
    """Two builders on one cache, and somebody who kills them."""

    def __init__(self, folder: Path, chunks: int, seconds: float, seed: int) -> None:
        self.root = folder / "cache"
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.chunks = chunks
        self.recipe = ObedientRecipe(seconds=seconds)
        self.source = write_orders(folder / "source.txt", orders(chunks))
        self.landed: list[int] = []
        self.slept = 0.0
        self._random = random.Random(seed)
        let_begin(self.notes, chunks - HELD)
        self._builders = [self._start(), self._start()]

    def kill_at(self, chunks: int) -> None:
        """Kill one of the builders a moment after so many chunks are there, and start another in its place."""
        victim = self._random.randrange(2)
        wait_until(lambda: chunk_count(self.root) >= chunks, what=f"the build never came to {chunks} chunks")
        time.sleep(self._random.uniform(0, 0.05))
        self._builders[victim].kill()
        self.landed.append(chunk_count(self.root))
        self._builders[victim].communicate()
        self._builders[victim] = self._start()
        self.survivor = self._builders[1 - victim]

    def stop_past_the_lease(self) -> None:
        """Stop the builder that was not killed last, with its workers, until the other has made what they held.

        A chunk that another holds comes last, so the other builder by then has made all the rest.
        """
        held: list[int] = []
        while not held:
            wait_until(lambda: self._held_by(self.survivor.pid), what="the builder claims nothing")
            stopped = [*children_of(self.survivor.pid), self.survivor.pid]
            send(signal.SIGSTOP, stopped)
            held = self._held_by(self.survivor.pid)
            if not held:
                send(signal.SIGCONT, stopped)
        let_begin(self.notes, None)
        begun = time.monotonic()
        wait_until(lambda: all(self._chunk(chunk).exists() for chunk in held), 180, "nobody took over an expired lease")
        self.slept = time.monotonic() - begun
        send(signal.SIGCONT, stopped)

    def finish(self) -> list[dict]:
        return [ending(builder) for builder in self._builders]

    def close(self) -> None:
        for builder in self._builders:
            builder.kill()
            builder.communicate()

    def _held_by(self, pid: int) -> list[int]:
        claims = fb.status(self.root).claims
        return [claim.chunk for claim in claims if claim.pid == pid and not self._chunk(claim.chunk).exists()]

    def _chunk(self, number: int) -> Path:
        return chunk_path(self.root, "obedient", number)

    def _start(self) -> "subprocess.Popen[str]":
        return start_builder(
            self.root,
            self.source,
            self.notes,
            {"seconds": self.recipe.seconds},
            workers=2,
            lease_seconds=LEASE_SECONDS,
        )


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


def run_campaign(folder: Path, *, kills: int, chunks: int, seconds: float, seed: int) -> Campaign:
    campaign = Campaign(folder, chunks, seconds, seed)
    try:
        for kill in range(kills):
            present = chunk_count(campaign.root)
            campaign.kill_at(min(chunks - HELD, present + max(1, (chunks - 20 - present) // (kills - kill))))
        campaign.stop_past_the_lease()
        for ended in campaign.finish():
            assert "report" in ended, ended
    finally:
        campaign.close()
    return campaign


def assert_as_if_nothing_had_happened(campaign: Campaign, folder: Path) -> None:
    assert campaign.slept > LEASE_SECONDS / 2  # the lease ran from when the other builder first saw the claim
    root, undisturbed = campaign.root, folder / "undisturbed"
    fb.build(undisturbed, fb.sources.lines(campaign.source), campaign.recipe, workers=2)
    assert chunk_digests(root) == chunk_digests(undisturbed)
    assert len(chunk_digests(root)) == campaign.chunks

    fb.clean(root, lease_seconds=LEASE_SECONDS)
    report = fb.verify(root, full=True)
    assert report.sound
    assert (report.chunks, report.gaps, report.foreign) == (campaign.chunks, {}, ())
    status = fb.status(root)
    assert status.complete
    assert status.claims == ()
    left = [name for name in every_file(root) if not name.startswith("generations/")]
    assert left == [name for name in every_file(undisturbed) if not name.startswith("generations/")]
    assert [row.sha256 for row in newest(root)] == [row.sha256 for row in newest(undisturbed)]


def newest(root: Path):
    return fb.open_cache(root).generation.table("obedient").records()


def tell(campaign: Campaign, record_property: Callable[[str, object], None]) -> int:
    """Say where the kills landed, at the end of the run; how many of them between the first and the last chunk."""
    inside = [count for count in campaign.landed if 0 < count < campaign.chunks]
    record_property(
        "told",
        (
            f"{len(campaign.landed)} kills landed with so many of {campaign.chunks} chunks published: "
            f"{' '.join(map(str, campaign.landed))}; {len(inside)} inside the build; "
            f"{len(makes(campaign.notes))} chunks begun; one builder stopped for {campaign.slept:.1f} s"
        ),
    )
    return len(inside)


def test_six_kills_and_a_long_stop_leave_the_bytes_of_an_undisturbed_build(tmp_path, record_property):
    campaign = run_campaign(tmp_path, kills=6, chunks=50, seconds=0.1, seed=random.randrange(10**6))
    assert tell(campaign, record_property) >= 4
    assert_as_if_nothing_had_happened(campaign, tmp_path)


@pytest.mark.long
def test_two_hundred_kills_leave_the_bytes_of_an_undisturbed_build(tmp_path, record_property):
    campaign = run_campaign(tmp_path, kills=200, chunks=800, seconds=0.15, seed=random.randrange(10**6))
    assert tell(campaign, record_property) >= 150
    assert_as_if_nothing_had_happened(campaign, tmp_path)
