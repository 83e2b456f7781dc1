"""timm and vit-pytorch import torchvision, whose wheels are built for another torch: two operators that it registers
Python functions for are missing. Declaring them is enough to import it; nothing here calls them."""

import warnings

import torch

_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

with warnings.catch_warnings():  # of what these libraries do to torch while they are imported
    warnings.simplefilter("ignore")
    import timm
    import vit_pytorch
    import x_transformers

__all__ = ["timm", "vit_pytorch", "x_transformers"]
