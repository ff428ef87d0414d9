"""Which loads a plan needs: the busiest rank by what a rank may know in the forward, on recorded routing.

Fairness ledger
- Traces, by token in recorded order: gpt-oss-20b decode (the shipped cut, or with --traces the whole run), three ESFT
  tasks of DeepSeek-V2-Lite; by counts: GLM-5.2, six text domains, whose tokens are drawn (each copy by itself, so
  bursts are understated). hom: ranks read one trace at different places. het: each rank has a domain of its own.
- Placement: `eplb` with one or two spare slots a rank (gpt-oss, ESFT) or two to four (GLM), on all that the stream may
  show: what others get wrong there is not placement's fault. Four layers, 48 steps, the first 16 only warm up.
- hash: every copy takes a random replica (vLLM's hash of the row, SGLang's dynamic). static: one replica per source
  rank and expert (SGLang's default). last, sampled: weights by the exact split of the last step's sums, drawn from (a
  draft for vLLM). own: `plan_own`, no targets. own + targets: the same, exchanged every 16 steps, by the product's own
  functions. all counts: `exact`, which gathers in the forward.
- The figure is the busiest rank's load over the proved bound of that batch's loads, mean over layers and steps. It is
  1 for all counts by proof. Nothing here is a time.

Usage: python bench/bench_loads.py [--traces FOLDER] [--write]    (without a folder: the shipped trace alone)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import isoload
from harness import write_results
from isoload import ops
from isoload.own_counts import offsets
from isoload.policies.published.static import StaticPolicy
from isoload.trace import read_trace
from streams import SHIPPED, TASKS

LAYERS, STEPS, WARM, EVERY = 4, 48, 16, 16
TOKENS = (8, 32, 256, 2048)  # of a rank: small decode, decode, large decode, prefill
SPARE = {
    32: (1, 1, 1),
    64: (1, 1, 1),
    256: (4, 2, 1),
}  # slots beyond E / R, by number of experts, on 8, 16, 32 ranks
RANKS = (8, 16, 32)
PROTOCOLS = ("hash", "static", "last, sampled", "own", "own + targets")
Loads = NDArray[np.int32]  # [L, R, E]


class ByToken:
    """Recorded tokens [N, L, K] of each domain; rank r reads domain r % D from a place of its own on."""

    def __init__(self, domains: list[NDArray[Any]], num_experts: int) -> None:
        of = np.linspace(0, domains[0].shape[1] - 1, LAYERS).astype(int)
        self.domains, self.num_experts = [ids[:, of] for ids in domains], num_experts
        self.all = np.stack([sum_of(ids, num_experts) for ids in self.domains]).sum(0)

    def steps(self, ranks: int, tokens: int, rng: np.random.Generator) -> Iterator[Loads]:
        own = [self.domains[r % len(self.domains)] for r in range(ranks)]
        first = [int(rng.integers(len(ids))) for ids in own]
        for step in range(STEPS):
            at = [
                (f + step * tokens + np.arange(tokens)) % len(ids) for f, ids in zip(first, own, strict=True)
            ]
            rows = [sum_of(ids[where], self.num_experts) for ids, where in zip(own, at, strict=True)]
            yield np.stack(rows, 1).astype(np.int32)


class ByCounts:
    """Recorded counts [B, L, E] of each domain; a rank stays at a batch for eight steps."""

    def __init__(self, domains: list[NDArray[Any]], top_k: int) -> None:
        of = np.linspace(0, domains[0].shape[1] - 1, LAYERS).astype(int)
        self.domains, self.top_k = [counts[:, of] for counts in domains], top_k
        self.num_experts = domains[0].shape[-1]
        self.all = np.concatenate(self.domains).sum(0)

    def steps(self, ranks: int, tokens: int, rng: np.random.Generator) -> Iterator[Loads]:
        for step in range(STEPS):
            rows = []
            for r in range(ranks):
                domain = self.domains[r % len(self.domains)]
                likes = domain[step // 8 % len(domain)].astype(float)
                likes /= likes.sum(-1, keepdims=True)
                rows.append(rng.multinomial(tokens * self.top_k, likes))
            yield np.stack(rows, 1).astype(np.int32)


def sum_of(ids: NDArray[Any], num_experts: int) -> NDArray[Any]:
    """[L, E] copies in tokens [N, L, K]."""
    return np.stack([np.bincount(ids[:, i].ravel(), minlength=num_experts) for i in range(ids.shape[1])])


def streams(folder: Path | None) -> Iterator[tuple[str, str, ByToken | ByCounts]]:
    """(trace, dealing, stream)"""
    shipped = read_trace(SHIPPED if folder is None else folder / "gptoss20b_decode_mmlu.npz")
    assert shipped.topk_ids is not None
    yield "gpt-oss-20b", "hom", ByToken([np.asarray(shipped.topk_ids)[640:]], 32)
    if folder is None:
        return
    tasks = [np.asarray(read_trace(folder / f"dsv2lite_esft_{task}.npz").topk_ids) for task in TASKS]
    yield "DeepSeek-V2-Lite", "hom", ByToken([tasks[0]], 64)
    yield "DeepSeek-V2-Lite", "het", ByToken(tasks, 64)
    glm = read_trace(folder / "glm52_domains_a.npz")
    assert glm.counts is not None and glm.cluster is not None
    domains = [
        glm.counts[[str(c) == name for c in glm.cluster]] for name in sorted({str(c) for c in glm.cluster})
    ]
    yield "GLM-5.2", "hom", ByCounts(domains[:1], 8)
    yield "GLM-5.2", "het", ByCounts(domains, 8)


class Setting:
    """A placement, and what each protocol makes of loads [L, R, E]: peaks [L]."""

    def __init__(self, totals: NDArray[Any], ranks: int, seed: int) -> None:
        self.ranks, num_experts = ranks, totals.shape[-1]
        slots = num_experts // ranks + SPARE[num_experts][RANKS.index(ranks)]
        self.placement = isoload.place(torch.from_numpy(totals.copy()), isoload.Topology(ranks), slots)
        self.placed = self.placement.layers("cpu")
        self.tables, self.slots = self.placed.tables, self.placed.slot_to_expert.long()
        self.static = StaticPolicy().slots(self.placed).numpy()  # [L, R, E]
        self.even = torch.where(self.tables.is_replica(), 1.0, 0.0)
        self.weights = self.even  # of the last step
        self.draw = np.random.default_rng(seed)
        self.none = torch.zeros(LAYERS, ranks, dtype=torch.int32)
        self.offset = [self.none] * ranks
        self.recent = torch.zeros(ranks, LAYERS, num_experts, dtype=torch.int64)

    def peak(self, sent: torch.Tensor) -> NDArray[Any]:
        """[L] of copies [L, P]."""
        return sent.view(LAYERS, self.ranks, -1).sum(-1).amax(1).numpy()

    def sampled(self, loads: Loads, weights: torch.Tensor) -> torch.Tensor:
        """[L, P] copies that draw their slot by weights [L, P]."""
        sent = np.zeros(weights.shape, dtype=np.int64)
        for i in range(LAYERS):
            for e, copies in enumerate(loads[i].sum(0)):
                at = np.flatnonzero((self.slots[i] == e).numpy() & (self.even[i] > 0).numpy())
                w = weights[i, at].double().numpy()
                w = w if w.sum() > 0 else np.ones(len(at))
                sent[i, at] += self.draw.multinomial(copies, w / w.sum())
        return torch.from_numpy(sent)

    def fixed(self, loads: Loads) -> torch.Tensor:
        sent = [
            np.bincount(self.static[i].ravel(), loads[i].ravel(), self.slots.shape[1]) for i in range(LAYERS)
        ]
        return torch.from_numpy(np.stack(sent)).long()

    def own(self, loads: torch.Tensor, offset: list[torch.Tensor], keep: bool) -> torch.Tensor:
        rows = [
            ops.plan_own(
                loads[:, s].contiguous(), self.tables, offset[s], s, recent=self.recent[s] if keep else None
            )
            for s in range(self.ranks)
        ]
        return torch.stack(rows).sum(0)

    def step(self, loads: Loads, number: int) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Peaks [L] of every protocol, and the proved bound [L]."""
        given = torch.from_numpy(loads)
        exact = ops.plan_exact(given, self.tables)
        found: dict[str, Callable[[], torch.Tensor]] = {
            "hash": lambda: self.sampled(loads, self.even),
            "static": lambda: self.fixed(loads),
            "last, sampled": lambda: self.sampled(loads, self.weights),
            "own": lambda: self.own(given, [self.none] * self.ranks, False),
            "own + targets": lambda: self.own(given, self.offset, True),
        }
        peaks = {name: self.peak(send()) for name, send in found.items()}
        self.weights = exact.quota.float()
        if (number + 1) % EVERY == 0:
            of_all = self.recent.transpose(0, 1)
            at = self.tables, self.placed.slot_to_expert, self.placement.topology
            self.offset = [offsets(of_all, s, *at) for s in range(self.ranks)]
        return peaks, exact.bound.numpy()


