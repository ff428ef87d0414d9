"""What an engine replays from a CUDA graph: the switch's flag, shadow mode's counts, weights' checksums. On a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from isoload.engines.record import EngineRecord
from isoload.engines.settings import Settings
from isoload.online.switch import Switch
from isoload.topology import Topology
from isoload.weights.checksums import slot_checksums

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda")
LAYERS, RANKS, EXPERTS, TOKENS, TOP_K = 3, 2, 6, 50, 4


def test_a_captured_graph_follows_the_switch_and_waits_for_nothing(tmp_path: Path) -> None:
    switch = Switch(str(tmp_path / "switch"), DEVICE, None, "engine")
    ours, theirs = (
        torch.zeros(TOKENS, TOP_K, dtype=torch.int32).to(DEVICE),
        torch.ones(TOKENS, TOP_K).to(DEVICE),
    )
    graph, slots = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        slots = [switch.choose(ours, theirs) for _ in range(LAYERS)]

    def replayed() -> list[int]:
        graph.replay()
        return [int(layer.unique()) for layer in slots]

    assert replayed() == [0, 0, 0]
    for text, want in {"off": [1, 1, 1], "on": [0, 0, 0]}.items():
        switch.path.write_text(text)
        switch._next = 0.0  # read at once
        assert any(switch.step_ended() for _ in range(16)) and replayed() == want
    switch.leave()
    assert replayed() == [1, 1, 1]


@pytest.mark.parametrize("padded", [False, True])
def test_shadow_mode_counts_in_a_captured_graph(tmp_path: Path, padded: bool) -> None:
    """Every replay's own slots, none of the capture's."""
    tables = torch.tensor([[0, 1, 2, 3, 0, 4, 5, 1]]).repeat(LAYERS, 1)
    settings = Settings.read(
        {"ISOLOAD_MODE": "shadow", "ISOLOAD_RECORD": str(tmp_path), "ISOLOAD_RECORD_EVERY": "1"}
    )
    topology = Topology(RANKS, RANKS)
    record = EngineRecord(settings, "engine", "m", 0, tables, EXPERTS, topology, "own", DEVICE)
    slots = torch.zeros(LAYERS, TOKENS, TOP_K, dtype=torch.int32, device=DEVICE)
    valid = torch.tensor(TOKENS, dtype=torch.int32, device=DEVICE) if padded else None

    def a_pass() -> None:
        for layer in range(LAYERS):
            record.add(layer, slots[layer], valid)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a_pass()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a_pass()
    record.clear()
    rng, wanted = np.random.default_rng(0), []
    for batch in range(3):
        drawn = torch.from_numpy(rng.integers(-1, tables.shape[1], slots.shape)).to(torch.int32)
        slots.copy_(drawn)
        rows = TOKENS - 7 * batch if padded else TOKENS
        if valid is not None:
            valid.fill_(rows)
        record.begin()
        graph.replay()
        record.step_ended()
        kept = drawn[:, :rows].flatten(1).numpy()
        wanted.append([np.bincount(of[of >= 0], minlength=tables.shape[1]) for of in kept])
    counts = record.recorder.counts()
    record.close()
    assert np.array_equal(counts.numpy(), np.array(wanted))


@pytest.mark.parametrize("shape", [(5, 33, 70), (5, 1 << 21), (3, 7)])
def test_checksums_are_those_of_a_cpu(shape: tuple[int, ...]) -> None:
    """To the bit; one changed bit changes its slot's alone."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator).to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    weights.append(torch.randint(0, 255, shape, generator=generator, dtype=torch.uint8))
    there = [of.to(DEVICE) for of in weights]
    own = slot_checksums(weights)
    assert torch.equal(slot_checksums(there).cpu(), own)
    there[2].view(len(own), -1)[1, -1] ^= 1
    changed = slot_checksums(there).cpu() != own
    assert changed.tolist() == [i == 1 for i in range(len(own))]
