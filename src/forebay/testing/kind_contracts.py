"""Contracts of recipes of a base layer and of sources, as tests to inherit.

A subclass of `RecipeContract` makes the recipe and a few samples. A subclass of `SourceContract` opens a source over a
folder, and returns the samples of a content; a compressed or structured kind also says how content is stored. Public
names that forebay does not call are listed in `helpers`: any other undeclared name may be a misspelled hook.
"""

import json
import os
import pickle
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import get_annotations, getattr_static, signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.format.chunk import encode_chunk
from forebay.recipe import (
    AnyRecipe,
    LayerRecipe,
    Recipe,
    RecipeHooks,
    RowRecipe,
    Rows,
    check_recipe,
    fields_of,
    fingerprint,
    hooks_of,
)
from forebay.source import Failure, Part, PartDigest, Sample, Source, SourceFile, samples_of


def check_names(kind: type[Any], of: str, declared: Iterable[type[Any]], helpers: Iterable[str] = ()) -> None:
    """Fail for public names that are neither fields nor declared: a misspelled method would never be called."""
    known = sorted({name for each in declared for name in (*dir(each), *get_annotations(each))})
    is_struct = issubclass(kind, msgspec.Struct)
    own = msgspec.structs.fields(kind) if is_struct else fields(kind) if is_dataclass(kind) else ()
    allowed = {*known, *helpers, *(field.name for field in own)}
    names = sorted(name for name in dir(kind) if not name.startswith("_") and name not in allowed)
    near = {name: get_close_matches(name, known, 1) for name in names}
    hints = [f" (did you mean '{near[name][0]}'?)" if near[name] else " (list it in `helpers`)" for name in names]
    assert not names, f"not {of}: " + ", ".join(f"'{name}'{hint}" for name, hint in zip(names, hints, strict=True))


def check_hooks(recipe: AnyRecipe, helpers: Iterable[str] = ()) -> None:
    """Fail where a public name of a recipe is not a declared hook, or a hook takes other arguments than are passed."""
    declared = (RecipeHooks, Recipe, LayerRecipe, RowRecipe)
    check_names(type(recipe), "hooks of a recipe", declared, helpers)
    for name in (name for name in dir(RecipeHooks) if not name.startswith("_")):
        default, own = (getattr_static(kind, name, None) for kind in (RecipeHooks, type(recipe)))
        if own is not None and (callable(default) or isinstance(default, staticmethod)):
            takes = [len(signature(getattr(kind, name)).parameters) for kind in (RecipeHooks, type(recipe))]
            assert takes[0] == takes[1], f"'{name}' takes {takes[1]} arguments, the hook is passed {takes[0]}"


