"""Paint content onto the canvases of a batch, make their masks, and transform pixels, pixel mask and box together.

    pad ··························        lines above and below the content are padding
    pad ···│ content [3, h, w] │···       lines of content are processed at full width, as many at once as fit in a
    pad ···│ flipped or not    │···       core's cache: they are contiguous in memory, and fast to scale
    pad ··························

A canvas has the storage type of its tensor: uint8, float32, or int16 for the two 16-bit floats, which numpy either
lacks or is slow at.

Transforms change pixels, pixel mask and box of letterboxed images together:

    def jitter(canvases: Canvases, coins: Coins) -> Canvases:
        return canvases.shifted(coins.integers("right", -16, 17), coins.integers("down", -16, 17))

    ImageBatch(cache, flip=0.5, transforms=[jitter])

Transforms run after the flip and before normalisation, so they get uint8. A coin depends on sample, epoch and purpose
only, so the choice is the same with any number of threads or workers.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from forebay import compiled
from forebay.columns import Array
from forebay.errors import AllTokensIgnored
from forebay.images import ImageRecipe
from forebay.images.geometry import Scaling
from forebay.masks.documents import Bools
from forebay.masks.rectangle import IGNORE_THRESHOLD, Size, token_ignore_mask, token_padding
from forebay.order.orders import Coins
from forebay.torch.batches import Batch, Buffers, to_tensor, wrap

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Canvases:
    """Images on canvases of one size, with their padding.

    pixels   uint8 [images, 3, height, width]
    mask     bool  [images, height, width], True = PAD
    box      int32 [images, 4], left, top, width, height; all content is inside
    """

    pixels: Tensor
    mask: Tensor
    box: Tensor
    pad_color: tuple[int, int, int]

    def __post_init__(self) -> None:
        count, height, width = len(self.pixels), *self.pixels.shape[-2:]
        expected = {
            "pixels": (torch.uint8, [count, 3, height, width]),
            "mask": (torch.bool, [count, height, width]),
            "box": (torch.int32, [count, 4]),
        }
        for name, (dtype, shape) in expected.items():
            value = getattr(self, name)
            if value.dtype != dtype or list(value.shape) != shape:
                raise ValueError(f"{name} must be {dtype} {shape} (got {value.dtype} {list(value.shape)})")

    @property
    def size(self) -> Size:
        height, width = self.mask.shape[-2:]
        return height, width

    def shifted(self, right: ArrayLike, down: ArrayLike) -> "Canvases":
        """Return every image moved by whole pixels, one number for all or one each; what leaves the canvas is lost.

        a b . .      right 1, down 0      . a b .
        c d . .                           . c d .
        """
        return self.seen_through(-_each(right, len(self.box)), -_each(down, len(self.box)), self.size)

    def seen_through(self, left: ArrayLike, top: ArrayLike, size: Size) -> "Canvases":
        """Return a window of this size of every canvas; beyond the canvas there is padding.

        a b . .      left 1, top 0,       b .
        c d . .      size (2, 2)          d .
        """
        count = len(self.box)
        lefts, tops = _each(left, count), _each(top, count)
        pixels = torch.empty((count, 3, *size), dtype=torch.uint8)
        pixels[:] = torch.tensor(self.pad_color, dtype=torch.uint8)[:, None, None]
        mask = torch.ones((count, *size), dtype=torch.bool)
        for image, (x, y) in enumerate(zip(lefts.tolist(), tops.tolist(), strict=True)):
            here, there = _overlap(y, size[0], self.size[0]), _overlap(x, size[1], self.size[1])
            pixels[image, :, here[0], there[0]] = self.pixels[image, :, here[1], there[1]]
            mask[image, here[0], there[0]] = self.mask[image, here[1], there[1]]
        return Canvases(pixels, mask, _boxes_through(self.box, lefts, tops, size), self.pad_color)

    def resized_from(self, rectangles: ArrayLike, size: Size) -> "Canvases":
        """Return a rectangle (left, top, width, height) of every canvas, resized to `size`; an empty one is padding.

        Pixels are resized bilinearly, each from all pixels it covers; a pixel of the mask is that of the nearest one.
        """
        places = _on_canvas(rectangles, len(self.box), self.size)
        pixels = torch.empty((len(places), 3, *size), dtype=torch.uint8)
        pixels[:] = torch.tensor(self.pad_color, dtype=torch.uint8)[:, None, None]
        mask = torch.ones((len(places), *size), dtype=torch.bool)
        for image, (x, y, width, height) in enumerate(places.tolist()):
            if width and height:
                part = self.pixels[image : image + 1, :, y : y + height, x : x + width]
                padded = self.mask[image, y : y + height, x : x + width]
                pixels[image] = interpolate(part, size, mode="bilinear", antialias=True, align_corners=False)[0]
                mask[image] = interpolate(padded[None, None].to(torch.uint8), size, mode="nearest-exact")[0, 0] > 0
        return Canvases(pixels, mask, _bounds(mask), self.pad_color)


class JointTransform(Protocol):
    """Makes canvases of canvases, with the coins of their samples."""

    def __call__(self, canvases: Canvases, coins: Coins, /) -> Canvases: ...


def transformed(canvases: Canvases, transforms: Sequence[JointTransform], coins: Coins) -> Canvases:
    """Apply transforms in order; raise if one does not move image, mask and box together."""
    for transform in transforms:
        count = len(canvases.box)
        canvases = transform(canvases, coins)
        _check(canvases, count, getattr(transform, "__name__", type(transform).__name__))
    return canvases


def _check(canvases: Canvases, count: int, name: str) -> None:
    if len(canvases.box) != count:
        raise ValueError(f"the transform {name} made {len(canvases.box)} images of {count}; each must stay one")
    height, width = canvases.size
    left, top, wide, high = canvases.box.to(torch.int64).T[:, :, None]
    beyond = (canvases.box < 0).any(dim=1) | ((left + wide > width) | (top + high > height)).any(dim=1)
    if beyond.any():
        image = int(beyond.int().argmax())
        raise ValueError(
            f"the transform {name} gave image {image} the box {canvases.box[image].tolist()}, which is not on a canvas "
            f"of {height} × {width} pixels; cut it where the canvas ends"
        )
    y, x = torch.arange(height), torch.arange(width)
    rows = (~canvases.mask).any(dim=2) & ((y < top) | (y >= top + high))
    columns = (~canvases.mask).any(dim=1) & ((x < left) | (x >= left + wide))
    outside = rows.any(dim=1) | columns.any(dim=1)
    if outside.any():
        image = int(outside.int().argmax())
        raise ValueError(
            f"the transform {name} left content of image {image} outside its box {canvases.box[image].tolist()}; "
            "move pixels, mask and box together: use the methods of Canvases, or change all three"
        )


def _each(values: ArrayLike, count: int) -> Ints:
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iu" or numbers.shape not in ((), (count,)):
        raise ValueError(f"pass whole pixels, one number or {count} (got {numbers.dtype} {list(numbers.shape)})")
    return np.broadcast_to(numbers.astype(np.int64), (count,))


def _on_canvas(rectangles: ArrayLike, count: int, size: Size) -> Ints:
    places = np.asarray(rectangles)
    if places.dtype.kind not in "iu" or places.shape != (count, 4):
        raise ValueError(f"pass whole pixels, [{count}, 4] (got {places.dtype} {list(places.shape)})")
    left, top, width, height = places = places.astype(np.int64).T
    if (places < 0).any() or (left + width > size[1]).any() or (top + height > size[0]).any():
        raise ValueError(f"a rectangle is not on its canvas of {size[0]} × {size[1]} pixels; clip it to the canvas")
    return places.T


def _bounds(mask: Tensor) -> Tensor:
    """Return the boxes `[images, 4]` of what is not padding, empty ones where all is."""
    (left, width), (top, height) = (_extent((~mask).any(dim=axis).to(torch.int32)) for axis in (1, 2))
    return torch.stack((left, top, width, height), dim=1).to(torch.int32)


def _extent(lines: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of the lines `[images, lines]` that is 1, and how many there are up to the last."""
    first, behind = lines.argmax(dim=1), lines.flip(1).argmax(dim=1)
    return first, torch.where(lines.any(dim=1), lines.shape[1] - behind - first, 0)


