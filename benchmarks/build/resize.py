"""Building images with two workers: the compiled resize next to Pillow alone."""

import shutil
from collections.abc import Iterator

import forebay as fb
from benchmarks.lib.image_data import SIZE, Images
from benchmarks.lib.options import Options
from benchmarks.lib.pillow_recipe import CompiledRecipe, PillowRecipe
from benchmarks.lib.result import Result, compared
from benchmarks.lib.timing import in_turn, rate_of

CASE = "build.resize"


def measure(options: Options) -> Iterator[Result]:
    images, root = Images.of(options), options.folder / "built-images"
    images.files()

    def build(recipe: type[fb.ImageRecipe]) -> float:
        shutil.rmtree(root, ignore_errors=True)
        recipe_of_size = recipe(size=SIZE, tags=())
        return rate_of(lambda: fb.build(root, images.source(), recipe_of_size, workers=2, progress=False), images.count)

    rates = in_turn({"ours": lambda: build(CompiledRecipe), "theirs": lambda: build(PillowRecipe)}, options.rounds)
    shutil.rmtree(root, ignore_errors=True)
    yield compared(
        CASE, f"build, two workers, {images.count:,} photographs, compiled resize", "the same with Pillow",
        rates["ours"], rates["theirs"], unit="images/s", equal="same bytes", at_least=1.18,
    )  # fmt: skip
