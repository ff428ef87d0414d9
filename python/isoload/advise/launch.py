"""What to type: an engine's flags for a candidate, as docs/sglang.md and docs/vllm.md explain them."""

from __future__ import annotations

from isoload.advise.candidates import Candidate


def flags(engine: str, candidate: Candidate, ranks: int, nodes: int, placement: str | None) -> list[str]:
    """Environment and options, a line each. placement: a file of SGLang's form, where the candidate has one."""
    return _sglang(candidate, ranks, nodes, placement) if engine == "sglang" else _vllm(candidate, ranks)


def _sglang(candidate: Candidate, ranks: int, nodes: int, placement: str | None) -> list[str]:
    lines = [f"--ep-size {ranks}", *([f"--nnodes {nodes}"] if nodes > 1 else [])]
    if candidate.more:
        lines.append(f"--ep-num-redundant-experts {ranks * candidate.more}")
        algorithm = {"exact": "lp", "own": "dynamic"}.get(candidate.split, candidate.split)
        lines.append(f"--ep-dispatch-algorithm {algorithm}")
    if candidate.placer != "trivial":
        lines.append("--enable-eplb" + (" --eplb-algorithm isoload" if candidate.ours else ""))
        lines += [f"--init-expert-location {placement}"] if placement else []
    if candidate.ours:
        loads = {"exact": "gathered", "own": "own"}[candidate.split]
        lines.insert(0, f"ISOLOAD_SGLANG=1 ISOLOAD_LOADS={loads}")
    return lines


def _vllm(candidate: Candidate, ranks: int) -> list[str]:
    lines = ["--enable-expert-parallel"]
    if candidate.placer != "trivial":
        lines.append(f"--enable-eplb --eplb-config '{{\"num_redundant_experts\": {ranks * candidate.more}}}'")
    if candidate.ours:
        loads = {"exact": "gathered", "own": "own"}[candidate.split]
        lines.insert(0, f"ISOLOAD_VLLM=1 ISOLOAD_LOADS={loads}")
    return lines
