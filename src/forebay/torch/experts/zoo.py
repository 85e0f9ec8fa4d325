"""The models that caches are built with. Each is loaded when its layer is made, and let go before the next one."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from forebay import api
from forebay.cache.records import BuildReport
from forebay.teachers.encoders import T5, Clip, Latents
from forebay.teachers.geometric import GeometricSol
from forebay.teachers.protocol import Teacher
from forebay.teachers.recipe import TeacherRecipe
from forebay.teachers.slot import unload as unload_teacher
from forebay.teachers.unet import Lune, Sol
from forebay.torch.experts.workplace import Workplace

ENCODINGS = ("latents", "t5", "clip")


@dataclass(frozen=True, kw_only=True)
class ModelZoo:
    """Teachers by the document's names, and a folder that caches are built in.

        zoo = ModelZoo(folder="caches", vae=Latents(vae="sd/vae"), t5=T5(model="t5"), clip=Clip(model="clip"),
                       lune=Lune(unet="sd/unet", weights="sd15-flow-lune-unet.safetensors"))

    `load_…` checks that the files of a model are there and hashes them. The model itself is brought to the device when
    its layer is made, so that the most memory ever held is one model, in whatever order these are called.
    """

    folder: str | os.PathLike[str]
    vae: Latents | None = None
    t5: T5 | None = None
    clip: Clip | None = None
    lune: Lune | None = None
    sol: Sol | GeometricSol = field(default_factory=GeometricSol)
    device: str = "auto"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    batch_size: int = 8

    @property
    def workplace(self) -> Workplace:
        return Workplace(os.fspath(self.folder))

    @property
    def encodings(self) -> tuple[str, ...]:
        """The layers of encodings that there is a model for."""
        models = dict(zip(ENCODINGS, (self.vae, self.t5, self.clip), strict=True))
        return tuple(layer for layer, model in models.items() if model is not None)

    def load_vae(self) -> Mapping[str, str]:
        return self.teacher("latents").files()

    def load_t5(self) -> Mapping[str, str]:
        return self.teacher("t5").files()

    def load_clip(self) -> Mapping[str, str]:
        return self.teacher("clip").files()

    def load_lune(self) -> Mapping[str, str]:
        return self.teacher("lune").files()

    def load_sol(self) -> Mapping[str, str]:
        return self.teacher("sol").files()

    def unload(self, name: str) -> None:
        """Let go of what is loaded. It is one model at most, and a layer that is made has let its own go."""
        self.teacher("latents" if name == "vae" else name)
        unload_teacher()

    def offload(self) -> None:
        """Let go of whatever is loaded."""
        unload_teacher()

    def teacher(self, layer: str) -> Teacher:
        known: dict[str, Teacher | None] = {
            "latents": self.vae, "t5": self.t5, "clip": self.clip, "lune": self.lune, "sol": self.sol,
        }  # fmt: skip
        if layer not in known:
            raise ValueError(f"the model is {layer!r}; known are: vae, t5, clip, lune, sol")
        found = known[layer]
        if found is None:
            argument = "vae" if layer == "latents" else layer
            raise ValueError(f"this zoo has no '{argument}'; make it with ModelZoo({argument}=…)")
        return found

    def ask(self, root: str, *layers: str, batch_timesteps: bool = False) -> list[BuildReport]:
        """Make layers of a cache of the workplace, one model after the other; what is there is passed over."""
        recipes = {}
        for layer in dict.fromkeys(needed for wanted in layers for needed in (*self._before(wanted), wanted)):
            teacher = self.teacher(layer)
            recipes[layer] = TeacherRecipe(
                teacher=teacher,
                batch_size=self.batch_size,
                batch_timesteps=batch_timesteps and teacher.timed,
                dtype=self.dtype,
                device=self.device,
                **self.workplace.prompts_of(root),
            )
        return api.build_layers(root, recipes)

    def _before(self, layer: str) -> tuple[str, ...]:
        """A UNet is told the prompt by CLIP's states."""
        return ("clip",) if isinstance(self.teacher(layer), Lune | Sol) else ()
