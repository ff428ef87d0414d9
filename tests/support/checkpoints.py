"""Checkpoints of experts as DeepSeek-V3 and gpt-oss publish them, made of random ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from isoload.weights.experts import ExpertWeights
from support.fp8_experts import random_experts

PREFIX = "model.layers.3.mlp.experts."
State = dict[str, Tensor]


def deepseek_v3(
    num_experts: int, hidden: int, intermediate: int, seed: int = 0
) -> tuple[State, ExpertWeights]:
    """The state, and the stacks that it stands for."""
    weights = random_experts(num_experts, hidden, intermediate, torch.Generator().manual_seed(seed))
    state = {}
    for expert in range(num_experts):
        gate, up = weights.gate_up[expert].chunk(2)
        scales = *weights.gate_up_scale[expert], weights.down_scale[expert]
        for name, values, scale in zip(
            ("gate", "up", "down"), (gate, up, weights.down[expert]), scales, strict=True
        ):
            state[f"{PREFIX}{expert}.{name}_proj.weight"] = values.clone()
            state[f"{PREFIX}{expert}.{name}_proj.weight_scale_inv"] = scale.clone()
    return state, weights


def gpt_oss(num_experts: int, hidden: int, intermediate: int, seed: int = 0) -> State:
    """Scales of -8 to 2 powers of two."""
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for name, out, columns in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
        key, shape = f"{PREFIX}{name}_proj", (num_experts, out, columns // 32)
        state[f"{key}_blocks"] = torch.randint(256, (*shape, 16), generator=draw, dtype=torch.uint8)
        state[f"{key}_scales"] = torch.randint(119, 130, shape, generator=draw, dtype=torch.uint8)
        state[f"{key}_bias"] = torch.randn(num_experts, out, generator=draw).bfloat16()
    return state


def save_in_files(state: State, folder: Path, num_files: int) -> None:
    """The tensors dealt over files, with an index where there are several."""
    from safetensors.torch import save_file

    if num_files == 1:
        save_file(state, folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)]
    weight_map = {key: names[i % num_files] for i, key in enumerate(state)}
    for name in names:
        save_file({key: value for key, value in state.items() if weight_map[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