def _overlap(start: int, length: int, available: int) -> tuple[slice, slice]:
    """Return the part of a window from `start` on that has content, and the part of the content it shows."""
    low, high = max(0, start), min(available, start + length)
    if high <= low:
        return slice(0, 0), slice(0, 0)
    return slice(low - start, high - start), slice(low, high)


def _boxes_through(box: Tensor, left: Ints, top: Ints, size: Size) -> Tensor:
    """Return boxes as seen in a window; empty ones for content outside it."""
    old = box.numpy().astype(np.int64)
    x0, y0 = np.clip(old[:, 0] - left, 0, size[1]), np.clip(old[:, 1] - top, 0, size[0])
    x1 = np.clip(old[:, 0] + old[:, 2] - left, 0, size[1])
    y1 = np.clip(old[:, 1] + old[:, 3] - top, 0, size[0])
    seen = np.stack((x0, y0, x1 - x0, y1 - y0), axis=1)
    seen[(seen[:, 2:] == 0).any(axis=1)] = 0
    return torch.from_numpy(seen.astype(np.int32))


Planes = NDArray[np.uint8]  # (3, height, width)
Box = tuple[int, int, int, int]  # left, top, width, height
Color = tuple[int, int, int]
_CACHED_VALUES = 1 << 16  # float32 values that stay in a core's cache between two operations
_STREAMED_BYTES = 1 << 24  # canvases of a batch that the caches of a CPU could not keep anyway
_BEGUN = 2  # contents that are being painted while the next one is found
_SERIAL_VALUES = 1 << 15  # as many as torch copies without its own threads, which would compete with the loader's


