"""A damaged `data.mdb` never ends the process, in any verb, and never gives a wrong row."""

import contextlib
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.tiers.pictures import RECIPE, assert_same_rows, fresh_rows, write_pictures

import forebay as fb
from forebay.errors import TierDamaged, TierUnusable
from forebay.tiers import CachedImages, TierWarning, clear_tier, environment, summarize_tier, verify_tier, warm
from forebay.tiers.lmdb_pages import LARGEST_VALUE, LmdbSnapshot, PageDamaged, read_metas

PAGE = 4096


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("damage") / "photos", 16)


@pytest.fixture(scope="module")
def sound(photos) -> bytes:
    """A tier with branches, leaves, large values and free pages."""
    tier = photos.parent / "sound"
    source = fb.sources.images(photos)
    for recipe in (RECIPE, fb.ImageRecipe(size=8), fb.ImageRecipe(size=64)):
        warm(source, recipe, tier, workers=0)
    descriptor = os.open(tier / "data.mdb", os.O_RDONLY)
    meta = max(read_metas(descriptor), key=lambda meta: meta.transaction)
    os.close(descriptor)
    assert meta.main.depth > 1
    assert meta.main.overflow_pages > 16
    assert meta.free.entries
    return (tier / "data.mdb").read_bytes()


def pages_of(content: bytes) -> list[int]:
    """The pages that begin as a meta page, a branch, a leaf or a large value does."""
    kinds = {number: struct.unpack_from("=H", content, number * PAGE + 10)[0] for number in range(len(content) // PAGE)}
    return [number for number, flags in kinds.items() if flags in (1, 2, 4, 8)]


def nodes_of(content: bytes) -> list[tuple[int, int]]:
    """Page and offset of every node of the branches and leaves."""
    found = []
    for number in pages_of(content):
        flags, lower = struct.unpack_from("=HH", content, number * PAGE + 10)
        if flags in (1, 2):
            places = struct.unpack_from(f"={(lower - 16) // 2}H", content, number * PAGE + 16)
            found += [(number, number * PAGE + place) for place in places]
    return found


def damaged(content: bytes, seed: int) -> tuple[str, bytes]:
    """The file with one damage: of a bit, of a header, of a node, or of a whole page."""
    rng, spoilt = random.Random(seed), bytearray(content)
    number = rng.choice(pages_of(content))
    start = number * PAGE
    kind = ("flip", "length", "header", "length", "node", "zero", "length", "noise", "swap", "meta", "cut")[seed % 11]
    if kind == "flip":
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    elif kind == "header":
        spoilt[start + rng.randrange(16)] ^= 1 << rng.randrange(8)
    elif kind == "length":  # or the flags, or the key's length, of a node
        number, start = nodes_of(content)[rng.randrange(len(nodes_of(content)))]
        spoilt[start + rng.randrange(8)] ^= 1 << rng.randrange(8)
    elif kind == "node":
        spoilt[start + rng.choice((rng.randrange(16, 200), rng.randrange(2000, PAGE)))] ^= 1 << rng.randrange(8)
    elif kind == "zero":
        spoilt[start : start + PAGE] = bytes(PAGE)
    elif kind == "noise":
        spoilt[start : start + 64] = rng.randbytes(64)
    elif kind == "swap":
        other = rng.choice(pages_of(content)) * PAGE
        spoilt[start : start + PAGE] = content[other : other + PAGE]
    elif kind == "meta":
        spoilt[rng.randrange(2) * PAGE + rng.randrange(152)] ^= 1 << rng.randrange(8)
    else:
        del spoilt[rng.randrange(len(spoilt)) :]
    return f"{seed} {kind} page {number}", bytes(spoilt)


def outcomes(tier: Path, photos: Path, expected: list) -> Iterator[str]:
    """Run every verb on a tier; what each ended with. A wrong row is an `AssertionError`."""
    source = fb.sources.images(photos)

    def read() -> None:
        with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
            assert_same_rows(images.read(range(len(images))), expected)

    verbs: list[Callable[[], object]] = [
        lambda: summarize_tier(str(tier)),
        lambda: verify_tier(str(tier)),
        read,
        lambda: warm(source, fb.ImageRecipe(size=24), tier, workers=0),
        read,
        lambda: verify_tier(str(tier)),
        lambda: clear_tier(str(tier)),
    ]
    for verb in verbs:
        try:
            yield "sound" if getattr(verb(), "sound", True) else "bad"
        except TierUnusable as error:
            yield type(error).__name__


def play(photos: Path, sound: Path, work: Path, first: int, last: int) -> None:
    """In a process of its own: every damage of some seeds."""
    content = sound.read_bytes()
    source = fb.sources.images(photos)
    expected = fresh_rows(source, CachedImages(source, RECIPE).recipe)
    warnings.simplefilter("ignore", TierWarning)
    noticed = 0
    for seed in range(first, last):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        what, spoilt = damaged(content, seed)
        print(what, flush=True)
        (work / "users").touch()
        (work / "data.mdb").write_bytes(spoilt)
        ended = list(outcomes(work, photos, expected))
        print("  ", *ended, flush=True)
        noticed += ended[1] != "sound"
        assert ended[-1] == "sound", "it can always be cleared"
    print("noticed", noticed)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder that is quick to sync."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize("damages", [52, pytest.param(208, marks=pytest.mark.long)])
def test_no_damage_ends_the_process_or_gives_a_wrong_row(photos, sound, tmp_path, memory, damages):
    (tmp_path / "sound.mdb").write_bytes(sound)
    code = "import sys; from pathlib import Path; from tests.tiers.test_tier_damage import play; "
    code += "play(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:]))"
    ran = subprocess.run(
        [sys.executable, "-c", code, photos, tmp_path / "sound.mdb", memory / "work", "0", str(damages)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stdout[-300:]} {ran.stderr[-2000:]}"
    assert int(ran.stdout.split()[-1]) > damages // 2


@pytest.fixture
def tier(sound, tmp_path) -> Path:
    folder = tmp_path / "tier"
    folder.mkdir()
    (folder / "users").touch()
    (folder / "data.mdb").write_bytes(sound)
    return folder


def overwrite(tier: Path, offset: int, content: bytes) -> None:
    with open(tier / "data.mdb", "r+b") as file:
        file.seek(offset)
        file.write(content)


def large_entries(tier: Path) -> list:
    descriptor = os.open(tier / "data.mdb", os.O_RDONLY)
    meta = max(read_metas(descriptor), key=lambda meta: meta.transaction)
    found = [entry for entry in LmdbSnapshot(descriptor, PAGE, meta.transaction).entries() if entry.page]
    os.close(descriptor)
    return found


def test_a_value_whose_length_grew_by_a_gigabyte_is_bad_and_all_others_are_read(tier, photos):
    """The bit that made LMDB copy past the end of its map."""
    content = (tier / "data.mdb").read_bytes()
    for entry in large_entries(tier):
        node = struct.pack("=IHH", entry.size, 1, len(entry.key)) + entry.key
        assert node in content
        content = content.replace(node, struct.pack("=I", entry.size | 1 << 29) + node[4:])
    (tier / "data.mdb").write_bytes(content)
    ran = run("tier", "verify", tier, code=1)
    assert "is damaged" in ran.err
    assert f"run `forebay tier clear {tier}`" in ran.err
    assert "is damaged" in run("tier", "stats", tier, code=1).err
    source = fb.sources.images(photos)
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images, pytest.warns(TierWarning, match="damaged"):
        assert_same_rows(images.read(range(len(images))), fresh_rows(source, images.recipe))
    assert "removed" in run("tier", "clear", tier).out
    assert not (tier / "data.mdb").exists()


def test_a_large_value_whose_header_counts_other_pages_is_named_by_verify_and_not_replaced(tier, photos):
    entries = large_entries(tier)
    for entry in entries:
        overwrite(tier, entry.page * PAGE + 12, struct.pack("=I", 1 << 20))
    report = verify_tier(str(tier))
    assert [bad.reason for bad in report.bad] == ["page"] * len(entries)
    source = fb.sources.images(photos)
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        with pytest.warns(TierWarning, match=r"damaged.*forebay tier clear"):
            assert_same_rows(images.read(range(len(images))), fresh_rows(source, images.recipe))
        assert "is damaged" in images.statistics().writing_off
        assert images.statistics().written == 0


def test_pages_are_checked_before_the_first_write_and_training_continues_from_the_source(tier, photos):
    """The list of free pages is damaged: no read meets it, but a write would."""
    descriptor = os.open(tier / "data.mdb", os.O_RDONLY)
    root = max(read_metas(descriptor), key=lambda meta: meta.transaction).free.root
    os.close(descriptor)
    overwrite(tier, root * PAGE + PAGE - 200, b"\xff" * 200)
    source = fb.sources.images(photos)
    with CachedImages(source, fb.ImageRecipe(size=24), l2=tier) as images:
        rows = images.read(range(len(images)))
        with pytest.warns(TierWarning, match="is damaged"):
            images.flush()
        assert_same_rows(rows, fresh_rows(source, images.recipe))
        assert images.statistics().written == 0
        assert "is damaged" in images.statistics().writing_off
    with pytest.raises(TierDamaged, match="run `forebay tier clear"):
        summarize_tier(str(tier))


def test_a_tier_that_is_damaged_and_open_elsewhere_is_not_emptied_page_by_page(tier, photos):
    source = fb.sources.images(photos)
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        images[0]
        entry = large_entries(tier)[0]
        overwrite(tier, entry.page * PAGE + 10, b"\0\0")
        with pytest.raises(TierUnusable, match="end the processes that use it"):
            clear_tier(str(tier))
    assert clear_tier(str(tier)).in_use is False


def test_a_file_that_is_cut_short_while_it_is_open_gives_misses(tier, photos):
    source = fb.sources.images(photos)
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        images[0]
        os.truncate(tier / "data.mdb", PAGE * 8)
        with pytest.warns(TierWarning, match="damaged"):
            assert_same_rows(images.read(range(len(images))), fresh_rows(source, images.recipe))


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda content: bytes(PAGE) + content[PAGE:], id="first-meta-page"),
        pytest.param(lambda content: bytes(2 * PAGE) + content[2 * PAGE :], id="both-meta-pages"),
        pytest.param(lambda content: content[:20], id="cut-to-20-bytes"),
        pytest.param(lambda content: content[:100], id="cut-to-100-bytes"),
        pytest.param(lambda content: content[: PAGE + 900], id="cut-in-the-second-meta-page"),
        pytest.param(lambda content: content[: 8 * PAGE], id="cut-to-8-pages"),
    ],
)
def test_whatever_is_damaged_every_verb_says_the_same_and_reading_continues_without_the_tier(
    spoil, tier, sound, photos
):
    (tier / "data.mdb").write_bytes(spoil(sound))
    verbs = (["tier", "stats", tier], ["tier", "verify", tier], ["warm", photos, "--l2", tier, "--workers", 0])
    [said] = {run(*words, code=1).err for words in verbs}
    assert said.startswith(f"forebay: the tier '{tier}' is damaged (")
    assert said.endswith(f"); run `forebay tier clear {tier}`: its rows will be rebuilt from the source\n")
    source = fb.sources.images(photos)
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        with pytest.warns(TierWarning) as warned:
            rows = [*images.read(range(len(images))), *images.read(range(len(images)))]
        assert_same_rows(rows, fresh_rows(source, images.recipe) * 2)
        assert [f"forebay: {warning.message}\n" for warning in warned] == [said]
        assert images.statistics().writing_off == said[len("forebay: ") : -1]
        assert sum(images.statistics().dropped.values()) == 32
    assert (tier / "data.mdb").read_bytes() == spoil(sound)
    run("tier", "clear", tier)
    assert run("warm", photos, "--l2", tier, "--workers", 0, "--json").json["made"] == 16


