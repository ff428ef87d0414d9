"""Published checkpoints become the layer's experts: each rank reads its own, and what is wrong names file and key."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.transport import CollectiveTransport
from isoload.weights.checkpoints import Tensors
from isoload.weights.experts import ClampedGLU, ExpertWeights, SwiGLU
from isoload.weights.quantised import dequantise
from support.checkpoints import PREFIX, deepseek_v3, gpt_oss, save_in_files
from support.fp8_experts import FP8, open_experts
from support.processes import rank_outcomes, run_ranks

pytest.importorskip("safetensors", reason="safetensors is not installed")

EXPERTS, HIDDEN, INNER = 6, 200, 136
SIZES = (EXPERTS, HIDDEN, INNER)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
    router = torch.randn(rows.shape[1], EXPERTS, generator=torch.Generator().manual_seed(1))
    weights, ids = (rows.float() @ router).softmax(-1).topk(2)
    return ids, weights


def place(ranks: int) -> isoload.Placement:
    counts = torch.tensor([[9.0, 1, 5, 2, 7, 3]])
    return isoload.place(counts, isoload.Topology(ranks), slots_per_rank=-(-EXPERTS // ranks) + 1)


def assert_same_layer(experts: Any, wanted: ExpertWeights, hidden: int, **how: Any) -> isoload.MoE:
    placement = place(3)
    layers = [
        isoload.MoE(gate, e, isoload.LocalTransport(placement.topology), placement, **h)
        for e, h in ((experts, {}), (wanted, how))
    ]
    rows = [torch.randn(n, hidden, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (5, 0, 8)]
    with torch.no_grad():
        got, want = (layer(rows) for layer in layers)
    assert layers[0].has_replicas and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return layers[0]


@pytest.mark.parametrize("num_files", [0, 1, 4])
def test_deepseek_v3_as_it_is(num_files: int, tmp_path: Path) -> None:
    state, weights = deepseek_v3(*SIZES)
    source: Any = state
    if num_files:
        save_in_files({**state, "model.norm.weight": torch.ones(3)}, tmp_path, num_files)
        source = tmp_path
    read = isoload.weights.checkpoints.Checkpoint(source, PREFIX).read([4, 0, 4])
    assert read.stacks().keys() == weights.stacks().keys()
    assert all(same_bytes(stack, weights.stacks()[n][[4, 0, 4]]) for n, stack in read.stacks().items())
    layer = assert_same_layer(isoload.weights.checkpoints.Checkpoint(source, PREFIX), weights, HIDDEN)
    assert layer.weights[0].gate_up.dtype == FP8
    assert_same_layer(
        isoload.weights.checkpoints.Checkpoint(source, PREFIX), open_experts(weights, torch.bfloat16), HIDDEN
    )


def test_a_rank_reads_its_own_experts_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_in_files(deepseek_v3(*SIZES)[0], tmp_path, 2)
    seen: list[int] = []
    read = Tensors.read

    def noting(tensors: Tensors, key: str, *how: Any) -> Tensor:
        seen.append(int(key.removeprefix(PREFIX).split(".")[0]))
        return read(tensors, key, *how)

    monkeypatch.setattr(Tensors, "read", noting)
    placement = place(3)
    layer = isoload.MoE(
        gate,
        isoload.weights.checkpoints.Checkpoint(tmp_path, PREFIX),
        isoload.LocalTransport(placement.topology),
        placement,
    )
    known = seen.count(0) - 6 * sum(0 in own.layout.experts for own in layer.weights)
    assert known == 1  # expert 0's scales, by which ranks compare their checkpoints
    assert sorted(seen) == sorted([0] * known + 6 * [e for own in layer.weights for e in own.layout.experts])


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [0, 1, 3])
def test_gpt_oss_in_bfloat16(num_files: int, tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    state = gpt_oss(EXPERTS, 96, 64)
    if num_files:
        save_in_files(state, tmp_path, num_files)
    checkpoint = isoload.weights.checkpoints.Checkpoint(tmp_path if num_files else state, PREFIX)
    parts = {
        name: mxfp4.convert_moe_packed_tensors(
            state[f"{PREFIX}{name}_proj_blocks"], state[f"{PREFIX}{name}_proj_scales"], dtype=torch.bfloat16
        ).transpose(1, 2)
        for name in ("gate_up", "down")
    }
    biases = {f"{name}_bias": state[f"{PREFIX}{name}_proj_bias"] for name in ("gate_up", "down")}
    wanted = ExpertWeights(**{n: s.contiguous() for n, s in parts.items()}, **biases)
    read = checkpoint.read([5, 1])
    assert all(torch.equal(stack, wanted.stacks()[n][[5, 1]]) for n, stack in read.stacks().items())
    assert read.stacks().keys() == wanted.stacks().keys()
    layer = assert_same_layer(checkpoint, wanted, 96, activation=ClampedGLU())
    assert layer.activation == ClampedGLU() and layer.weights[0].down.requires_grad


@pytest.mark.parametrize("num_files", [0, 3])
def test_gpt_oss_as_bytes(num_files: int, tmp_path: Path) -> None:
    """The layer is, to the bit, that of the experts opened to bfloat16."""
    state = gpt_oss(EXPERTS, 96, 64)
    if num_files:
        save_in_files(state, tmp_path, num_files)
    checkpoint = isoload.weights.checkpoints.Checkpoint(
        tmp_path if num_files else state, PREFIX, as_bytes=True
    )
    read = checkpoint.read([5, 1])
    for of in ("gate_up", "down"):
        blocks, scales, bias = (
            state[f"{PREFIX}{of}_proj_{part}"][[5, 1]] for part in ("blocks", "scales", "bias")
        )
        found = [getattr(read, of + part) for part in ("", "_scale", "_bias")]
        assert all(map(same_bytes, found, [blocks.flatten(2), scales, bias]))
    assert read.format is not None and read.format.name == "MXFP4" and not checkpoint.trains("down_bias")
    opened = isoload.weights.checkpoints.Checkpoint(state, PREFIX).read(range(EXPERTS))
    layer = assert_same_layer(checkpoint, opened, 96, activation=ClampedGLU())
    assert layer.weights[0].down.dtype == torch.uint8 and not layer.weights[0].down_bias.requires_grad


def test_every_value_of_mxfp4_is_one_of_bfloat16() -> None:
    """All numbers under all scales, beside fractions; too large or nan: neither is told as a number."""
    numbers = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
    numbers += [-n for n in numbers]
    blocks = torch.tensor([low + 16 * low for low in range(16)], dtype=torch.uint8).expand(256, 1, 16)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    opened = dequantise(blocks.flatten(1), scales, dtype=torch.bfloat16)
    assert opened.shape == (256, 32) and torch.equal(
        opened[:, ::2].nan_to_num(), opened[:, 1::2].nan_to_num()
    )
    largest = Fraction(torch.finfo(torch.bfloat16).max)
    for scale, row in enumerate(opened[:, ::2].double().tolist()):
        for number, value in zip(numbers, row, strict=True):
            exact = number * Fraction(2) ** (scale - 127)
            if scale == 255 or abs(exact) > largest:
                assert not torch.tensor(value).isfinite()
            else:
                assert Fraction(value) == exact
    bytes_, scale = torch.full((1, 16), 0x2D, dtype=torch.uint8), torch.tensor([[128]], dtype=torch.uint8)
    mixed = dequantise(bytes_, scale, dtype=torch.bfloat16)
    assert mixed[0, :4].tolist() == [-6, 2, -6, 2]  # 0xD = -3 lies low and comes first; times 2


def without(state: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != PREFIX + key}


DEEPSEEK, GPT_OSS = deepseek_v3(*SIZES)[0], gpt_oss(EXPERTS, 96, 64)
TOO_LARGE = GPT_OSS[f"{PREFIX}down_proj_scales"].clone()
TOO_LARGE[4, 0, 0] = 255
REFUSED = {
    "no scale": (
        without(DEEPSEEK, "4.up_proj.weight_scale_inv"),
        r"must have model.layers.3.mlp.experts.4.up_proj.weight_scale_inv, got none",
    ),
    "scale of another shape": (
        {**DEEPSEEK, f"{PREFIX}4.down_proj.weight_scale_inv": torch.ones(2, 1)},
        r"4.down_proj.weight_scale_inv in .* must be \[2, 2\] torch.float32, got \[2, 1\] torch.float32",
    ),
    "scale of another dtype": (
        {**DEEPSEEK, f"{PREFIX}4.gate_proj.weight_scale_inv": torch.ones(2, 2).bfloat16()},
        r"4.gate_proj.weight_scale_inv in .* must be .* torch.float32, got \[2, 2\] torch.bfloat16",
    ),
    "another dtype": (
        {**DEEPSEEK, f"{PREFIX}4.gate_proj.weight": torch.ones(INNER, HIDDEN).bfloat16()},
        r"4.gate_proj.weight in .* must be \[136, 200\] torch.float8_e4m3fn, got \[136, 200\] torch.bfloat16",
    ),
    "a dtype without a name here": (
        {**DEEPSEEK, f"{PREFIX}4.gate_proj.weight": torch.ones(INNER, HIDDEN).half()},
        r"4.gate_proj.weight in .* must be \[136, 200\] torch.float8_e4m3fn, got \[136, 200\]",
    ),
    "another width": (
        {**DEEPSEEK, f"{PREFIX}4.up_proj.weight": torch.ones(INNER + 1, HIDDEN).to(FP8)},
        r"4.up_proj.weight in .* must be \[136, 200\] torch.float8_e4m3fn, got \[137, 200\]",
    ),
    "a stack": (
        {**DEEPSEEK, f"{PREFIX}0.gate_proj.weight": torch.ones(1, INNER, HIDDEN).to(FP8)},
        r"0.gate_proj.weight in .* must be \[I, H\], got \[1, 136, 200\]",
    ),
    "an expert missing": (
        {k: v for k, v in DEEPSEEK.items() if not k.startswith(PREFIX + "4.")},
        r"must have all experts under model.layers.3.mlp.experts., got 5 and no 4",
    ),
    "a number far away": (
        {**DEEPSEEK, f"{PREFIX}3000000.x": torch.ones(1)},
        r"must have all experts under model.layers.3.mlp.experts., got 3000000 and no 6",
    ),
    "a scale of nan": (
        {**DEEPSEEK, f"{PREFIX}4.down_proj.weight_scale_inv": torch.full((2, 2), torch.nan)},
        r"4.down_proj.weight_scale_inv in .* must be finite, got nan or inf",
    ),
    "an infinite scale": (
        {**DEEPSEEK, f"{PREFIX}4.up_proj.weight_scale_inv": torch.tensor([[1, 1], [1, -torch.inf]])},
        r"4.up_proj.weight_scale_inv in .* must be finite, got nan or inf",
    ),
    "another layer": (
        {k.replace("layers.3", "layers.4"): v for k, v in DEEPSEEK.items()},
        r"must have .*experts.0.gate_proj.weight \(DeepSeek-V3\) or .* \(gpt-oss in MXFP4\), got neither",
    ),
    "no bias": (
        without(GPT_OSS, "down_proj_bias"),
        r"must have model.layers.3.mlp.experts.down_proj_bias, got none",
    ),
    "no MXFP4 scale": (
        without(GPT_OSS, "down_proj_scales"),
        r"must have model.layers.3.mlp.experts.down_proj_scales, got none",
    ),
    "other blocks": (
        {**GPT_OSS, f"{PREFIX}down_proj_blocks": torch.zeros(6, 96, 4, 8, dtype=torch.uint8)},
        r"down_proj_blocks in .* must be \[E, out, in / 32, 16\], got \[6, 96, 4, 8\]",
    ),
    "other scales": (
        {**GPT_OSS, f"{PREFIX}down_proj_scales": torch.zeros(6, 96, 1, dtype=torch.uint8)},
        r"down_proj_scales in .* must be \[6, 96, 2\] torch.uint8, got \[6, 96, 1\]",
    ),
    "nan": (
        {**GPT_OSS, f"{PREFIX}down_proj_scales": TOO_LARGE},
        r"down_proj_scales in .* must give values of bfloat16, got nan or more for expert 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("in_files, as_bytes", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_checkpoints(name: str, in_files: bool, as_bytes: bool, tmp_path: Path) -> None:
    state, message = REFUSED[name]
    if in_files:
        save_in_files({key: value.clone() for key, value in state.items()}, tmp_path, 3)
    with pytest.raises(ValueError, match=message) as raised:
        isoload.weights.checkpoints.Checkpoint(
            tmp_path if in_files else state, PREFIX, as_bytes=as_bytes
        ).read(range(EXPERTS))
    assert (str(tmp_path) if in_files else "the state") in str(raised.value)


def test_refused_files(tmp_path: Path) -> None:
    def read() -> None:
        isoload.weights.checkpoints.Checkpoint(tmp_path, PREFIX).read([0, 1])

    with pytest.raises(ValueError, match=r"must be a safetensors file, or a folder with .*, got 0"):
        read()
    save_in_files(DEEPSEEK, tmp_path, 2)
    index, first = tmp_path / "model.safetensors.index.json", tmp_path / "model-00001-of-00002.safetensors"
    whole, told = first.read_bytes(), json.loads(index.read_text())
    for cut in (whole[:-1], whole[:20], b""):
        first.write_bytes(cut)
        with pytest.raises(
            ValueError, match=r"model-00001-of-00002.safetensors must be a whole safetensors file, got"
        ):
            read()
    first.unlink()
    with pytest.raises(
        ValueError, match=r"model-00001-of-00002.safetensors must be a whole safetensors file, got"
    ):
        read()
    first.write_bytes(whole)
    read()
    key = f"{PREFIX}1.up_proj.weight"
    other = {
        **told["weight_map"],
        key: next(n for n in told["weight_map"].values() if n != told["weight_map"][key]),
    }
    index.write_text(json.dumps({"weight_map": other}))
    with pytest.raises(
        ValueError, match=r"safetensors must have .*1.up_proj.weight, which .*index.json lists, got none"
    ):
        read()
    for text in ("{", "[]", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index.json must be an index with a weight_map, got"):
            read()
    index.unlink()
    with pytest.raises(ValueError, match=r"a folder with .*index.json or one such file, got 2"):
        read()
    index.write_text(json.dumps(told))
    first.unlink()
    os.mkfifo(first)
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors: is no regular file"):
        read()


def over_processes(rank: int, folder: Path) -> None:
    placement, (_, weights) = place(2), deepseek_v3(*SIZES)
    rows = torch.randn(5 + rank, HIDDEN).bfloat16()
    found = []
    for experts in (isoload.weights.checkpoints.Checkpoint(folder, PREFIX), weights):
        layer = isoload.MoE(gate, experts, CollectiveTransport(placement.topology), placement)
        with torch.no_grad():
            found.append(layer(rows))
    assert torch.equal(*found)


def test_over_processes(tmp_path: Path) -> None:
    save_in_files(deepseek_v3(*SIZES)[0], tmp_path, 3)
    run_ranks(over_processes, 2, tmp_path)


def one_rank_reads_wrong(rank: int, folder: Path, prefix: str) -> None:
    placement = place(2)
    experts = isoload.weights.checkpoints.Checkpoint(
        folder if rank == 1 else DEEPSEEK, prefix if rank == 1 else PREFIX
    )
    isoload.MoE(gate, experts, CollectiveTransport(placement.topology), placement)


def test_all_ranks_raise_what_one_cannot_read(tmp_path: Path) -> None:
    state = without(DEEPSEEK, "4.up_proj.weight_scale_inv")
    other = {k.replace("layers.3", "layers.4"): v.clone() for k, v in DEEPSEEK.items()}
    save_in_files({**state, **other}, tmp_path, 2)
    first, second = rank_outcomes(one_rank_reads_wrong, 2, tmp_path, PREFIX)
    assert "rank 1 failed in stage construction" in first.error
    assert "4.up_proj.weight_scale_inv, got none" in second.error
    for outcome in rank_outcomes(one_rank_reads_wrong, 2, tmp_path, PREFIX.replace("layers.3", "layers.4")):
        assert "experts must be the same on all ranks, got model.layers.3" in outcome.error


def another_checkpoint(rank: int) -> None:
    placement, state = place(2), deepseek_v3(*SIZES, seed=rank)[0]
    isoload.MoE(
        gate,
        isoload.weights.checkpoints.Checkpoint(state, PREFIX),
        CollectiveTransport(placement.topology),
        placement,
    )


def test_ranks_agree_on_the_checkpoint() -> None:
    for outcome in rank_outcomes(another_checkpoint, 2):
        assert "experts must be the same on all ranks, got model.layers.3" in outcome.error


def test_an_activation_of_the_caller_s(tmp_path: Path) -> None:
    placement = place(2)
    transport = isoload.LocalTransport(placement.topology)
    layer = isoload.MoE(
        gate,
        isoload.weights.checkpoints.Checkpoint(GPT_OSS, PREFIX),
        transport,
        placement,
        activation=SwiGLU(),
    )
    assert layer.activation == SwiGLU()
