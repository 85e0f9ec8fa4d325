"""What batches carry beside their main tensors: columns, names of rows, presence, encodings and features."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from tests.chat.preference_caches import chat_cache, preference_cache
from tests.helpers.image_caches import image_cache, write_pictures
from tests.helpers.layer_recipes import number_cache, stored_cache
from tests.helpers.token_caches import token_cache
from tests.teachers.own_teachers import Letters, Ramp, prompt_cache
from torch.utils.data import DataLoader

import forebay as fb
from forebay.columns import Column, Columns, Ragged
from forebay.errors import NotFound
from forebay.store import LocalStore
from forebay.teachers import TeacherRecipe
from forebay.torch import (
    CacheDataset,
    Filled,
    Ingredient,
    Loader,
    Mixture,
    Present,
    StoredBatch,
    Timed,
    TokenBatch,
    Where,
)
from forebay.torch.distill import LogitNormalTimes

BUCKETS = (0.1, 0.5, 0.9)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("beside"), 30))


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    """Prompts with a layer of shared encodings, and a timed layer that lacks the rows that end in `t`."""
    root = prompt_cache(tmp_path_factory.mktemp("taught"))
    for teacher in (Letters(), Ramp(ends="t")):
        fb.build(root, None, TeacherRecipe(teacher=teacher, buckets=BUCKETS, batch_size=3, stored="float32"))
    return fb.open_cache(root)


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(prompt_cache(tmp_path_factory.mktemp("untaught")))


def batches(source: Any, size: int = 4, **options: Any) -> list[dict[str, Any]]:
    return list(Loader(source, global_batch_size=size, drop_last=False, **options))


def test_columns_come_beside_labels(tokens: fb.Cache) -> None:
    for batch in batches(tokens, columns=["documents", "row"]):
        assert {"tokens", "labels", "positions", "seq_lens", "documents", "documents.offsets"} <= batch.keys()
        stored = tokens.read(batch["row"].numpy(), ["documents"])["documents"]
        assert isinstance(stored, Ragged)
        assert batch["documents"].tolist() == stored.values.tolist()


class Latents(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A layer over rows of any kind, that every second row lacks."""

    kind: ClassVar[str] = "latents"
    revision: ClassVar[int] = 1

    of: str  # a column of the base

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.of,)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="latents", dtype="float32", shape=(2,)),)

    def make(self, rows: Columns) -> fb.Rows:
        present = np.arange(len(rows[self.of])) % 2 == 0
        return fb.Rows({"latents": np.repeat(present, 2).reshape(-1, 2).astype(np.float32)}, present=present)


def pictures_cache(folder: Path) -> fb.Cache:
    (folder / "pictures").mkdir()
    return image_cache(folder / "cache", write_pictures(folder / "pictures"))


@pytest.mark.parametrize(
    ("make", "main"),
    [
        (lambda folder: fb.open_cache(token_cache(folder, 12)), "labels"),
        (chat_cache, "labels"),
        (preference_cache, "labels"),
        (pictures_cache, "pixels"),
        (lambda folder: fb.open_cache(number_cache(folder)), None),  # no batches of their own: the named columns
    ],
    ids=["tokens", "chat", "preferences", "images", "numbers"],
)
def test_columns_of_layers_come_beside_every_kind_of_batch(tmp_path: Path, make: Any, main: str | None) -> None:
    base = make(tmp_path)
    fb.build(base.root, None, Latents(of=base.default_columns[0]), workers=0)
    cache = fb.open_cache(base.root)
    usual = {} if main is None else batches(base, 2)[0]
    beside = batches(cache, 2, columns=["latents"])[0]
    assert main is None or main in usual
    assert beside.keys() >= {"row_weight", *usual, "latents", "latents.present"}
    assert all(torch.equal(beside[name], values) for name, values in usual.items())
    assert torch.equal(beside["latents"].nan_to_num(), beside["latents.present"][:, None].expand(2, 2).float())
    assert torch.equal(beside["latents"].isnan().any(dim=1), ~beside["latents.present"])
    alone = batches(cache, 2, collate=StoredBatch(cache, ["latents"]))[0]
    assert alone.keys() == {"row_weight", "latents", "latents.present"}
    assert torch.equal(alone["latents"].nan_to_num(9), beside["latents"].nan_to_num(9))


