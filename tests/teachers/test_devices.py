"""Where teachers run: a process for each device, memory by the counters of the device, one model at a time."""

import os
import weakref
from pathlib import Path

import pytest
import torch
from tests.helpers.tiny_models import TinyModels
from tests.teachers.own_teachers import Whereabouts, prompt_cache
from tests.torch.taught import chunks_of, prompts_cache

import forebay as fb
from forebay.errors import EngineUnusable, ModelUnusable
from forebay.teachers import Clip, Lune, TeacherRecipe, unload
from forebay.teachers.batched_forward import fit_batch, load_once
from forebay.torch.teachers import default_device, devices

pytestmark = pytest.mark.usefixtures("one_thread")


def test_each_device_has_a_process(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    report = fb.build(root, None, TeacherRecipe(teacher=Whereabouts(), device="cpu:0,cpu:1", batch_size=1))
    assert report.built == report.chunks > 2
    read = fb.open_cache(root).read(range(10), ["device", "pid"])
    places = set(zip(read["device"].tolist(), read["pid"].tolist(), strict=True))
    assert sorted(device for device, _ in places) == [0, 1]  # so each of them in one process
    assert os.getpid() not in {pid for _, pid in places}


def test_one_device_runs_in_this_process(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    fb.build(root, None, TeacherRecipe(teacher=Whereabouts(), device="cpu:3"))
    read = fb.open_cache(root).read(range(10), ["device", "pid"])
    assert set(read["device"].tolist()) == {3}
    assert set(read["pid"].tolist()) == {os.getpid()}


@pytest.mark.slow
@pytest.mark.parametrize("layers", [["clip"], pytest.param(["clip", "lune"], marks=pytest.mark.long)])
def test_bytes_do_not_depend_on_the_number_of_devices(
    tmp_path: Path, tiny_models: TinyModels, layers: list[str]
) -> None:
    made = []
    for device in ("cpu", "cpu:0,cpu:1"):
        root = prompts_cache(tmp_path / device.replace(",", "-"))
        how = {"device": device, "batch_size": 2, "buckets": (0.2, 0.8)}
        teachers = {"clip": Clip(model=tiny_models.clip), "lune": Lune(unet=tiny_models.unet)}
        fb.build_layers(root, {name: TeacherRecipe(teacher=teachers[name], **how) for name in layers})
        made.append({layer: chunks_of(root, layer) for layer in layers})
    assert made[0] == made[1]


def test_a_device_that_this_machine_lacks_is_refused(tmp_path: Path, tiny_models: TinyModels) -> None:
    recipe = TeacherRecipe(teacher=Clip(model=tiny_models.clip), device="cpu,cuda:77")
    with pytest.raises(ModelUnusable, match="'cuda:77' cannot be used: it is not a device of this machine"):
        fb.build(prompt_cache(tmp_path), None, recipe)


def test_processes_of_torchrun_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert default_device() == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert default_device() == "cuda:2"


class Counted:
    """Memory that a forward takes: so much for the model, and for each sample."""

    def __init__(self) -> None:
        self.peak = self.resets = 0

    def reset(self) -> None:
        self.peak, self.resets = 0, self.resets + 1

    def peak_bytes(self) -> int:
        return self.peak

    def forward(self, size: int) -> None:
        self.peak = 100 + 10 * size


def test_a_batch_is_halved_until_the_counters_of_the_device_are_below_the_limit() -> None:
    memory = Counted()
    assert fit_batch(16, 145, memory.forward, memory) == 4
    assert memory.resets == 3
    assert fit_batch(16, None, memory.forward, memory) == 16
    with pytest.raises(EngineUnusable, match="110"):
        fit_batch(16, 105, memory.forward, memory)


@pytest.mark.parametrize("name", ["cpu", "a device of another library"])
def test_a_device_without_counters_of_torch_has_those_of_the_process(name: str) -> None:
    assert devices.device_memory(name) is None


def test_the_counters_of_a_device_limit_a_teacher_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's module of the CPU gets the functions that those of GPUs have."""
    peaks: list[int] = []
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cpu, "reset_peak_memory_stats", peaks.append, raising=False)
    monkeypatch.setattr(torch.cpu, "max_memory_reserved", lambda device: 4096 >> len(peaks), raising=False)
    recipe = TeacherRecipe(teacher=Whereabouts(), device="cpu:1", batch_size=8, memory_limit=1024)
    fb.build(prompt_cache(tmp_path), None, recipe)
    assert fb.open_cache(tmp_path / "cache").recipe(Whereabouts.tag()).fields["batch_size"] == 4
    assert peaks == [torch.device("cpu:1")] * 2


def test_a_model_is_gone_before_the_next_is_loaded(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    unet = Lune(unet=tiny_models.unet)
    first = weakref.ref(load_once(unet, "cpu", "float32").loaded._denoiser.module)
    seen = []
    monkeypatch.setattr(devices, "release_device_memory", lambda: seen.append(first()))
    load_once(Clip(model=tiny_models.clip), "cpu", "float32")
    assert seen == [None]  # memory is given back to the device once the first model is gone
    unload()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_limits_and_offload_go_by_the_counters_of_a_gpu(tmp_path: Path, tiny_models: TinyModels) -> None:
    torch.cuda.init()
    unload()
    before = torch.cuda.memory_reserved()
    memory = devices.device_memory("cuda")
    assert memory is not None
    memory.reset()
    recipe = TeacherRecipe(teacher=Clip(model=tiny_models.clip), device="cuda", batch_size=4, memory_limit=1 << 10)
    with pytest.raises(EngineUnusable):
        fb.build(prompts_cache(tmp_path), None, recipe)
    assert memory.peak_bytes() > before
    unload()
    assert torch.cuda.memory_reserved() <= before
