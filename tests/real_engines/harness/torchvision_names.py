"""torchvision's wheel has no compiled ops for a CPU build of torch, and cannot be imported without their names. SGLang
imports it for images, which no test has. So the names are declared just before that import."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(MetaPathFinder):
    kept: Any = None

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision" and self.kept is None:
            import torch

            self.kept = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, name):
                    self.kept.define(name + SCHEMA)


sys.meta_path.insert(0, BeforeTorchvision())