def test_stored_columns_come_alone(tokens: fb.Cache) -> None:
    (batch, *_) = batches(tokens, collate=StoredBatch(tokens, ["tokens"]))
    assert batch.keys() == {"tokens", "row_weight"}
    assert batch["tokens"].dtype == torch.uint16
    assert batches(tokens, collate=StoredBatch(tokens))[0].keys() >= {"tokens", "seq_lens", "seq_lens.offsets"}
    row = CacheDataset(tokens, collate=StoredBatch(tokens, ["tokens"]))[1]
    assert {name: values.tolist() for name, values in row.items()} == {"tokens": tokens[1]["tokens"].tolist()}


def test_columns_that_batches_are_made_of_are_not_added_to_them(tokens: fb.Cache) -> None:
    for make in (partial(Loader, global_batch_size=2), CacheDataset):
        for name in ("tokens", "seq_lens"):
            with pytest.raises(
                ValueError, match=f"'{name}' is already in the batch; .*collate=StoredBatch.cache. for columns"
            ):
                make(tokens, columns=[name])
        with pytest.raises(TypeError, match="pass a Collate, such as StoredBatch"):
            make(tokens, collate="store")


@pytest.mark.parametrize("threads", [0, 2])
def test_rows_are_named_in_every_kind_of_batch(tokens: fb.Cache, tmp_path: Path, threads: int) -> None:
    images = pictures_cache(tmp_path)
    mixture = Mixture.of([Ingredient(tokens, weight=1), Ingredient(tokens, weight=2)])
    for source in (tokens, images, mixture):
        for batch in batches(source, threads=threads, columns=["row", "row_id"]):
            cache = source if isinstance(source, fb.Cache) else tokens
            names = [[name.chunk, name.row] for name in cache.row_ids(batch["row"].numpy())]
            assert batch["row_id"].tolist() == names
            if "local_index" in batch:
                assert torch.equal(batch["row"], batch["local_index"])
            if "tokens" in batch:
                stored = cache.read(batch["row"].numpy(), ["tokens"])["tokens"]
                assert torch.equal(batch["tokens"], torch.from_numpy(np.asarray(stored).astype(np.int64)))


@pytest.mark.slow
def test_encodings_of_prompts_come_for_every_row(taught: fb.Cache) -> None:
    for batch in batches(taught, columns=["letters", "row"]):
        expected = taught.read(batch["row"].numpy(), ["letters"])["letters"]
        assert torch.equal(batch["letters"], torch.from_numpy(expected))
        assert batch["letters.present"].all()
        assert "letters_row" not in batch


@pytest.mark.parametrize("t", [0.3, LogitNormalTimes(), lambda coins: coins.uniform("own")])
def test_features_are_those_at_the_times_of_the_batch(taught: fb.Cache, t: Any) -> None:
    reader = fb.teachers.features(taught, "ramp")
    for batch in batches(taught, columns=["data", Timed("ramp", t), "row"]):
        expected = reader.at(batch["row"].numpy(), batch["ramp.t"].numpy())
        for name in ("ramp", "ramp.present"):
            assert torch.equal(batch[name].nan_to_num(9.0), torch.from_numpy(expected[name]).nan_to_num(9.0)), name
        assert torch.equal(batch["ramp"].isnan().any(dim=1), ~batch["ramp.present"])


@pytest.mark.parametrize("t", [[0.1, 0.2], torch.tensor([0.1]), "0.5", 500])
def test_features_at_takes_one_number_or_a_function(t: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="from 0 to 1"):
        Timed("ramp", t)


