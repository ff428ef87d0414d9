"""Checkpoint: the experts of one layer in a published checkpoint, of which every rank reads its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from isoload.checkpoints.deepseek_v3 import DeepSeekV3Layout
from isoload.checkpoints.gpt_oss import GptOssLayout
from isoload.weights.checkpoints import FileTensors, StateTensors, Tensors
from isoload.weights.experts import NAMES, Activation, ExpertWeights

Layout = DeepSeekV3Layout | GptOssLayout


@dataclass(frozen=True)
class Checkpoint:
    """A layer's experts where a model's publisher put them: what :class:`isoload.MoE` takes in place of all stacks.

    Each rank reads the experts that the placement gives it, homes and replicas, when the layer is made; what is wrong
    with a file is raised there, on all ranks. DeepSeek-V3's stay in fp8; gpt-oss's MXFP4 becomes bfloat16, exactly, or
    stays as it is, for inference only.

    Args:
        source: a folder of safetensors files with their index, one such file, or a state_dict with the same names.
        prefix: of the layer's experts, "model.layers.3.mlp.experts." for example.
        device: for the weights.
        as_bytes: whether gpt-oss's stay in MXFP4.
    """

    source: str | PathLike[str] | Mapping[str, Tensor]
    prefix: str
    device: torch.device | str = "cpu"
    as_bytes: bool = False

    @cached_property
    def layout(self) -> Layout:
        """How the checkpoint lays out experts. Raises ValueError where it is none that is known."""
        tensors: Tensors
        if isinstance(self.source, Mapping):
            tensors = StateTensors(self.source)
        else:
            tensors = FileTensors(Path(self.source))
        names = tensors.keys()
        if f"{self.prefix}0.gate_proj.weight" in names:
            return DeepSeekV3Layout(tensors, self.prefix)
        if f"{self.prefix}gate_up_proj_blocks" in names:
            return GptOssLayout(tensors, self.prefix, self.as_bytes)
        raise ValueError(
            f"{tensors.where('')} must have {self.prefix}0.gate_proj.weight (DeepSeek-V3) or "
            f"{self.prefix}gate_up_proj_blocks (gpt-oss in MXFP4), got neither"
        )

    @property
    def num_slots(self) -> int:
        """E, all experts."""
        return self.layout.num_experts

    @property
    def activation(self) -> Activation:
        """Between the two projections of such experts."""
        return self.layout.activation

    @cached_property
    def checksum(self) -> str:
        """Of a small stack of expert 0: another checkpoint of the same shapes has another."""
        sample = self.layout.rows(self.layout.sample, (0,))
        assert sample is not None
        return hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest()[:14]

    def rows(self, name: str, experts: Sequence[int]) -> Tensor | None:
        """The rows of a stack for these experts, see ExpertWeights; None where there is no such stack."""
        stack = self.layout.rows(name, experts)
        return None if stack is None else stack.to(self.device)

    def trains(self, name: str) -> bool:
        """Whether a stack's rows are to require gradients: quantised ones cannot."""
        return self.rows("down_scale", ()) is None

    def read(self, experts: Sequence[int]) -> ExpertWeights:
        """All stacks of these experts, in this order."""
        return ExpertWeights(**{name: self.rows(name, experts) for name in NAMES})  # type: ignore[arg-type]
