"""isoload's versions of SGLang's algorithms against SGLang's own code: Waterfill's kernels, EPLB."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from engine_runs import HARNESS
from sglang.srt.eplb import eplb_algorithms

import isoload
from isoload.engines.sglang import placement


@pytest.fixture(scope="module")
def interpreted() -> str:
    """SGLang's kernels in Triton's interpreter, which is chosen when Triton is imported: in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HARNESS / "waterfill_kernels.py")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("rule", ["static", "dynamic"])
def test_waterfill_kernels_equal_waterfill_sampled(interpreted: str, rule: str) -> None:
    assert f"{rule}: 768 of 768" in interpreted


@pytest.mark.parametrize("name", ["deepseek", "auto"])
@pytest.mark.parametrize(("ranks", "redundant"), [(8, 16), (8, 0), (16, 32)])
def test_rebalance_experts_equals_eplb_that_keeps_duplicates(ranks: int, redundant: int, name: str) -> None:
    """On counts without ties. (isoload's own default moves an expert's second replica off its rank.)"""
    counts = torch.rand(2, 6, 64, generator=torch.Generator().manual_seed(ranks)) * 1000
    size = (64 + redundant) // ranks
    chosen = eplb_algorithms.compute_algorithm(name, None, 1)
    table = eplb_algorithms.rebalance_experts(counts, 64 + redundant, size, None, 1, chosen)[0]
    topology = isoload.Topology(ranks)
    ours = isoload.place(counts.sum(0), topology, size, placer="eplb", dedup=False)
    assert torch.equal(table.int(), ours.slot_to_expert)


def test_eplb_algorithm_isoload_is_the_placer() -> None:
    counts = torch.randint(0, 900, (2, 3, 16), generator=torch.Generator().manual_seed(2))
    chosen = placement.compute_algorithm(eplb_algorithms.compute_algorithm, "isoload", None, 1)
    tables = placement.rebalance_experts(eplb_algorithms.rebalance_experts, counts, 20, 5, None, 1, chosen)
    want = isoload.place(counts, isoload.Topology(4), 5)
    assert torch.equal(tables[0].int(), want.slot_to_expert)
    for layer in range(3):
        for expert in range(16):
            slots = (want.slot_to_expert[layer] == expert).nonzero().flatten().tolist()
            assert tables[1][layer, expert][: len(slots)].tolist() == slots
            assert (tables[1][layer, expert][len(slots) :] == -1).all() and tables[2][layer, expert] == len(
                slots
            )