def test_times_are_a_function_of_the_row_and_the_epoch(taught: fb.Cache) -> None:
    def times(**options: Any) -> list[dict[int, float]]:
        loader = Loader(taught, global_batch_size=5, columns=[Timed("ramp", LogitNormalTimes()), "row"], **options)
        return [
            {row: t for batch in loader for row, t in zip(batch["row"].tolist(), batch["ramp.t"].tolist(), strict=True)}
            for _ in range(2)
        ]

    first, second = times()
    assert first != second
    assert [first, second] == times(threads=0)
    assert len(set(first.values())) == len(taught)


def test_rows_of_a_cache_without_the_layer_are_absent(taught: fb.Cache, untaught: fb.Cache) -> None:
    mixture = Mixture.of([Ingredient(taught, weight=1), Ingredient(untaught, weight=1)])
    for batch in batches(mixture, 8, columns=["data", "letters", Timed("ramp", 0.4)]):
        strange = batch["dataset_id"] == 1
        assert batch["ramp"][strange].isnan().all()
        assert not batch["ramp.present"][strange].any()
        assert not batch["letters.present"][strange].any()
        assert batch["letters"][strange].isnan().all()
        assert batch["letters.present"][~strange].all()


def test_present_selects_the_rows_that_have_all_layers(taught: fb.Cache) -> None:
    bits = np.asarray(taught.read(np.arange(len(taught)), ["ramp"])["ramp.present"])
    assert 0 < bits.sum() < len(taught)
    seen: list[int] = []
    for batch in batches(taught, selection=Present("ramp", "letters"), columns=["ramp", "row"]):
        weighed = batch["row_weight"] > 0
        assert batch["ramp.present"].all()
        seen += batch["row"][weighed].tolist()
    assert sorted(seen) == np.flatnonzero(bits).tolist()
    short = Where("short", lambda columns: columns["data"].lengths <= 7, columns=["data"])  # type: ignore[union-attr]
    within = Present("ramp", within=short)
    assert 0 < len(within.select(taught)) < len(seen)
    with pytest.raises(NotFound, match="nowhere"):
        Present("nowhere").select(taught)


def test_the_state_of_a_loader_knows_the_layers_that_must_be_present(taught: fb.Cache) -> None:
    loader = Loader(taught, global_batch_size=2, selection=Present("ramp"))
    next(iter(loader))
    with pytest.raises(fb.errors.StateMismatch, match="selection"):
        Loader(taught, global_batch_size=2, selection=Present("letters")).load_state_dict(loader.state_dict())


def test_wrong_names_are_refused(taught: fb.Cache, tokens: fb.Cache) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        Loader(taught, global_batch_size=2, columns=[Timed("nowhere", 0.5)])
    with pytest.raises(fb.errors.NotFound):
        Loader(taught, global_batch_size=2, columns=[Timed("letters", 0.5)])
    with pytest.raises(NotFound, match="clip"):
        Loader(tokens, global_batch_size=2, columns=["clip"])
    with pytest.raises(ValueError, match="the function of times returned shape"):
        batches(taught, threads=0, columns=[Timed("ramp", lambda coins: np.zeros(3))])


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    """Two rows of eight tokens, with numbers for each token."""
    columns = (
        Column(name="tokens", dtype="uint16", shape=(8,)),
        Column(name="seq_lens", dtype="uint16", ragged=True),
        Column(name="mask", dtype="bool", shape=(8,)),
        Column(name="weights", dtype="float16", shape=(8,)),
    )
    numbers = np.array([[0, 1, 1, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 1, 1, 1]])
    rows = {
        "tokens": np.arange(16, dtype=np.uint16).reshape(2, 8),
        "seq_lens": Ragged.of([np.array([4, 3]), np.array([8])], np.dtype(np.uint16)),
        "mask": numbers.astype(bool),
        "weights": (numbers / 2).astype(np.float16),
    }
    root = tmp_path_factory.mktemp("weighed")
    stored_cache(LocalStore(root), columns, [rows])
    return fb.open_cache(root)


