"""The device a model runs on, by name, and what of it shapes bits."""

import torch

from forebay.errors import TeacherUnusable


def device_named(name: str) -> torch.device:
    """A device by name; "auto" is the first GPU, where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        problem = f"it is no device of this machine: {' '.join(str(error).split())[:200]}; 'cpu' always is"
        raise TeacherUnusable(name, problem) from error
    return device


def device_facts(name: str) -> str:
    """What results depend on beside the libraries: the same bits are promised for the same device."""
    device = device_named(name)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
