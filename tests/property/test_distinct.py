"""Deduplication is what its definition says: of equal samples the first stays, however the cache comes to be."""

import gzip
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.dedup_cases import DistinctRecipe, distinct_lines, rows_of, sorting_in
from tests.helpers.hypothesis_profiles import scaled

import forebay as fb
from forebay.building.dedup import RECORD_BYTES
from forebay.cache.segment import decode_segment

ALPHABET = [b"", b"a", b"b", b"ab", b"abc", b"abd", b"ba", b"\0", b"\0a", b"bad", b"a bad one", b"x" * 30]
FILES = st.lists(st.lists(st.sampled_from(ALPHABET) | st.binary(max_size=3).map(lambda b: b.replace(b"\n", b" "))),
                 min_size=1, max_size=5)  # fmt: skip
RECIPES = st.builds(DistinctRecipe, alike=st.integers(0, 2), chunk_bytes=st.integers(100, 900))
LIMITS = st.none() | st.integers(1, 40).map(lambda records: records * RECORD_BYTES)
MODES = st.sampled_from(["forward", "inverse"])


def has_a_good_line(files: list[list[bytes]]) -> bool:
    return any(b"bad" not in line for lines in files for line in lines)


def write(folder: Path, number: int, lines: list[bytes], packed: bool) -> None:
    folder.mkdir(exist_ok=True)
    content = b"".join(line + b"\n" for line in lines)
    name = f"{number:02d}.txt"
    if packed:
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1, mtime=0))
    else:
        (folder / name).write_bytes(content)


def kept(files: list[list[bytes]], recipe: DistinctRecipe) -> list[bytes]:
    return [line for line in distinct_lines(files, recipe.alike) if b"bad" not in line]


def values(store: fb.MemoryStore) -> dict[str, bytes]:
    """Identities, chunks, and the plan without the random id of its cache."""
    stored = {entry.key: store.read(entry.key) for entry in store.entries("")}
    segments = {
        key: decode_segment(memoryview(value), store.address, key)
        for key, value in stored.items()
        if key.startswith("plan/")
    }
    plan = {key: b"".join(replace(segment, cache_id="").encode()) for key, segment in segments.items()}
    return plan | {key: value for key, value in stored.items() if key.startswith(("identities/", "layers/"))}


def counts(root: object) -> tuple[int, int]:
    """Samples, and duplicates among them."""
    (layer,) = fb.status(root).layers
    (summary,) = fb.info(root).layers
    return layer.samples, summary.statistics["duplicates"]


@given(
    files=FILES.filter(has_a_good_line),
    recipe=RECIPES,
    limits=st.tuples(LIMITS, LIMITS),
    mode=MODES,
    packed=st.booleans(),
)
@settings(max_examples=scaled(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_first_of_equal_lines_is_kept_in_whatever_file_and_chunk_and_little_memory(
    files, recipe, limits, mode, packed
):
    with TemporaryDirectory() as name:
        for number, lines in enumerate(files):
            write(Path(name, "source"), number, lines, packed)
        source, stores = fb.sources.lines(Path(name, "source")), [fb.MemoryStore(), fb.MemoryStore()]
        with sorting_in(limits[0]):
            fb.build(stores[0], source, recipe, workers=0)
        with sorting_in(limits[1]):
            fb.build(stores[1], source, recipe, workers=0, mode=mode)
    assert rows_of(stores[0]) == kept(files, recipe)
    total = sum(map(len, files))
    assert counts(stores[0]) == (total, total - len(distinct_lines(files, recipe.alike)))
    assert values(stores[0]) == values(stores[1])


@given(
    steps=st.lists(FILES, min_size=1, max_size=4).filter(lambda steps: has_a_good_line(steps[0])),
    recipe=RECIPES,
    limit=LIMITS,
    packed=st.booleans(),
)
@settings(max_examples=scaled(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_a_cache_grows_by_is_held_against_all_it_has(steps, recipe, limit, packed):
    store, written = fb.MemoryStore(), []
    with TemporaryDirectory() as name:
        source = fb.sources.lines(Path(name, "source"))
        for files in steps:
            for lines in files:
                write(Path(name, "source"), len(written), lines, packed)
                written.append(lines)
            with sorting_in(limit):
                if not values(store):
                    fb.build(store, source, recipe, workers=0)
                else:
                    fb.update(store, source, recipe=recipe, workers=0)
            assert rows_of(store) == kept(written, recipe)
        total = sum(map(len, written))
        assert counts(store) == (total, total - len(distinct_lines(written, recipe.alike)))
        assert fb.verify(store, full=True).sound
        assert fb.verify(store).foreign == ()
