"""Load a model from files onto a device, and raise for any weight that is missing or does not fit.

The libraries leave weights that a file lacks at random values and only log it; here that is an error.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from forebay.errors import LibraryMissing
from forebay.teachers.protocol import model_folder, unusable, weights_file
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
    compute = DTYPES[dtype]
    loaded = _own_weights(cls, model, compute) if weights is None else _other_weights(cls, model, weights, compute)
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


def _own_weights(cls: Any, model: str, dtype: torch.dtype) -> Any:
    dtype_option = {"torch_dtype": dtype} if issubclass(cls, diffusers.ModelMixin) else {"dtype": dtype, **NO_CODE}
    try:
        with _quietly():
            loaded, report = cls.from_pretrained(
                model_folder(model),
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **dtype_option,
            )
    except LOADING_ERRORS as error:
        raise unusable(model, f"loading it fails: {_first_lines(error)}") from error
    _check(model, report["missing_keys"], report["unexpected_keys"], report.get("mismatched_keys", ()))
    return loaded


def _other_weights(cls: Any, model: str, weights: str, dtype: torch.dtype) -> Any:
    try:
        loaded = _without_weights(cls, model_folder(model))
    except LOADING_ERRORS as error:
        raise unusable(model, f"no model can be made of its configuration: {_first_lines(error)}") from error
    try:
        state: Mapping[str, torch.Tensor] = load_file(weights_file(weights))
    except (OSError, SafetensorError) as error:
        raise unusable(weights, f"it cannot be read: {_first_lines(error)}") from error
    expected = loaded.state_dict()
    differ = [key for key in expected.keys() & state.keys() if expected[key].shape != state[key].shape]
    tied = {expected[key].data_ptr() for key in expected.keys() & state.keys()}  # a file has weights of two names once
    missing = [key for key in expected.keys() - state.keys() if expected[key].data_ptr() not in tied]
    _check(weights, missing, state.keys() - expected.keys(), differ)
    loaded.load_state_dict(state, strict=False)
    return _cast(loaded, dtype)


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast weights as `from_pretrained` does: layers that the library keeps in float32 stay there.

    transformers keeps some of them in float16 only, because they overflow; diffusers keeps all in any type.
    """
    wide = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16 or isinstance(module, diffusers.ModelMixin):
        wide |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and not wide.intersection(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return module


def _without_weights(cls: Any, folder: str) -> Any:
    """Return a model of a configuration, with random weights."""
    if issubclass(cls, diffusers.ModelMixin):
        return cls.from_config(cls.load_config(folder, local_files_only=True))
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **NO_CODE)
    return cls.from_config(config, **NO_CODE) if hasattr(cls, "from_config") else cls(config)


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
