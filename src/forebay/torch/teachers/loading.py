"""Load a model from files onto a device, and raise for any weight that is missing or does not fit.

The libraries leave weights that a file lacks at random values and only log it; here that is an error.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from forebay.errors import LibraryMissing
from forebay.teachers.protocol import SUFFIX, model_folder, unusable, weights_file
from forebay.torch.teachers.devices import device_named

try:
    import diffusers
    import transformers
except ModuleNotFoundError as missing:
    raise LibraryMissing(
        f"running this teacher needs '{missing.name!s}', which is not installed",
        hint="pip install 'forebay[teachers]'",
        extra="teachers",
    ) from missing
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Without this, the libraries ask on the terminal whether to run code that comes with a model.
NO_CODE: dict[str, Any] = {"trust_remote_code": False}
# Weights of whole checkpoints other than the encoder that is taken from them.
OTHER_HALVES = ("decoder.", "lm_head.", "vision_model.", "visual_projection.", "text_projection.", "logit_scale")
LOADING_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)
_SHOWN = 3


def input_like(module: nn.Module) -> torch.Tensor:
    """Return an empty tensor with the device and the type of a module's inputs, which layers kept wide do not have."""
    first = next(iter(module.parameters()), torch.empty(0))
    return torch.empty(0, device=first.device, dtype=getattr(module, "dtype", first.dtype))


def load_model(cls: Any, model: str, weights: str | None, device: str, dtype: str) -> Any:
    """Load a model of a class, from a folder or the hub, with its own weights or others for its configuration."""
    with _folder(cls, model, weights) as folder:
        loaded = _loaded(cls, folder, weights or model, DTYPES[dtype])
    # `nn.Module.to` only moves: the libraries keep layers such as T5's `wo` in float32, because these overflow in
    # float16. If they were cast too, T5 would clamp, and its outputs would be finite and wrong.
    return nn.Module.to(loaded.eval().requires_grad_(False), device_named(device))


def class_named(architecture: str, model: str) -> type[nn.Module]:
    """Return a model class of transformers or diffusers."""
    for library in (transformers, diffusers):
        model_class = getattr(library, architecture, None)
        if isinstance(model_class, type) and (
            issubclass(model_class, nn.Module) or architecture.startswith("AutoModel")
        ):
            return model_class
    raise unusable(model, f"neither transformers nor diffusers has a model class '{architecture}'")


@contextmanager
def _folder(cls: Any, model: str, weights: str | None) -> Iterator[str]:
    """Yield the folder of a model; for other weights, one that links them and the model's configuration."""
    if weights is None:
        yield model_folder(model)
        return
    stem = "diffusion_pytorch_model" if issubclass(cls, diffusers.ModelMixin) else "model"
    links = {"config.json": os.path.join(model_folder(model), "config.json"), stem + SUFFIX: weights_file(weights)}
    with TemporaryDirectory() as folder:
        for name, path in links.items():
            os.symlink(os.path.realpath(path), os.path.join(folder, name))
        yield folder


def _loaded(cls: Any, folder: str, name: str, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {"dtype": dtype, "ignore_mismatched_sizes": True, **NO_CODE}  # `_check` raises for them
    if issubclass(cls, diffusers.ModelMixin):
        options = {"torch_dtype": dtype}
    try:
        with _quietly():
            loaded, report = cls.from_pretrained(
                folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **options
            )
    except LOADING_ERRORS as error:
        raise unusable(name, f"loading it fails: {_first_lines(error)}") from error
    _check(name, report["missing_keys"], report["unexpected_keys"], report.get("mismatched_keys", ()))
    return loaded


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide progress bars, which would be drawn over ours, and tables of weights that differ: `_check` decides."""
    switches: Any = transformers.utils.logging
    shown, level = switches.is_progress_bar_enabled(), switches.get_verbosity()
    switches.disable_progress_bar()
    switches.set_verbosity_error()
    try:
        yield
    finally:
        switches.set_verbosity(level)
        if shown:
            switches.enable_progress_bar()


def _check(name: str, missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[Any]) -> None:
    """Raise unless the file has exactly the weights of the model, with their shapes."""
    foreign = [key for key in unexpected if not key.startswith(OTHER_HALVES)]
    problems = {"lack": list(missing), "hold other shapes of": list(mismatched), "hold, and the model lacks,": foreign}
    for how, keys in problems.items():
        if keys:
            shown = ", ".join(str(key) for key in sorted(keys, key=str)[:_SHOWN])
            more = f" and {len(keys) - _SHOWN:,} more" if len(keys) > _SHOWN else ""
            raise unusable(name, f"its weights {how} {shown}{more}", hint="pass those of this configuration")


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