def write_after_damage(photos: Path, tier: Path, kind: str) -> None:
    """In a process of its own: the pages are checked by a first write, then damaged, and a second write meets them."""
    source = fb.sources.images(photos)
    with CachedImages(source, fb.ImageRecipe(size=24), l1=0, l2=tier) as images, warnings.catch_warnings():
        warnings.simplefilter("ignore", TierWarning)
        images[0]
        images.flush()
        assert images.statistics().written == 1
        descriptor = os.open(tier / "data.mdb", os.O_RDONLY)
        meta = max(read_metas(descriptor), key=lambda meta: meta.transaction)
        os.close(descriptor)
        content = (tier / "data.mdb").read_bytes()
        kinds = {number: content[number * PAGE + 10] for number in pages_of(content)}
        if kind == "cut":
            os.truncate(tier / "data.mdb", 0)
        elif kind == "free":
            overwrite(tier, meta.free.root * PAGE + 16, b"\xff" * (PAGE - 16))
        else:
            for number in [number for number, flags in kinds.items() if flags == {"leaf": 2, "branch": 1}[kind]]:
                overwrite(tier, number * PAGE, bytes(PAGE))
        images._opened.l2.put(bytes(range(16)), bytes(40_000), replaces=True, when_full="wait")
        images.flush()
        assert images.statistics().written == 1
        assert_same_rows(images.read(range(len(images))), fresh_rows(source, images.recipe))
        print(images.statistics().writing_off)