class RecipeContract:
    helpers: tuple[str, ...] = ()  # public names of the recipe that are its own affair
    bad: Sample | None = None  # a sample that no row can be made of

    def make_recipe(self) -> Recipe:
        raise NotImplementedError

    def samples(self) -> list[Sample]:
        """A few samples of which rows can be made."""
        raise NotImplementedError

    @pytest.fixture
    def recipe(self) -> Recipe:
        """With every choice made, as chunks are made by it."""
        recipe: Recipe = hooks_of(self.make_recipe()).settled(None, _Samples(self.samples()))[0]
        return recipe

    def encoded(self, recipe: Recipe, samples: Iterable[Sample]) -> tuple[Rows, bytes]:
        """Rows, and their bytes as a chunk: other columns than the declared ones are an error."""
        rows = recipe.make(samples)
        ids = hooks_of(recipe).sample_ids
        chunk = encode_chunk(
            rows.columns, recipe.columns(), layer="x", chunk=0, fingerprint="", samples=1000, sample_ids=ids
        )
        return rows, b"".join(bytes(buffer) for buffer in chunk.buffers)

    def test_every_public_name_is_a_field_or_a_declared_hook(self) -> None:
        check_hooks(self.make_recipe(), self.helpers)

    def test_it_has_a_kind_a_revision_and_a_chunk_size_and_is_frozen(self, recipe: Recipe) -> None:
        assert isinstance(recipe, Recipe)
        assert recipe.kind
        assert recipe.revision >= 1
        assert (recipe.chunk_target().rows is None) != (recipe.chunk_target().bytes is None)
        for name, value in fields_of(recipe).items():
            with pytest.raises(AttributeError):
                setattr(recipe, name, value)

    def test_it_opens_again_from_its_fields_and_in_another_process(self, recipe: Recipe) -> None:
        check_recipe(recipe)
        assert fingerprint(msgspec.convert(fields_of(recipe), type(recipe))) == fingerprint(recipe)
        again: Recipe = pickle.loads(pickle.dumps(recipe))
        assert fingerprint(again) == fingerprint(recipe)
        assert self.encoded(again, self.samples())[1] == self.encoded(recipe, self.samples())[1]

    def test_choices_that_are_made_stay_as_they_are(self, recipe: Recipe) -> None:
        again, _ = hooks_of(self.make_recipe()).settled(fields_of(recipe), _Samples([]))
        assert fingerprint(again) == fingerprint(recipe)

    def test_the_same_samples_make_the_same_bytes(self, recipe: Recipe) -> None:
        rows, encoded = self.encoded(recipe, self.samples())
        assert encoded == self.encoded(recipe, self.samples())[1]
        assert not rows.failures
        assert all(len(rows.columns[column.name]) for column in recipe.columns())

    def test_it_makes_base_rows_without_presence_bits_and_reads_every_sample_once(self, recipe: Recipe) -> None:
        samples = iter(self.samples())
        assert recipe.make(samples).present is None
        assert next(samples, None) is None
        rows, _ = self.encoded(recipe, [])
        assert all(len(rows.columns[column.name]) == 0 for column in recipe.columns())

    def test_a_bad_sample_is_a_failure_with_a_reason_beside_the_others(self, recipe: Recipe) -> None:
        if self.bad is None:
            pytest.skip("this recipe takes any content")
        rows, _ = self.encoded(recipe, [*self.samples(), self.bad])
        assert [(failure.sample, bool(failure.reason)) for failure in rows.failures] == [(self.bad.id, True)]
        assert all(len(rows.columns[column.name]) for column in recipe.columns())

    def test_equal_samples_have_one_identity_of_16_bytes(self, recipe: Recipe) -> None:
        identity = hooks_of(recipe).identity
        if identity is None:
            pytest.skip("this recipe does not deduplicate")
        for sample in self.samples():
            digest = identity(sample)
            assert digest is None or len(digest) == 16
            assert digest == identity(Sample("another id", sample.data))


