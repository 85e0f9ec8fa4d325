"""The letterbox as a module equals the one of training: as torch runs it, and as onnxruntime runs its export."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from torch import nn

import forebay as fb
from forebay.errors import RecipeInvalid
from forebay.images import fit, fit_many, prepare
from forebay.masks.rectangle import token_padding
from forebay.torch import LetterboxModule
from forebay.torch.images.letterbox_module import letterbox_box

SIZE, PATCH = 48, 8
RECIPE = fb.ImageRecipe(size=SIZE, pad_color=(1, 114, 250))
RESAMPLES = ("bilinear", "bicubic", "lanczos")
DYNAMIC = torch.export.Dim.DYNAMIC

# A pixel, the canvas, a little more, a lot more; wide and tall, so that both orders of the passes come; (52, 58), where
# the edge of a box falls on a pixel's center but for rounding; (12, 33), where a patch has just padding enough.
TELLING_SIZES = [
    *((1, 1), (1, 9000), (9000, 1), (2, 700), (700, 2), (48, 48), (49, 48), (48, 49), (47, 97), (97, 47), (500, 480)),
    *((52, 58), (58, 52), (12, 33)),
]
sides = st.one_of(st.integers(1, 100), st.integers(1, 500))
resamples = st.sampled_from(RESAMPLES)

Arrays = Mapping[str, np.ndarray]


class Boxes(nn.Module):
    def forward(self, sides: torch.Tensor) -> torch.Tensor:
        return letterbox_box(sides, SIZE)


class Graph:
    """An exported module, run by onnxruntime."""

    def __init__(self, module: nn.Module, argument: torch.Tensor, dynamic: dict[int, Any], path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's exporter has some for torch
            torch.onnx.export(module.eval(), (argument,), path, dynamo=True, dynamic_shapes=(dynamic,), verbose=False)
        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def __call__(self, argument: np.ndarray) -> list[np.ndarray]:
        return self._session.run(None, {self._session.get_inputs()[0].name: argument})


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take longer than such small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def exported(resample: str, folder: Path) -> Graph:
    recipe = fb.ImageRecipe(size=SIZE, pad_color=RECIPE.pad_color, resample=resample)
    module = LetterboxModule(recipe, normalize="imagenet", dtype=torch.float32, patch=PATCH)
    image = torch.zeros(50, 60, 3, dtype=torch.uint8)
    return Graph(module, image, {0: DYNAMIC, 1: DYNAMIC}, folder / f"{resample}.onnx")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return exported("bilinear", tmp_path_factory.mktemp("graph"))


def noise(width: int, height: int, contrast: str = "gray") -> np.ndarray:
    """Pixels that agree with nothing; in black and white, filters overshoot."""
    values = np.random.default_rng(width * 10007 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return values if contrast == "gray" else (values // 128 * 255).astype(np.uint8)


def as_in_training(image: np.ndarray, recipe: fb.ImageRecipe = RECIPE) -> Arrays:
    prepared = prepare(image, recipe, normalize="imagenet", dtype=np.float32)
    box = np.array([prepared.letterbox.box], np.int32)
    return {
        "pixels": prepared.pixels[None],
        "box": box,
        "original_size": np.array([prepared.letterbox.image], np.int32),
        "pixel_mask": prepared.pixel_mask[None],
        "token_mask": token_padding(box, (SIZE, SIZE), PATCH) >= 0.9,
    }


def assert_equal(found: Arrays, expected: Arrays) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_graph_equals_training(graph: Graph, image: np.ndarray, recipe: fb.ImageRecipe = RECIPE) -> None:
    expected = as_in_training(image, recipe)
    assert_equal(dict(zip(expected, graph(image), strict=True)), expected)


@given(width=st.integers(1, 1 << 20), height=st.integers(1, 1 << 20), size=st.integers(1, 1 << 14))
@settings(max_examples=scaled(300))
def test_the_box_is_the_one_of_training_for_every_size(width: int, height: int, size: int) -> None:
    assert tuple(letterbox_box(torch.tensor([width, height]), size).tolist()) == fit(width, height, size).box


@pytest.mark.slow
def test_the_box_in_a_graph_is_the_one_of_training_for_every_size(tmp_path: Path) -> None:
    small = np.stack(np.meshgrid(np.arange(1, 250), np.arange(1, 250)), axis=-1).reshape(-1, 2)
    large = np.random.default_rng(0).integers(1, 1 << 20, (100_000, 2))
    graph = Graph(Boxes(), torch.ones(5, 2, dtype=torch.int64), {0: DYNAMIC}, tmp_path / "boxes.onnx")
    for sizes in (small, large):
        np.testing.assert_array_equal(graph(sizes)[0], fit_many(sizes, SIZE))


@given(width=sides, height=sides, contrast=st.sampled_from(["gray", "full"]), resample=resamples)
@settings(max_examples=scaled(100))
def test_every_filter_gives_the_pixels_of_pillow(width: int, height: int, contrast: str, resample: str) -> None:
    image, recipe = noise(width, height, contrast), fb.ImageRecipe(size=SIZE, resample=resample)
    pixels = LetterboxModule(recipe)(torch.from_numpy(image))["pixels"]
    np.testing.assert_array_equal(pixels[0].numpy(), prepare(image, recipe).pixels)


@pytest.mark.parametrize("resample", RESAMPLES)
def test_every_filter_gives_the_pixels_of_pillow_at_telling_sizes(resample: str) -> None:
    recipe = fb.ImageRecipe(size=SIZE, resample=resample)
    for size in TELLING_SIZES:
        pixels = LetterboxModule(recipe)(torch.from_numpy(noise(*size)))["pixels"]
        np.testing.assert_array_equal(pixels[0].numpy(), prepare(noise(*size), recipe).pixels, err_msg=str(size))


@pytest.mark.slow
@given(width=sides, height=sides, contrast=st.sampled_from(["gray", "full"]))
@settings(max_examples=scaled(100))
def test_onnxruntime_gives_pixels_masks_and_box_of_training(
    graph: Graph, width: int, height: int, contrast: str
) -> None:
    assert_graph_equals_training(graph, noise(width, height, contrast))


@pytest.mark.slow
@pytest.mark.parametrize("size", TELLING_SIZES, ids=str)
def test_onnxruntime_gives_pixels_masks_and_box_of_training_at_telling_sizes(
    graph: Graph, size: tuple[int, int]
) -> None:
    assert_graph_equals_training(graph, noise(*size))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("resample", RESAMPLES)
def test_onnxruntime_gives_the_pixels_of_every_filter(resample: str, tmp_path: Path) -> None:
    graph, recipe = exported(resample, tmp_path), fb.ImageRecipe(size=SIZE, pad_color=(1, 114, 250), resample=resample)
    sizes = np.random.default_rng(0).integers(1, 600, (500, 2)).tolist()
    for width, height in [*TELLING_SIZES, *sizes]:
        assert_graph_equals_training(graph, noise(width, height, "full"), recipe)


@pytest.mark.parametrize("resample", ["box", "nearest"])
def test_filters_that_cannot_be_exported_raise(resample: str) -> None:
    with pytest.raises(ValueError, match=f"'{resample}'"):
        LetterboxModule(fb.ImageRecipe(size=SIZE, resample=resample))


def test_torch_gives_the_tensors_of_training() -> None:
    module = LetterboxModule(RECIPE, normalize="imagenet", dtype=torch.float32, patch=PATCH)
    for size in ((60, 90), (90, 60), (48, 30), (700, 60), (12, 33)):
        image = noise(*size)
        found = {name: value.numpy() for name, value in module(torch.from_numpy(image)).items()}
        assert_equal(found, as_in_training(image))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_there() -> None:
    module = LetterboxModule(RECIPE, patch=PATCH)
    for size in ((60, 90), (90, 60), (700, 60)):
        image = torch.from_numpy(noise(*size))
        for name, value in module(image.cuda()).items():
            assert value.is_cuda, name
            assert torch.equal(value.cpu(), module(image)[name]), name


def test_images_come_with_their_channels_first_as_well_and_several_of_one_size_together() -> None:
    module = LetterboxModule(RECIPE, patch=PATCH)
    images = [torch.from_numpy(noise(70, 90, contrast)) for contrast in ("gray", "full")]
    together = module(torch.stack(images).permute(0, 3, 1, 2))
    for place, image in enumerate(images):
        for name, value in module(image).items():
            assert torch.equal(together[name][place : place + 1], value), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_are_rounded_once_whatever_the_type_of_the_model(dtype: torch.dtype) -> None:
    image = torch.from_numpy(noise(70, 90))
    exact = LetterboxModule(RECIPE, normalize="imagenet", dtype=torch.float32)(image)["pixels"]
    module = LetterboxModule(RECIPE, normalize="imagenet", dtype=dtype).to(dtype)
    assert torch.equal(module(image)["pixels"], exact.to(dtype))


def test_an_image_without_a_token_is_refused_and_in_a_graph_has_them_all_ignored(graph: Graph) -> None:
    with pytest.raises(RecipeInvalid, match="content of 1 × 1 pixels"):
        LetterboxModule(RECIPE, patch=PATCH)(torch.zeros(1, 1, 3, dtype=torch.uint8))
    assert graph(np.zeros((1, 1, 3), np.uint8))[-1].all()


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (torch.zeros(20, 30, 3), r"must be torch\.uint8 .* \(got torch\.float32 \(20, 30, 3\)\)"),
        (torch.zeros(3, 20, 30, dtype=torch.uint8), r"torch\.uint8 \[height, width, 3\] .*\(3, 20, 30\)"),
        (torch.zeros(20, 30, dtype=torch.uint8), r"\(got torch\.uint8 \(20, 30\)\)"),
        (torch.zeros(0, 30, 3, dtype=torch.uint8), r"30 × 0 pixels; both sides must be at least 1"),
    ],
)
def test_what_is_no_image_is_refused(image: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LetterboxModule(RECIPE)(image)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"normalize": "imagenet"}, "normalize needs a float dtype"),
        ({"dtype": torch.int64}, r"dtype must be torch\.uint8 or a float type \(got torch\.int64\)"),
        ({"patch": 7}, "does not divide into patches of 7"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LetterboxModule(RECIPE, **options)