def judge(
    name: str, dealing: str, stream: ByToken | ByCounts, ranks: int, tokens: int
) -> list[dict[str, Any]]:
    rng, setting = np.random.default_rng(tokens), Setting(stream.all, ranks, tokens)
    over: dict[str, list[NDArray[Any]]] = {protocol: [] for protocol in PROTOCOLS}
    for number, loads in enumerate(stream.steps(ranks, tokens, rng)):
        peaks, bound = setting.step(loads, number)
        for protocol, peak in peaks.items():
            if number >= WARM:
                over[protocol].append(peak / bound)
    where = {"trace": name, "dealing": dealing, "ranks": ranks, "tokens": tokens}
    return [
        {**where, "protocol": p, "mean": float(np.mean(x)), "p99": float(np.percentile(x, 99))}
        for p, x in over.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="busiest rank over the bound of all loads, mean over traces and ranks: hom / het")
    for head in ("tokens a rank", *PROTOCOLS):
        table.add_column(head, justify="right")
    for tokens in TOKENS:
        table.add_row(str(tokens), *(" / ".join(means(rows, p, tokens)) for p in PROTOCOLS))
    Console().print(table)
    worse = [r for r in rows if r["protocol"] == "own + targets" and r["mean"] > lowest(rows, r) + 0.0005]
    print(
        f"own + targets is above hash, static or last, sampled in {len(worse)} of {len(rows) // len(PROTOCOLS)}:"
    )
    for row in worse:
        print(f"  {row['trace']} {row['dealing']} {row['ranks']} x {row['tokens']}: {row['mean']:.4f}")


def means(rows: list[dict[str, Any]], protocol: str, tokens: int) -> list[str]:
    """Of hom and het, where there are."""
    found = []
    for dealing in ("hom", "het"):
        of = [
            r["mean"]
            for r in rows
            if (r["protocol"], r["tokens"], r["dealing"]) == (protocol, tokens, dealing)
        ]
        found += [f"{np.mean(of):.3f}"] if of else []
    return found


def lowest(rows: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """The least mean of the protocols that others use, in the row's setting."""
    keys = ("trace", "dealing", "ranks", "tokens")
    others = PROTOCOLS[:3]
    return min(
        float(r["mean"]) for r in rows if r["protocol"] in others and all(r[k] == row[k] for k in keys)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder of npz traces")
    parser.add_argument("--write", action="store_true", help="write the results file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for name, dealing, stream in streams(asked.traces)
        for ranks in RANKS
        for tokens in TOKENS
        for row in judge(name, dealing, stream, ranks, tokens)
    ]
    show(rows)
    if asked.write:
        print(write_results("bench_loads", rows))


if __name__ == "__main__":
    main()
