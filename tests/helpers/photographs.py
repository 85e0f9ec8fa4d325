"""Pictures that stand for photographs: of several shapes, with tags beside them. Nothing of them is from outside.

write_photographs(folder)

lake.jpg      640 × 480   water, looking_left
tower.jpg     360 × 640   city, looking_right
coast.jpg     900 × 300   water, looking_right
icon.png      120 × 90    smaller than the canvas: it stays as it is
fog.png       400 × 400   gray as the padding, everywhere but for a fish
sticker.png   300 × 240   transparent around a fish
"""

import json
from pathlib import Path

from PIL import Image, ImageDraw

SKY, WATER, GROUND, SUN = (150, 200, 235), (40, 90, 150), (90, 130, 70), (250, 215, 90)
FISH, EYE = (235, 120, 50), (20, 20, 20)
GRAY = (114, 114, 114)

Color = tuple[int, ...]


def write_photographs(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / "lake.jpg", with_fish(scene(640, 480, WATER), (330, 330), 90, "left"), ["water", "looking_left"])
    _save(folder / "tower.jpg", with_fish(tower(), (180, 480), 70, "right"), ["city", "looking_right"])
    _save(folder / "coast.jpg", with_fish(scene(900, 300, WATER), (620, 210), 60, "right"), ["water", "looking_right"])
    _save(folder / "icon.png", with_fish(scene(120, 90, GROUND), (60, 62), 18, "left"), ["land", "looking_left"])
    _save(folder / "fog.png", with_fish(Image.new("RGB", (400, 400), GRAY), (200, 220), 80, "right"), ["looking_right"])
    _save(folder / "sticker.png", with_fish(Image.new("RGBA", (300, 240)), (150, 120), 80, "left"), ["looking_left"])


def scene(width: int, height: int, below: Color) -> Image.Image:
    """Sky with a sun over something."""
    image = Image.new("RGB", (width, height), SKY)
    pen = ImageDraw.Draw(image)
    for line in range(height):
        pen.line([(0, line), (width, line)], fill=_between(SKY, (235, 240, 245), line / height))
    horizon = round(height * 0.55)
    for line in range(horizon, height):
        pen.line([(0, line), (width, line)], fill=_between(below, (15, 35, 60), (line - horizon) / height))
    side = height // 6
    pen.ellipse((width * 0.72, height * 0.12, width * 0.72 + side, height * 0.12 + side), fill=SUN)
    pen.polygon([(0, horizon), (width * 0.2, height * 0.3), (width * 0.45, horizon)], fill=GROUND)
    return image


def tower() -> Image.Image:
    image = scene(360, 640, GROUND)
    pen = ImageDraw.Draw(image)
    pen.rectangle((120, 90, 240, 420), fill=(120, 100, 95))
    for top in range(110, 400, 40):
        for left in range(135, 230, 35):
            pen.rectangle((left, top, left + 16, top + 20), fill=(245, 230, 160))
    return image


def with_fish(image: Image.Image, middle: tuple[int, int], length: int, looks: str) -> Image.Image:
    """A fish on top: one can see which way it looks."""
    x, y, ahead = *middle, -1 if looks == "left" else 1
    pen = ImageDraw.Draw(image)
    solid = (255,) if image.mode == "RGBA" else ()
    tail = x - ahead * length
    corners = [(x - ahead * length * 0.5, y), (tail, y - length * 0.4), (tail, y + length * 0.4)]
    pen.polygon(corners, fill=(*FISH, *solid))
    pen.ellipse((x - length * 0.7, y - length * 0.38, x + length * 0.7, y + length * 0.38), fill=(*FISH, *solid))
    eye = x + ahead * length * 0.45
    pen.ellipse((eye - length * 0.06, y - length * 0.16, eye + length * 0.06, y - length * 0.04), fill=(*EYE, *solid))
    return image


def _save(path: Path, image: Image.Image, tags: list[str]) -> None:
    image.save(path, quality=90)
    path.with_suffix(".json").write_text(json.dumps({"tags": ["fish", *tags], "rating": len(tags) / 4}))


def _between(one: Color, other: Color, share: float) -> Color:
    return tuple(round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
