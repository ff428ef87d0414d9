"""What to type: an engine's flags for a candidate, as docs/sglang.md and docs/vllm.md explain them."""

from __future__ import annotations

from isoload.advise.candidates import Candidate
from isoload.topology import Topology

FILE = "placement.json"


def flags(engine: str, candidate: Candidate, topology: Topology, slots: int, trace: str | None) -> list[str]:
    """Lines to type: environment and options and, where the engine starts from a file, the command that makes it.

    slots: of a rank. trace: files that the placement is made of and options that read them, quoted for a shell; None:
    there are none.
    """
    made = engine == "sglang" and candidate.placer != "trivial" and trace is not None
    lines = _vllm(candidate, topology) if engine == "vllm" else _sglang(candidate, topology, made)
    if candidate.ours:
        loads = {"exact": "gathered"}.get(candidate.split, candidate.split)
        lines.insert(0, f"ISOLOAD_{engine.upper()}=1 ISOLOAD_LOADS={loads}")
    if made:
        per_node = topology.ranks_per_node
        size = f"--ranks {topology.num_ranks} --ranks-per-node {per_node} --slots-per-rank {slots}"
        what = f"{trace} -o {FILE} --format sglang {size} --placer {candidate.placer}"
        lines.insert(0, f"isoload place {what}")
    return lines


def _sglang(candidate: Candidate, topology: Topology, from_file: bool) -> list[str]:
    ranks, nodes = topology.num_ranks, topology.num_nodes
    lines = [f"--ep-size {ranks}", *([f"--nnodes {nodes}"] if nodes > 1 else [])]
    if candidate.more:
        lines.append(f"--ep-num-redundant-experts {ranks * candidate.more}")
        algorithm = {"exact": "lp", "node": "lp"}.get(
            candidate.split, "dynamic" if candidate.ours else candidate.split
        )
        lines.append(f"--ep-dispatch-algorithm {algorithm}")
    if candidate.placer != "trivial":
        lines.append("--enable-eplb" + (" --eplb-algorithm isoload" if candidate.ours else ""))
        lines += [f"--init-expert-location {FILE}"] if from_file else []
    return lines


def _vllm(candidate: Candidate, topology: Topology) -> list[str]:
    more = topology.num_ranks * candidate.more
    eplb = f"--enable-eplb --eplb-config '{{\"num_redundant_experts\": {more}}}'"
    return ["--enable-expert-parallel", *([] if candidate.placer == "trivial" else [eplb])]