class Painter(ABC):
    """Fills canvases `[3, height, width]` of one type; `pad` is the value of padding on each plane."""

    storage: np.dtype[Any]
    pad: Array  # (3,)

    @abstractmethod
    def paint(self, lines: Array, content: Planes, left: int) -> None:
        """Fill lines of a canvas with content that begins at `left`, and with padding on both sides."""

    def paint_canvas(self, canvas: Array, content: Planes, box: Box, *, streamed: bool = False) -> object | None:
        """Paint content in its box, and padding around it; compiled code returns work that it only began.

        Bytes that are `streamed` go past the caches of the CPU.
        """
        left, top, _, height = box
        for plane, pad in zip(canvas, self.pad, strict=True):
            plane[:top] = plane[top + height :] = pad
        self.paint(canvas[:, top : top + height], content, left)
        return None


class BytePainter(Painter):
    """Paints pixels as they are stored."""

    storage = np.dtype(np.uint8)

    def __init__(self, pad_color: Color) -> None:
        self.pad: Array = np.array(pad_color, np.uint8)
        self._pad_values = self.pad.tolist()

    def paint(self, lines: Array, content: Planes, left: int) -> None:
        right = left + content.shape[2]
        for plane, pad in zip(lines, self.pad, strict=True):
            plane[:, :left] = plane[:, right:] = pad
        np.copyto(lines[:, :, left:right], content)

    def paint_canvas(self, canvas: Array, content: Planes, box: Box, *, streamed: bool = False) -> object | None:
        if compiled.native is None or not canvas.flags.c_contiguous:
            return super().paint_canvas(canvas, content, box)
        planes = np.ascontiguousarray(content)
        return compiled.native.start_painting(canvas, canvas.shape[1:], planes, box, self._pad_values, streamed)


class FloatPainter(Painter):
    """Paints scaled values in float32."""

    storage = np.dtype(np.float32)

    def __init__(self, pad_color: Color, scaling: Scaling) -> None:
        self._pad_color, self._scaling = pad_color, scaling
        self.pad: Array = _scaled_pad(pad_color, scaling)
        self._values = tuple(each.ravel().tolist() for each in (self.pad, scaling.scale, scaling.shift))

    def paint(self, lines: Array, content: Planes, left: int) -> None:
        for rows, pixels in _whole_lines(content, left, lines.shape[2], self._pad_color, _CACHED_VALUES):
            self._scaling.apply(pixels, out=lines[:, rows])

    def paint_canvas(self, canvas: Array, content: Planes, box: Box, *, streamed: bool = False) -> object | None:
        if compiled.native is None or not canvas.flags.c_contiguous:
            return super().paint_canvas(canvas, content, box)
        planes = np.ascontiguousarray(content)
        return compiled.native.start_painting_scaled(canvas, canvas.shape[1:], planes, box, *self._values)


