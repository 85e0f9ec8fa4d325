"""Teachers that go together, as recipes by layer: what `fb.build_layers` builds one after the other."""

from collections.abc import Sequence
from typing import Any, Literal

from forebay.teachers.encoders import T5, Clip, Latents
from forebay.teachers.protocol import Teacher
from forebay.teachers.recipe import TeacherRecipe


def encodings(
    *,
    vae: str | None = None,
    t5: str | None = None,
    clip: str | None = None,
    size: int = 512,
    pad_color: Sequence[int] = (114, 114, 114),
    storage: Literal["raw", "jpeg"] = "raw",
    sample: Literal["mean", "seeded"] = "mean",
    max_length: int = 128,
    **fields: Any,
) -> dict[str, TeacherRecipe]:
    """Latents, T5 states and CLIP states: a layer for each model that is named. `fields` are those of the recipe."""
    teachers: list[Teacher] = []
    red, green, blue = pad_color
    if vae is not None:
        teachers.append(Latents(vae=vae, size=size, pad_color=(red, green, blue), storage=storage, sample=sample))
    if t5 is not None:
        teachers.append(T5(model=t5, max_length=max_length))
    if clip is not None:
        teachers.append(Clip(model=clip))
    return {teacher.layer_name(): TeacherRecipe(teacher=teacher, **fields) for teacher in teachers}