@pytest.mark.parametrize("kind", ["leaf", "branch", "free", "cut"])
def test_damage_after_the_pages_were_checked_does_not_end_the_process_that_writes(kind, tier, photos):
    code = "import sys; from pathlib import Path; from tests.tiers.test_tier_damage import write_after_damage; "
    code += "write_after_damage(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])"
    ran = subprocess.run(
        [sys.executable, "-c", code, photos, tier, kind], capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stderr[-2000:]}"
    assert f"the tier '{tier}' is damaged (" in ran.stdout


def test_what_is_not_a_tier_is_neither_filled_nor_cleared(photos, tmp_path):
    source = fb.sources.images(photos)
    with pytest.raises(TierUnusable, match="holds other files"):
        warm(source, RECIPE, photos, workers=0)
    assert "choose a folder that is new or empty" in run("warm", photos, "--l2", photos, code=1).err
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "data.mdb").write_bytes(b"precious")
    with pytest.raises(TierUnusable, match="forebay did not make"):
        clear_tier(str(foreign))
    assert (foreign / "data.mdb").read_bytes() == b"precious"


def test_clearing_removes_a_link_and_not_what_it_leads_to(tier, tmp_path):
    shutil.copy(tier / "data.mdb", tmp_path / "elsewhere.mdb")
    (tier / "data.mdb").unlink()
    (tier / "data.mdb").symlink_to(tmp_path / "elsewhere.mdb")
    (tier / "notes.txt").write_text("mine")
    clear_tier(str(tier))
    assert (tmp_path / "elsewhere.mdb").exists()
    assert sorted(path.name for path in tier.iterdir()) == ["notes.txt", "users"]


