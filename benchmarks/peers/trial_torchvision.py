"""Declare two operators of torchvision: beside a CPU build of torch, that of PyPI fails where it uses them."""

import torch

if not hasattr(torch.ops.torchvision, "nms"):
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
