"""The device a model runs on, by name, and what of it shapes bits."""

import torch

from forebay.errors import TeacherUnusable


def device_named(name: str) -> torch.device:
    """A device by name; "auto" is the first GPU, where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise TeacherUnusable(name, f"it is no device: {' '.join(str(error).split())}") from error


def device_facts(name: str) -> str:
    """What results depend on beside the libraries: the same bits are promised for the same device."""
    device = device_named(name)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