class _Samples:
    """What a recipe reads of the source before it decides, from a list of samples."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def __call__(self) -> list[Sample]:
        return self._samples

    def annotations(self) -> list[Any]:
        return [sample.data.metadata for sample in self._samples if hasattr(sample.data, "metadata")]


LINES = b"".join(b"line %d %s\n" % (number, b"." * (number * 37 % 91)) for number in range(300))
CONTENTS = {
    "empty": b"",
    "one": b"one\n",
    "unfinished": b"first\nsecond without an end",
    "blank": b"\n\n\nx\n\n",
    "windows": b"a\r\nb\r\n\r\nc",
    "binary": bytes(range(256)) * 3,
    "many": LINES,
    "long": b"x" * 200_000 + b"\n" + b"y" * 100_000,
}
NEW = b"new 1\nnew 2\n"
LARGE = LINES * 150  # more than any buffer on the way
STEPS = [(1, 1), (7, 13), (100, 100), (5000, 1), (1 << 40, 1 << 40)]


class SourceContract:
    suffix = ".txt"
    helpers: tuple[str, ...] = ()  # public names of the source that are its own affair
    hashes: bool = False  # whether it takes the digest of a plain file while it reads
    broken: bytes | None = None  # a file, as it is stored, that holds good samples and bad ones

    def open_source(self, folder: Path) -> Source:
        """A source over every file of a folder."""
        raise NotImplementedError

    def samples_of(self, content: bytes) -> list[Any]:
        """The data of the samples that a file of this content holds."""
        raise NotImplementedError

    def stored(self, content: bytes) -> bytes:
        """The bytes of a file with this content; what is stored one after the other reads as one."""
        return content

    def write(self, folder: Path, contents: dict[str, bytes]) -> Source:
        folder.mkdir(exist_ok=True)
        for name, content in contents.items():
            (folder / (name + self.suffix)).write_bytes(self.stored(content))
        return self.open_source(folder)

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "source"

    def test_every_public_name_is_a_field_or_a_declared_hook(self, folder: Path) -> None:
        source = self.write(folder, {"a": b"x\n"})
        assert isinstance(source, Source)
        assert source.unit in ("bytes", "samples")
        check_names(type(source), "hooks of a source", [Source], ["kind", *self.helpers])

    @pytest.mark.parametrize("name", CONTENTS)
    def test_the_parts_of_a_file_hold_its_samples_once_and_in_order(self, folder: Path, name: str) -> None:
        source = self.write(folder, {name: CONTENTS[name]})
        for first, every in STEPS[1:]:
            assert [sample.data for sample in read_in_parts(source, first, every)] == self.samples_of(CONTENTS[name])

    @pytest.mark.parametrize("name", CONTENTS)
    def test_cuts_rise_and_the_last_is_the_end(self, folder: Path, name: str) -> None:
        (file,) = (source := self.write(folder, {name: CONTENTS[name]})).files()
        every_cut = [list(source.cuts(file, 0, first, every)) for first, every in STEPS[1:]]
        for (first, _), cuts in zip(STEPS[1:], every_cut, strict=True):
            assert all(low < high for low, high in pairwise(cuts))
            assert all(cut >= first for cut in cuts[:-1])
        assert len({end for cuts in every_cut for end in cuts[-1:]}) == bool(self.samples_of(CONTENTS[name]))

    @pytest.mark.parametrize(("first", "every"), STEPS)
    def test_the_parts_of_many_files_hold_all_samples_in_the_order_of_the_files(
        self, folder: Path, first: int, every: int
    ) -> None:
        contents = {name: CONTENTS[name] for name in sorted(CONTENTS)}
        source = self.write(folder, contents)
        expected = [data for content in contents.values() for data in self.samples_of(content)]
        assert [sample.data for sample in read_in_parts(source, first, every)] == expected

    def test_ids_are_unique_and_do_not_depend_on_the_cuts(self, folder: Path) -> None:
        source = self.write(folder, {"a": LINES, "b": LINES})
        ids = [sample.id for sample in read_in_parts(source, 100, 100)]
        assert len(set(ids)) == len(ids)
        assert ids == [sample.id for sample in read_in_parts(source, 999, 4000)]

    def test_parts_are_read_in_any_order_and_again(self, folder: Path) -> None:
        source = self.write(folder, {"a": LINES, "b": LINES[::-1]})
        parts = parts_of(source, 500, 700)
        forward = [read_part(source, part) for part in parts]
        assert [read_part(source, part) for part in reversed(parts)] == forward[::-1]
        assert [read_part(source, part) for part in parts for _ in range(2)] == [s for s in forward for _ in range(2)]

    def test_files_are_named_in_order_and_look_the_same_one_by_one(self, folder: Path) -> None:
        source = self.write(folder, {"b": b"1\n", "a": b"2\n", "c": b""})
        files = source.files()
        assert [os.path.basename(file.path) for file in files] == [f"{name}{self.suffix}" for name in "abc"]
        assert [source.look(file.path) for file in files] == files
        assert source.listing() == (files, {})

    def test_it_travels_to_another_process(self, folder: Path) -> None:
        source = self.write(folder, {"a": LINES})
        again: Source = pickle.loads(pickle.dumps(source))
        assert read_in_parts(again, 100, 100) == read_in_parts(source, 100, 100)
        assert len(pickle.dumps(source)) < 2000

    def test_its_description_is_json_from_which_it_opens_again(self, folder: Path) -> None:
        source: Any = self.write(folder, {"a": LINES})
        described = json.loads(json.dumps(source.describe()))
        assert described["kind"]
        again = type(source).from_description(described)
        assert again.describe() == source.describe()
        assert again.files() == source.files()

    def test_another_content_of_one_size_has_another_digest(self, folder: Path) -> None:
        source = self.write(folder, {"a": b"same\n", "b": b"sane\n", "c": b"same\n"})
        a, b, c = (source.digest(file, 0, file.size) for file in source.files())
        assert a == c != b
        assert 0 <= a < 1 << 64

    def test_a_scanned_file_knows_its_digest_if_it_is_a_stream(self, folder: Path) -> None:
        source = self.write(folder, {"a": LINES})
        (file,) = source.files()
        list(source.cuts(file, 0, 100, 100))
        expected = source.digest(file, 0, file.size) if file.stream else None
        assert source.scanned(file).digest == expected
        assert source.scanned(file).same_identity(file)

    def test_a_file_that_grew_is_appended(self, folder: Path) -> None:
        source = self.write(folder, {"a": LINES})
        (before,) = source.files()
        planned = parts_of(source, 1000, 1000)
        old = [sample for part in planned for sample in read_part(source, part)]
        with open(folder / ("a" + self.suffix), "ab") as file:
            file.write(self.stored(NEW))
        (after,) = source.files()
        end = planned[-1].stop
        fresh = cut_file(source, after, end, 3, 3)
        assert source.digest(after, 0, before.size) == source.digest(before, 0, before.size)
        assert [sample.data for part in fresh for sample in read_part(source, part)] == self.samples_of(NEW)
        assert [*old, *(sample for part in fresh for sample in read_part(source, part))] == read_in_parts(source, 9, 9)

    def test_a_file_that_did_not_grow_has_nothing_more_to_cut(self, folder: Path) -> None:
        source = self.write(folder, {"a": LINES})
        (end,) = source.cuts(source.files()[0], 0, 1 << 40, 1 << 40)
        assert list(source.cuts(source.files()[0], end, 10, 10)) == []

    def test_a_file_that_changed_has_another_identity(self, folder: Path) -> None:
        source = self.write(folder, {"a": LINES})
        (before,) = source.files()
        assert source.look(before.path).same_identity(before)
        os.utime(folder / ("a" + self.suffix), ns=(1, 1))
        assert not source.look(before.path).same_identity(before)

    def test_bad_content_is_a_failure_with_an_id_and_a_reason_whatever_the_cuts(self, folder: Path) -> None:
        if self.broken is None:
            pytest.skip("this kind takes any content")
        folder.mkdir()
        (folder / ("a" + self.suffix)).write_bytes(self.broken)
        source = self.open_source(folder)
        seen = [one for part in parts_of(source, 1 << 40, 1 << 40) for one in samples_of(source, part)]
        assert {type(one) for one in seen} == {Sample, Failure}
        assert all(one.sample and one.reason and one.detail for one in seen if isinstance(one, Failure))
        ids = [one.sample if isinstance(one, Failure) else one.id for one in seen]
        assert len(set(ids)) == len(ids)
        assert [one for part in parts_of(source, 1, 1) for one in samples_of(source, part)] == seen

    def test_previews_and_batches_give_the_same_samples_and_the_digest_if_any(self, folder: Path) -> None:
        source = self.write(folder, {"a": LARGE, "b": b"", "c": LINES})
        for part in [*parts_of(source, 50_000, 70_000), *parts_of(source, 500, 700)[:3]]:
            digest = PartDigest()
            samples = list(samples_of(source, part))
            assert list(samples_of(source, part, preview=True)) == samples
            assert list(samples_of(source, part, digest=digest)) == samples
            if self.hashes and not part.file.stream:
                assert digest.value == source.digest(part.file, part.start, part.stop)
            else:
                assert digest.value is None

    def test_a_file_that_is_gone_is_not_found(self, folder: Path) -> None:
        source = self.write(folder, {"a": LINES})
        (file,) = source.files()
        (folder / ("a" + self.suffix)).unlink()
        with pytest.raises(FileNotFoundError):
            source.look(file.path)
        with pytest.raises(FileNotFoundError):
            read_part(source, Part(file, 0, 10))
        with pytest.raises(FileNotFoundError):
            source.digest(file, 0, 10)


def cut_file(source: Source, file: SourceFile, start: int, first: int, every: int) -> list[Part]:
    stops = list(source.cuts(file, start, first, every))
    scanned = source.scanned(file)
    return [Part(scanned, low, high) for low, high in pairwise([start, *stops])]


def parts_of(source: Source, first: int, every: int) -> list[Part]:
    return [part for file in source.files() for part in cut_file(source, file, 0, first, every)]


def read_part(source: Source, part: Part) -> list[Sample]:
    """The samples of one part; a document without text may come as the failure `empty` too."""
    return [as_sample(item) for item in samples_of(source, part)]


def as_sample(item: Sample | Failure) -> Sample:
    if isinstance(item, Sample):
        return item
    assert item.reason == "empty", item
    return Sample(item.sample, "")


def read_in_parts(source: Source, first: int, every: int) -> list[Sample]:
    """All samples of a source, read part by part."""
    return [sample for part in parts_of(source, first, every) for sample in read_part(source, part)]