@pytest.mark.parametrize("target", ["precious", "empty", "missing"])
@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "users"])
def test_nothing_is_written_through_a_link_in_a_tier_of_a_stranger(tier, photos, tmp_path, name, target):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    (outside / "empty").touch()
    (tier / name).unlink(missing_ok=True)
    (tier / name).symlink_to(outside / target)
    source = fb.sources.images(photos)
    for verb in (
        lambda: CachedImages(source, RECIPE, l1=0, l2=tier).read([0]),
        lambda: warm(source, RECIPE, tier, workers=0),
        lambda: summarize_tier(str(tier)),
        lambda: verify_tier(str(tier)),
    ):
        with pytest.raises(
            TierUnusable, match=f"'{name}' is a link or not a regular file|there is no tier of rows in it"
        ):
            verb()
    with contextlib.suppress(TierUnusable):
        clear_tier(str(tier))
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"precious": "precious", "empty": ""}


def test_a_cache_is_not_built_into_a_tier(tier, photos):
    ran = run("build", "images", photos, "--into", tier, "--size", 32, "--workers", 0, code=1)
    assert f"'{tier}' holds a tier (data.mdb)" in ran.err
    assert "another folder" in ran.err
    assert sorted(path.name for path in tier.iterdir()) == ["data.mdb", "users"]