class HalfPainter(Painter):
    """Paints scaled values, rounded to a 16-bit float."""

    storage = np.dtype(np.int16)

    def __init__(self, pad_color: Color, scaling: Scaling, dtype: torch.dtype) -> None:
        self._pad_color, self._scaling, self._dtype = pad_color, scaling, dtype
        self.pad: Array = torch.from_numpy(_scaled_pad(pad_color, scaling)).to(dtype).view(torch.int16).numpy()

    def paint(self, lines: Array, content: Planes, left: int) -> None:
        for rows, pixels in _whole_lines(content, left, lines.shape[2], self._pad_color, _SERIAL_VALUES):
            values = torch.from_numpy(self._scaling.apply(pixels))
            torch.from_numpy(lines[:, rows]).view(self._dtype).copy_(values)


class InterleavingPainter(Painter):
    """Paints canvases with channels last: a few lines of planes at a time, then interleaved."""

    def __init__(self, planar: Painter) -> None:
        self._planar = planar
        self.storage, self.pad = planar.storage, planar.pad

    def paint(self, lines: Array, content: Planes, left: int) -> None:
        for rows in _strips(content.shape[1], lines.shape[2], _CACHED_VALUES):
            planes = np.empty(lines[:, rows].shape, self.storage)
            self._planar.paint(planes, content[:, rows], left)
            for between, plane in zip(lines[:, rows], planes, strict=True):
                np.copyto(between, plane)


def paint_canvases(with_painter: Painter, canvases: Array, contents: Iterable[Planes], boxes: Sequence[Box]) -> None:
    """Paint a canvas for each content; the next content is found while helpers paint those before."""
    begun: deque[object] = deque()
    streamed = canvases.nbytes >= _STREAMED_BYTES
    try:
        for canvas, content, box in zip(canvases, contents, boxes, strict=True):
            work = with_painter.paint_canvas(canvas, content, box, streamed=streamed)
            if work is not None:
                begun.append(work)
            if len(begun) > _BEGUN:
                compiled.native.finish(begun.popleft())
    finally:
        for work in begun:
            compiled.native.finish(work)


def painter(dtype: torch.dtype, pad_color: Color, scaling: Scaling) -> Painter:
    if dtype == torch.uint8:
        return BytePainter(pad_color)
    return FloatPainter(pad_color, scaling) if dtype == torch.float32 else HalfPainter(pad_color, scaling, dtype)


def mirrored(content: Planes) -> Planes:
    """Flip content left–right."""
    if compiled.native is not None and content.shape[2]:
        lines = np.ascontiguousarray(content)
        flipped = np.empty_like(lines)
        compiled.native.mirror(flipped, lines, content.shape[2])
        return flipped
    return content[:, :, ::-1]


def _whole_lines(
    content: Planes, left: int, width: int, pad_color: Color, values: int
) -> Iterator[tuple[slice, Planes]]:
    """Yield a few lines of content at a time, padded on both sides if it is narrower than the canvas."""
    strips = _strips(content.shape[1], width, values)
    if content.shape[2] == width:
        yield from ((rows, content[:, rows]) for rows in strips)
        return
    padded = np.empty((3, strips[0].stop if strips else 0, width), np.uint8)
    padded[:] = np.array(pad_color, np.uint8)[:, None, None]
    for rows in strips:
        lines = padded[:, : rows.stop - rows.start]
        np.copyto(lines[:, :, left : left + content.shape[2]], content[:, rows])
        yield rows, lines


def _scaled_pad(pad_color: Color, scaling: Scaling) -> Array:
    return scaling.apply(np.array(pad_color, np.uint8)[:, None, None]).ravel()