@pytest.mark.parametrize("style", ["shifted", "unshifted"])
def test_a_loss_mask_decides_which_labels_count(weighed: fb.Cache, style: Any) -> None:
    for column in ("mask", "weights"):
        options: dict[str, Any] = {"labels": style, "derive": ["num_label_tokens"]}
        (all_labels,) = batches(weighed, 2, shuffle=None, collate=TokenBatch(weighed, **options))
        masked = TokenBatch(weighed, loss_mask=column, **options)
        (batch,) = batches(weighed, 2, shuffle=None, collate=masked)
        counted = torch.from_numpy(np.asarray(weighed.read([0, 1], ["mask"])["mask"]))
        counted = counted.roll(-1, dims=1) if style == "shifted" else counted
        expected = torch.where(counted, all_labels["labels"], -100)
        assert torch.equal(batch["labels"], expected)
        assert int(batch["num_label_tokens"]) == int((expected != -100).sum())
        assert ("loss_weights" in batch) == (column == "weights")
        if column == "weights":
            assert torch.equal(batch["loss_weights"], (expected != -100) * 0.5)


def test_fixed_shapes_do_not_depend_on_the_documents(tokens: fb.Cache) -> None:
    made = batches(tokens, 3, collate=TokenBatch(tokens, max_documents=9, derive=["cu_seqlens"]))
    assert {(batch["seq_lens"].shape, batch["cu_seqlens"].shape) for batch in made} == {((3, 9), (31,))}
    for batch, plain in zip(made, batches(tokens, 3, collate=TokenBatch(tokens, derive=["cu_seqlens"])), strict=True):
        count = len(plain["cu_seqlens"])
        assert torch.equal(batch["cu_seqlens"][:count], plain["cu_seqlens"])
        assert (batch["cu_seqlens"][count:] == batch["tokens"].numel()).all()
        assert batch["max_seqlen"] == batch["tokens"].shape[1]
        assert isinstance(plain["max_seqlen"], int)
    with pytest.raises(ValueError, match=r"more than max_documents=1; raise it"):
        batches(tokens, collate=TokenBatch(tokens, max_documents=1))


def test_a_column_that_labels_are_made_of_comes_if_it_is_named(weighed: fb.Cache) -> None:
    (batch,) = batches(
        weighed, 2, shuffle=None, columns=["weights", "mask"], collate=TokenBatch(weighed, loss_mask="weights")
    )
    for name in ("weights", "mask"):
        assert torch.equal(batch[name], torch.from_numpy(np.asarray(weighed.read([0, 1], [name])[name])))
    assert "loss_weights" in batch
    assert "weights" not in batches(weighed, 2, collate=TokenBatch(weighed, loss_mask="weights"))[0]


def test_a_column_of_a_layer_that_a_cache_of_a_mixture_lacks_has_absent_rows(
    taught: fb.Cache, untaught: fb.Cache
) -> None:
    mixture = Mixture.of([Ingredient(untaught, weight=1), Ingredient(taught, weight=1)])
    bits = np.asarray(taught.read(np.arange(len(taught)), ["ramp"])["ramp.present"])
    prompt = Filled("letters_prompt", 7)
    for batch in batches(mixture, 8, columns=["ramp", prompt, "data", "row"]):
        strange = batch["dataset_id"] == 0
        assert not batch["ramp.present"][strange].any()
        assert batch["ramp"][strange].isnan().all()
        assert (batch["letters_prompt"][strange] == 7).all()
        rows = batch["row"][~strange].numpy()
        assert batch["ramp.present"][~strange].tolist() == bits[rows].tolist()
        stored = torch.from_numpy(np.asarray(taught.read(rows, ["ramp"])["ramp"]))
        assert torch.equal(batch["ramp"][~strange].nan_to_num(9), stored.nan_to_num(9))
        assert batch["letters.present"].tolist() == (~strange).tolist()
    with pytest.raises(NotFound, match="nowhere"):
        Loader(mixture, global_batch_size=2, columns=["nowhere"])
    with pytest.raises(ValueError, match=r"has no column 'letters_prompt', .*pass Filled\('letters_prompt', value\)"):
        Loader(mixture, global_batch_size=2, columns=["letters_prompt"])