def crafted_node(page: bytes, at: int, kind: str) -> bytes:
    """The first eight bytes of a large node of a leaf, with one number that its page or its file cannot hold."""
    low, high, flags, length = struct.unpack_from("=HHHH", page, at)
    if kind == "key":
        length = len(page) - at - 7  # one byte too long
    elif kind == "page number":
        length = len(page) - at - 8 - 7  # the key fits, the page number behind it does not
    elif kind == "file":
        low, high = 0, 0x1000  # 256 MiB
    else:
        assert kind == "flags"
        flags = 0x04
    return struct.pack("=HHHH", low, high, flags, length)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("key", "a key of [0-9]+ bytes begins at"),
        ("page number", "ends outside of it"),
        ("file", "a value of 268,435,456 bytes at page [0-9]+ does not fit into the file"),
        ("flags", "has flags 0x4"),
    ],
)
def test_every_number_of_a_node_is_compared_with_its_page_and_its_file(sound, tmp_path, kind, message):
    assert LARGEST_VALUE < 1 << 31  # what the two halves of a size can say
    leaves = [
        (number, at) for number, at in nodes_of(sound) if struct.unpack_from("=H", sound, number * PAGE + 10)[0] == 2
    ]
    large = [(number, at) for number, at in leaves if struct.unpack_from("=H", sound, at + 4)[0] == 1]
    descriptor = os.open(tmp_path / "data.mdb", os.O_RDWR | os.O_CREAT)
    try:
        os.write(descriptor, sound)
        meta = max(read_metas(descriptor), key=lambda meta: meta.transaction)
        snapshot = LmdbSnapshot(descriptor, meta.page_size, meta.transaction)
        number, at = large[0]
        page = sound[number * PAGE : (number + 1) * PAGE]
        places = struct.unpack_from(f"={(struct.unpack_from('=H', page, 12)[0] - 16) // 2}H", page, 16)
        spoilt = bytearray(page)
        spoilt[at - number * PAGE : at - number * PAGE + 8] = crafted_node(page, at - number * PAGE, kind)
        assert snapshot.entry(number, page, places.index(at - number * PAGE)).page
        with pytest.raises(PageDamaged, match=message):
            snapshot.entry(number, bytes(spoilt), places.index(at - number * PAGE))
    finally:
        os.close(descriptor)


def test_a_tier_that_another_process_adds_to_while_it_is_opened_is_not_damaged(tier, photos, monkeypatch):
    """Pages are counted first, and the file, which only grows, is measured after that."""
    asked = []
    pages, size = environment.Environment.used_bytes.fget, environment.file_bytes
    counted = property(lambda one: asked.append("pages") or pages(one))
    monkeypatch.setattr(environment.Environment, "used_bytes", counted)
    monkeypatch.setattr(environment, "file_bytes", lambda path: asked.append("size") or size(path))
    with CachedImages(fb.sources.images(photos), RECIPE, l1=0, l2=tier) as images:
        images[0]
    assert asked[:2] == ["pages", "size"]
