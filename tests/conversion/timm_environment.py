"""Imports of timm, vit-pytorch and x-transformers.

They import torchvision, whose wheels are built for another torch, so that two operators are missing. Declaring these is
enough to import it; they are never called.
"""

import warnings

import torch

_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

with warnings.catch_warnings():  # caused by these libraries while they are imported
    warnings.simplefilter("ignore")
    import timm
    import vit_pytorch
    import x_transformers

__all__ = ["timm", "vit_pytorch", "x_transformers"]
