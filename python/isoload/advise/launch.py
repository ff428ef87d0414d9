"""What to type: an engine's flags for a candidate, as docs/sglang.md and docs/vllm.md explain them."""

from __future__ import annotations

import shlex

from isoload.advise.candidates import Candidate
from isoload.topology import Topology

FILE = "placement.json"


def flags(engine: str, candidate: Candidate, topology: Topology, slots: int, trace: str | None) -> list[str]:
    """Lines to type: environment and options and, where the engine starts from a file, the command that makes it.

    slots: of a rank. trace: the file that the placement is made of; None: there is none.
    """
    ranks, nodes = topology.num_ranks, topology.num_nodes
    if engine == "vllm":
        return _vllm(candidate, ranks)
    if candidate.placer == "trivial" or trace is None:
        return _sglang(candidate, ranks, nodes, None)
    size = f"--ranks {ranks} --ranks-per-node {topology.ranks_per_node} --slots-per-rank {slots}"
    make = f"isoload place {shlex.quote(trace)} -o {FILE} --format sglang {size} --placer {candidate.placer}"
    return [make, *_sglang(candidate, ranks, nodes, FILE)]


def _sglang(candidate: Candidate, ranks: int, nodes: int, placement: str | None) -> list[str]:
    lines = [f"--ep-size {ranks}", *([f"--nnodes {nodes}"] if nodes > 1 else [])]
    if candidate.more:
        lines.append(f"--ep-num-redundant-experts {ranks * candidate.more}")
        algorithm = {"exact": "lp", "node": "lp"}.get(
            candidate.split, "dynamic" if candidate.ours else candidate.split
        )
        lines.append(f"--ep-dispatch-algorithm {algorithm}")
    if candidate.placer != "trivial":
        lines.append("--enable-eplb" + (" --eplb-algorithm isoload" if candidate.ours else ""))
        lines += [f"--init-expert-location {placement}"] if placement else []
    if candidate.ours:
        loads = {"exact": "gathered"}.get(candidate.split, candidate.split)
        lines.insert(0, f"ISOLOAD_SGLANG=1 ISOLOAD_LOADS={loads}")
    return lines


def _vllm(candidate: Candidate, ranks: int) -> list[str]:
    lines = ["--enable-expert-parallel"]
    if candidate.placer != "trivial":
        lines.append(f"--enable-eplb --eplb-config '{{\"num_redundant_experts\": {ranks * candidate.more}}}'")
    if candidate.ours:
        loads = {"exact": "gathered"}.get(candidate.split, candidate.split)
        lines.insert(0, f"ISOLOAD_VLLM=1 ISOLOAD_LOADS={loads}")
    return lines
