"""Check on your own model that documents do not see each other, and that padding is not seen at all.

Each check changes a part of the input that must not matter, and compares the output that must not change:

    input        a a a b b . .      change b →      a a a B B . .
    output       x x x y y z z                      x x x Y Y z z       only the output of b may differ

An empty list means no leaks; each `Leak` names the documents involved. Each part is replaced several times by random
values of another mean and spread, because a model may depend on either. Inputs that cannot prove anything are errors:
a model that is random (dropout), does not react to its input or returns NaN; a batch with nothing to keep apart.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forebay.masks.documents import document_ids, padding_mask
from forebay.masks.rectangle import IGNORE_THRESHOLD, pixel_mask, token_ignore_mask

Model = Callable[[Tensor], Tensor]
REPLACEMENTS = 3


@dataclass(frozen=True, slots=True)
class Leak:
    """Changing one document moved the output of another."""

    changed_row: int
    changed: int  # number of the document of `changed_row` that was changed
    row: int
    reached: int  # number of the document of `row` whose output moved
    difference: float

    def __str__(self) -> str:
        where = "" if self.row == self.changed_row else f" of row {self.row}"
        return (
            f"row {self.changed_row}: changing document {self.changed} moved the output of document "
            f"{self.reached}{where} by {self.difference:.3g}"
        )


@dataclass(frozen=True, slots=True)
class PaddingLeak:
    """Changing the padding of an image moved its output, or that of another."""

    changed_image: int
    image: int
    difference: float

    def __str__(self) -> str:
        whose = "its padding" if self.image == self.changed_image else f"the padding of image {self.changed_image}"
        return f"image {self.image}: changing {whose} moved the output by {self.difference:.3g}"


@torch.no_grad()
def document_leaks(
    model: Model, inputs: Tensor, seq_lens: Tensor | ArrayLike, *, tolerance: float = 1e-6
) -> list[Leak]:
    """Return the documents whose output changed when another document was changed; padding is a document too.

        assert not document_leaks(lambda tokens: model(tokens, seq_lens), tokens, seq_lens)

    `inputs` are token ids `[rows, S]` or embeddings `[rows, S, …]`, and the output starts with `[rows, S]`.
    One document of one row is changed at a time, so leaks between rows are found as well: three passes per document of
    the batch, and two more. A small batch proves as much as a large one.
    """
    lengths = seq_lens.cpu().numpy() if isinstance(seq_lens, Tensor) else seq_lens
    ids = torch.from_numpy(document_ids(lengths, inputs.shape[1])).to(inputs.device)
    padded = torch.from_numpy(padding_mask(lengths, inputs.shape[1])).to(inputs.device)
    _check_rows(inputs, ids)
    before = _steady_output(model, inputs)
    _check_output(before, ids)
    leaks = []
    for row, document in _documents(ids):
        changed = _only(ids == document, row)
        moved = _moved(model, inputs, before, _like(changed, inputs), keep_dims=2)
        row_leaks = _leaks_of(row, document, moved.masked_fill(changed, 0.0), ids, tolerance)
        # Padding need not react: its output may well be zeroed.
        if not row_leaks and not bool((changed & padded).any()):
            _check_reaction(moved[changed], tolerance, f"document {document} of row {row}")
        leaks += row_leaks
    return leaks


@torch.no_grad()
def padding_leaks(
    model: Model,
    images: Tensor,
    rectangles: Tensor | ArrayLike,
    patch: int,
    *,
    threshold: float = IGNORE_THRESHOLD,
    tolerance: float = 1e-6,
) -> list[PaddingLeak]:
    """Return the images whose output changed when the padding of ignored patches was changed, image by image.

        assert not padding_leaks(lambda images: model(images, ignore), images, rectangles, patch=16)

    `images` are `[images, channels, height, width]`. A patch with enough content to be kept is seen as a whole, so its
    padded pixels are not changed. Return from `model` what must not change: CLS, pooled or kept tokens; the output of
    an ignored token may.
    """
    boxes = rectangles.cpu().numpy() if isinstance(rectangles, Tensor) else rectangles
    size = (images.shape[2], images.shape[3])
    padded = torch.from_numpy(pixel_mask(boxes, size)).to(images.device)
    ignored = torch.from_numpy(token_ignore_mask(boxes, size, patch, threshold)).to(images.device)
    unseen = padded & ignored.repeat_interleave(patch, 1).repeat_interleave(patch, 2)
    _check_something_unseen(images, unseen)
    before = _steady_output(model, images)
    for image, reaction in enumerate(_moved(model, images, before, ~padded[:, None], keep_dims=1)):
        _check_reaction(reaction, tolerance, f"the content of image {image}")
    leaks = []
    for changed in torch.nonzero(unseen.any(dim=(1, 2))).flatten().tolist():
        moved = _moved(model, images, before, _only(unseen, changed)[:, None], keep_dims=1)
        reached = torch.nonzero(moved > tolerance).flatten().tolist()
        leaks += [PaddingLeak(changed, image, float(moved[image])) for image in reached]
    return leaks


def _documents(ids: Tensor) -> list[tuple[int, int]]:
    """Return all (row, document) of the batch, padding tails included."""
    return [(row, document) for row, numbers in enumerate(ids) for document in range(int(numbers.max()) + 1)]


def _leaks_of(row: int, document: int, moved: Tensor, ids: Tensor, tolerance: float) -> list[Leak]:
    pairs = {(int(at), int(ids[at, token])) for at, token in torch.nonzero(moved > tolerance)}
    return [
        Leak(row, document, at, reached, float(moved[at, ids[at] == reached].max())) for at, reached in sorted(pairs)
    ]


def _steady_output(model: Model, inputs: Tensor) -> Tensor:
    before, again = model(inputs), model(inputs)
    if not isinstance(before, Tensor):
        raise TypeError(f"the model must return a tensor (got a {type(before).__name__}); return the one to check")
    if bool(before.isnan().any()):
        raise ValueError("the output of the model has NaN, which cannot be compared; fix that before this check")
    if not torch.equal(before, again):
        raise ValueError(
            "the model returns different outputs for one input, so a change proves nothing; call model.eval() first"
        )
    return before


def _moved(model: Model, inputs: Tensor, before: Tensor, changed: Tensor, keep_dims: int) -> Tensor:
    """Return the largest change per token (`keep_dims` 2) or per image (1) over all replacements of `changed`."""
    outputs = (model(torch.where(changed, other, inputs)) for other in _replacements(inputs))
    return torch.stack([_difference(before, output, keep_dims) for output in outputs]).amax(0)


def _difference(before: Tensor, after: Tensor, keep_dims: int) -> Tensor:
    # A change to NaN counts as infinite; an infinite output that stays infinite did not change.
    difference = (after.double() - before.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(after == before, 0.0, difference).reshape(*before.shape[:keep_dims], -1).amax(-1)


def _replacements(inputs: Tensor) -> Iterator[Tensor]:
    """Yield random inputs, the same in every call: other means and spreads for floats, any id or byte for integers."""
    generator = torch.Generator().manual_seed(0)
    for number in range(REPLACEMENTS):
        yield _random_like(inputs, number, generator).to(inputs.device, inputs.dtype)


def _random_like(inputs: Tensor, number: int, generator: torch.Generator) -> Tensor:
    if inputs.is_floating_point():
        values = inputs.double()
        scale = float(values.std(correction=0)) or 1.0
        spread, offset = (1.0, 3.0, 0.3)[number % 3], (0.0, 1.5, -1.5)[number % 3]
        noise = torch.randn(inputs.shape, generator=generator, dtype=torch.float64)
        return float(values.mean()) + scale * (spread * noise + offset)
    stop = 256 if inputs.dtype == torch.uint8 else max(2, int(inputs.max()) + 1)
    values, here = torch.randint(0, stop, inputs.shape, generator=generator), inputs.long().cpu()
    return torch.where(values == here, (here + 1) % stop, values)


def _only(choice: Tensor, row: int) -> Tensor:
    """Return `choice` in one row, and False elsewhere."""
    alone = torch.zeros_like(choice)
    alone[row] = choice[row]
    return alone


def _like(choice: Tensor, inputs: Tensor) -> Tensor:
    return choice.reshape(choice.shape + (1,) * (inputs.dim() - 2))


def _check_rows(inputs: Tensor, ids: Tensor) -> None:
    if len(inputs) != len(ids):
        raise ValueError(f"inputs has {len(inputs)} rows but seq_lens has {len(ids)}; pass the lengths of this batch")
    if len(_documents(ids)) < 2:
        raise ValueError(
            "the batch has only one document, so there is nothing to keep apart; pass two documents or rows, or more"
        )


def _check_output(output: Tensor, ids: Tensor) -> None:
    if output.shape[:2] != ids.shape:
        raise ValueError(
            f"the model must return one entry per token, [{ids.shape[0]}, {ids.shape[1]}, …] "
            f"(got {tuple(output.shape)})"
        )


def _check_something_unseen(images: Tensor, unseen: Tensor) -> None:
    if len(images) != len(unseen):
        raise ValueError(f"there are {len(images)} images but {len(unseen)} rectangles; pass those of this batch")
    if not bool(unseen.any()):
        raise ValueError(
            "no patch of these images is ignored, so there is no padding to change and nothing to prove; "
            "pass images whose letterbox leaves whole patches of padding"
        )


def _check_reaction(moved: Tensor, tolerance: float, what: str) -> None:
    if not bool((moved > tolerance).any()):
        raise ValueError(
            f"the output does not react to {what}, so an unchanged output proves nothing; "
            "check that the model uses its input (a new head may be all zeros)"
        )