def _strips(height: int, width: int, values: int) -> list[slice]:
    """Cut lines of three planes into strips of about `values` values."""
    step = max(1, values // max(1, 3 * width))
    return [slice(start, min(start + step, height)) for start in range(0, height, step)]


_BOXES = 256  # boxes whose tokens are counted at a time
Shares = NDArray[np.float64]


def fill_pixel_masks(out: Bools, boxes: list[Box]) -> None:
    """Write masks `[images, height, width]`, True = PAD."""
    for mask, (left, top, width, height) in zip(out, boxes, strict=True):
        mask[:top] = mask[top + height :] = True
        lines = mask[top : top + height]
        lines[:] = False
        lines[:, :left] = lines[:, left + width :] = True


class TokenMasks:
    """Masks of tokens: patches of `patch` × `patch` pixels, ignored where the padded share reaches `threshold`."""

    def __init__(self, size: int, patch: int, threshold: float = IGNORE_THRESHOLD) -> None:
        self.patch, self.threshold = patch, threshold
        token_ignore_mask(np.empty((0, 4), np.int64), (size, size), patch, threshold)  # checks both

    def of_boxes(self, boxes: NDArray[np.int32], size: Size, name: Callable[[int], str]) -> Bools:
        """Return masks `[images, height/patch, width/patch]`, True = ignored; `name` names an image in an error."""
        return self._ignored(token_padding(boxes, size, self.patch), boxes, name)

    def all_ignored(self, boxes: NDArray[np.int32], size: Size) -> Bools:
        """Return for each image whether all its tokens are ignored, `[images]`; equal boxes are computed once."""
        some, member = np.unique(boxes, axis=0, return_inverse=True)
        ignored = [
            (token_padding(some[at : at + _BOXES], size, self.patch) >= self.threshold).all(axis=(1, 2))
            for at in range(0, len(some), _BOXES)
        ]
        found: Bools = np.concatenate([np.zeros(0, np.bool_), *ignored])[member.reshape(-1)]
        return found

    def of_masks(self, masks: Bools, boxes: NDArray[np.int32], name: Callable[[int], str]) -> Bools:
        """Return token masks as `of_boxes`, from pixel masks that need not be rectangles."""
        patch, (count, height, width) = self.patch, masks.shape
        if height % patch or width % patch:
            raise ValueError(
                f"transforms made canvases of {height} × {width} pixels, which do not divide into patches of {patch}; "
                "crop to a multiple of the patch"
            )
        cells = masks.reshape(count, height // patch, patch, width // patch, patch)
        return self._ignored(cells.sum(axis=(2, 4), dtype=np.int64) / (patch * patch), boxes, name)

    def _ignored(self, padding: Shares, boxes: NDArray[np.int32], name: Callable[[int], str]) -> Bools:
        ignored: Bools = padding >= self.threshold
        for image in np.flatnonzero(ignored.all(axis=(1, 2))).tolist():
            raise AllTokensIgnored(name(image), boxes[image].tolist(), self.patch, self.threshold)
        return ignored


Channels = Literal["first", "last"]
MaskPlace = Literal["host", "device"]
Boxes = NDArray[np.int32]
Name = Callable[[int], str]  # image of the batch -> sample id


class CanvasMaker:
    """Makes `pixels`, `box` and the masks that were asked for, from content and boxes."""

    def __init__(
        self,
        recipe: ImageRecipe,
        scaling: Scaling,
        dtype: torch.dtype,
        channels: Channels,
        tokens: TokenMasks | None,
        transforms: Sequence[JointTransform],
        masks: MaskPlace | None = None,
    ) -> None:
        self._size, self._pad_color = (recipe.size, recipe.size), recipe.pad_color
        planar = painter(dtype, recipe.pad_color, scaling)
        self._painter = planar if channels == "first" else InterleavingPainter(planar)
        self._dtype, self._channels = dtype, channels
        self._tokens, self._transforms, self._masks = tokens, tuple(transforms), masks

    @property
    def row_bytes(self) -> int:
        return self._size[0] * self._size[1] * (3 * self._painter.storage.itemsize + (self._masks == "host"))

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code does nearly all of the work."""
        is_planar = isinstance(self._painter, BytePainter | FloatPainter)
        return compiled.native is not None and is_planar and not self._transforms and self._masks != "host"

    def make(self, contents: Iterable[Planes], boxes: Boxes, coins: Coins, buffers: Buffers, name: Name) -> Batch:
        """Make the tensors; `contents`, consumed one by one, and `boxes` are already flipped."""
        if self._transforms:
            return self._transformed(contents, boxes, coins, buffers, name)
        pixels, canvases = self._canvases(len(boxes), self._size, buffers)
        places = _places(boxes)
        paint_canvases(self._painter, canvases, contents, places)
        batch = {"pixels": pixels}
        if self._masks == "host":
            mask = buffers.empty((len(boxes), *self._size), np.dtype(np.bool_))
            fill_pixel_masks(mask, places)
            batch["pixel_mask"] = wrap(mask)
        if self._tokens is not None and self._masks != "device":
            batch["token_mask"] = to_tensor(self._tokens.of_boxes(boxes, self._size, name), buffers)
        return batch | {"box": to_tensor(boxes, buffers)}

    def _transformed(
        self, contents: Iterable[Planes], boxes: Boxes, coins: Coins, buffers: Buffers, name: Name
    ) -> Batch:
        """Paint canvases of bytes, apply the transforms to them, and paint the result."""
        changed = transformed(self._pasted(contents, boxes), self._transforms, coins)
        if self._masks is None:
            _check_filled(changed, name)
        pixels, canvases = self._canvases(len(boxes), changed.size, buffers)
        for canvas, image in zip(canvases, changed.pixels.numpy(), strict=True):
            self._painter.paint(canvas, image, 0)
        mask, box = changed.mask.contiguous().numpy(), changed.box.contiguous().numpy()
        batch = {"pixels": pixels}
        if self._masks == "host":
            batch["pixel_mask"] = to_tensor(mask, buffers)
        if self._tokens is not None:
            batch["token_mask"] = to_tensor(self._tokens.of_masks(mask, box, name), buffers)
        return batch | {"box": to_tensor(box, buffers)}

    def _pasted(self, contents: Iterable[Planes], boxes: Boxes) -> Canvases:
        bytes_painter, places = BytePainter(self._pad_color), _places(boxes)
        pixels = np.empty((len(boxes), 3, *self._size), np.uint8)
        paint_canvases(bytes_painter, pixels, contents, places)
        mask = np.empty((len(boxes), *self._size), np.bool_)
        fill_pixel_masks(mask, places)
        planes, padding, rectangles = map(torch.from_numpy, (pixels, mask, boxes))
        return Canvases(planes, padding, rectangles, self._pad_color)

    def _canvases(self, count: int, size: Size, buffers: Buffers) -> tuple[Tensor, Array]:
        """Return the tensor `[images, 3, height, width]` and its memory as an array to paint on."""
        if self._channels == "first":
            memory = buffers.empty((count, 3, *size), self._painter.storage)
            return wrap(memory).view(self._dtype), memory
        memory = buffers.empty((count, *size, 3), self._painter.storage)
        return wrap(memory).view(self._dtype).permute(0, 3, 1, 2), memory.transpose(0, 3, 1, 2)


def _check_filled(canvases: Canvases, name: Name) -> None:
    """Raise if padding is inside a box: without a pixel mask, nothing in the batch would say where.

    `transformed` has checked that no content is outside its box, so it is enough to count.
    """
    content = (~canvases.mask).sum(dim=(1, 2))
    for image in torch.nonzero(content != canvases.box[:, 2:].to(torch.int64).prod(dim=1)).flatten().tolist():
        raise ValueError(
            f"transforms left padding inside the box {canvases.box[image].tolist()} of '{name(image)}', so its mask "
            "does not follow from the box; pass masks='host' to ImageBatch, or cut the box to the content"
        )


def _places(boxes: Boxes) -> list[Box]:
    return [(left, top, width, height) for left, top, width, height in boxes.tolist()]
