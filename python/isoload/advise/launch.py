"""What to type: an engine's flags for a candidate, as docs/sglang.md and docs/vllm.md explain them."""

from __future__ import annotations

from isoload.advise.candidates import Candidate
from isoload.topology import Topology

FILE = "placement.json"


# The all-to-all whose measured times a phase is modelled with (constants.ALL_TO_ALL), as vLLM's option names it.
VLLM_BACKENDS = {"prefill": "deepep_high_throughput", "decode": "deepep_low_latency"}


def flags(
    engine: str,
    candidate: Candidate,
    topology: Topology,
    slots: int,
    trace: str | None,
    phase: str = "prefill",
) -> list[str]:
    """Return the lines to type: environment variables, options, and the command that makes the initial placement.

    The options include the ranks and the all-to-all that the candidate was modelled with. On several nodes NODE_RANK,
    HEAD_NODE_IP and PORT are the reader's.

    Args:
        engine: "sglang" or "vllm".
        candidate: what runs, other than the experts in order that engines start with.
        topology: R ranks and their nodes.
        slots: slots of a rank.
        trace: files that the placement is made of and options that read them, quoted for a shell; None: no files.
        phase: "prefill" or "decode", whose all-to-all was modelled.
    """
    made = engine == "sglang" and candidate.placer != "trivial" and trace is not None
    lines = (
        _vllm(candidate, topology, VLLM_BACKENDS[phase])
        if engine == "vllm"
        else _sglang(candidate, topology, made)
    )
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
    head = f"--nnodes {nodes} --node-rank ${{NODE_RANK}} --dist-init-addr ${{HEAD_NODE_IP}}:${{PORT}}"
    lines = [f"--tp {ranks} --ep-size {ranks}", *([head] if nodes > 1 else []), "--moe-a2a-backend deepep"]
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


def _vllm(candidate: Candidate, topology: Topology, backend: str) -> list[str]:
    ranks, nodes = topology.num_ranks, topology.num_nodes
    head = (
        f"--nnodes {nodes} --node-rank ${{NODE_RANK}} --master-addr ${{HEAD_NODE_IP}} --master-port ${{PORT}}"
    )
    lines = [f"--data-parallel-size {ranks} --enable-expert-parallel", *([head] if nodes > 1 else [])]
    lines.append(f"--all2all-backend {backend}")
    if candidate.placer != "trivial":
        config = f"'{{\"num_redundant_experts\": {ranks * candidate.more}}}'"
        lines.append(f"--enable-eplb --eplb-config {config}")
    return lines