@pytest.mark.slow
def test_encodings_and_features_of_added_rows_come_after_growth(tmp_path: Path) -> None:
    root, lines = prompt_cache(tmp_path), tmp_path / "prompts.txt"
    layers = [TeacherRecipe(teacher=teacher, buckets=BUCKETS, batch_size=3) for teacher in (Letters(), Ramp())]
    for recipe in layers:
        fb.build(root, None, recipe)
    loader = Loader(fb.open_cache(root), global_batch_size=1, growth="epoch", columns=["letters", Timed("ramp", 0.5)])
    assert len(list(loader)) == 10
    lines.write_text(lines.read_text() + "two hills\na dog\n")
    fb.update(root, fb.sources.lines(lines), workers=0)
    for recipe in layers:
        fb.build(root, None, recipe)
    before, after = len(list(loader)), list(loader)
    assert (before, len(after)) == (10, 12)
    assert all(bool(batch["letters.present"]) and bool(batch["ramp.present"]) for batch in after)


def test_a_dataset_has_what_a_loader_has(weighed: fb.Cache, taught: fb.Cache) -> None:
    collate = TokenBatch(weighed, loss_mask="weights", max_documents=5)
    options: dict[str, Any] = {"collate": collate, "columns": ["weights"]}
    (batch,) = batches(weighed, 2, shuffle=None, **options)
    for number, row in enumerate(CacheDataset(weighed, **options)[at] for at in range(2)):
        assert row.keys() == batch.keys() - {"row_weight"}
        assert all(torch.equal(values, batch[name][number]) for name, values in row.items())
    timed = CacheDataset(taught, columns=["letters", Timed("ramp", 0.4), "row"])
    reader = fb.teachers.features(taught, "ramp")
    for dataset in (timed, pickle.loads(pickle.dumps(timed))):  # as a spawned worker has it
        row = dataset[1]
        assert row["ramp"].tolist() == reader.at([1], 0.4)["ramp"][0].tolist()
        assert row["letters"].tolist() == taught.read([1], ["letters"])["letters"][0].tolist()


def test_ragged_rows_of_a_dataset_are_collated_as_a_loader_does(tokens: fb.Cache) -> None:
    dataset = CacheDataset(tokens, columns=["documents"], names={"lengths": "seq_lens", "documents": "documents"})
    made = DataLoader(dataset, batch_size=4, collate_fn=dataset.collate_rows)
    for batch, expected in zip(made, batches(tokens, columns=["documents"], shuffle=None), strict=True):
        weighed = int(expected["row_weight"].sum())
        assert torch.equal(batch["lengths"], expected["seq_lens"][:weighed])
        assert batch["documents.offsets"].tolist() == expected["documents.offsets"][: weighed + 1].tolist()
        assert torch.equal(batch["documents"], expected["documents"][: len(batch["documents"])])
    single = dataset.collate_rows([dataset[0], dataset[3]])  # read apart, of different widths
    assert single["lengths"].shape == (2, max(len(dataset[at]["lengths"]) for at in (0, 3)))


def test_what_belongs_to_batches_is_refused_for_rows(tokens: fb.Cache) -> None:
    for options in ({"derive": ["num_label_tokens"]}, {"derive": ["cu_seqlens"]}, {"on_device": True}):
        with pytest.raises(ValueError, match="tensors of whole batches, which cannot be split into rows"):
            CacheDataset(tokens, collate=TokenBatch(tokens, **options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be a whole number of at least 0"):
        CacheDataset(tokens, seed="1")  # type: ignore[arg-type]
