"""Which loads a plan needs: the busiest rank by what a rank may know in the forward, on recorded routing.

Fairness ledger
- Traces, by token in recorded order: gpt-oss-20b decode (the shipped cut, or with --traces the whole run), three ESFT
  tasks of DeepSeek-V2-Lite; by counts: GLM-5.2 (six text domains), Gemma 4 (themes), DeepSeek-V3 (four workloads) and
  Switch-128 (two corpora), whose tokens are drawn, each copy by itself, so bursts are understated. hom: all ranks have
  one domain. het: rank r has domain r, and so on around. turned: het, but all domains move one rank on in each step.
- Every rank has requests of its own: by token it starts at a place of its own, by counts at a batch of its own, where
  it stays for eight steps of decoding; a prefill step has new prompts, so it takes the next batch.
- Placement: `eplb` with one to four spare slots a rank, by the number of experts, on all that the stream may show: what
  others get wrong there is not placement's fault. Four layers, 48 steps, the first 16 only warm up.
- hash: every copy takes a random replica (vLLM's hash of the row, SGLang's dynamic). static: one replica per source
  rank and expert (SGLang's default). last step, sampled: weights by the exact split of the last step's sums, drawn from
  (a draft for vLLM). own: `plan_own`, no targets. own + targets, node: Balancer(loads="own", "node"),
  exchanged every 16 steps, by the product's own functions; nodes of eight ranks, so from 16 ranks on.
- Idle ranks: own counts alone, four to 256 tokens a rank; node, no targets: the same nodes without an exchange.
  Settings of at most 128 tokens in a step run 144 steps, as means of 48 steps are off by up to 0.01.
  half: odd ranks have tokens only in the eight steps after an exchange, whose targets do not know of them.
  turns: odd and even ranks are busy by turns of eight steps.
  bursts: a rank has a sixteenth of its tokens, and in one step of eight, drawn, all.
  one: one rank is busy in each step.
  leave: odd ranks have no tokens in the eight steps after an exchange, whose targets count on them; no rank can know
  that before the next exchange.
- The figure is the busiest rank's load over the proved bound of that batch's loads, mean over layers and steps. It is
  1 for all counts by proof. Nothing here is a time.

Usage: python bench/bench_loads.py [--traces FOLDER] [--write]    (without a folder: the shipped trace alone)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import isoload
from isoload import ops
from isoload.balancing.targets import offsets
from isoload.policies.exact import StaticPolicy
from isoload.traces import read_trace
from lib import table
from lib.harness import command, write_results
from lib.streams import SHIPPED, TASKS
from lib.trace_files import need

LAYERS, STEPS, WARM, EVERY = 4, 48, 16, 16
TOKENS = (4, 8, 16, 32, 64, 256, 2048)  # of a rank: from small decode to prefill
PREFILL, STAY, NODE = 2048, 8, 8
SPARE = {
    32: 1,
    64: 1,
    128: 2,
    256: 4,
}  # slots beyond E / R on 8 ranks, by number of experts; half on 16, a quarter on 32
RANKS = (8, 16, 32, 64)
IDLE_TOKENS = (4, 16, 64, 256)
FEW, MORE_STEPS = 128, 144  # tokens of all ranks, up to which a setting with idle ranks has more steps
BUSY = ("half", "turns", "bursts", "one", "leave")
OTHERS = ("hash", "static", "last step, sampled")
PROTOCOLS = (*OTHERS, "own", "own + targets", "node")
BY_OWN_COUNTS = ("own", "own + targets", "node, no targets", "node")
Loads = NDArray[np.int32]  # [L, R, E]


class ByToken:
    """Recorded tokens [N, L, K] of each domain; rank r reads domain r % D from a place of its own on.

    turned: domain (r + step) % D.
    """

    def __init__(self, domains: list[NDArray[Any]], num_experts: int, turned: bool = False) -> None:
        self.turned = turned
        of = np.linspace(0, domains[0].shape[1] - 1, LAYERS).astype(int)
        self.domains, self.num_experts = [ids[:, of] for ids in domains], num_experts
        self.all = np.stack([sum_of(ids, num_experts) for ids in self.domains]).sum(0)

    def steps(self, ranks: int, tokens: int, rng: np.random.Generator, steps: int = STEPS) -> Iterator[Loads]:
        first = rng.integers(1 << 30, size=ranks)
        for step in range(steps):
            rows = []
            for r in range(ranks):
                ids = self.domains[(r + step * self.turned) % len(self.domains)]
                at = (first[r] + step * tokens + np.arange(tokens)) % len(ids)
                rows.append(sum_of(ids[at], self.num_experts))
            yield np.stack(rows, 1).astype(np.int32)


class ByCounts:
    """Recorded counts [B, L, E] of each domain; rank r draws from domain r % D, at a batch of its own."""

    def __init__(self, domains: list[NDArray[Any]], top_k: int, turned: bool = False) -> None:
        self.turned = turned
        of = np.linspace(0, domains[0].shape[1] - 1, LAYERS).astype(int)
        self.domains, self.top_k = [counts[:, of] for counts in domains], top_k
        self.num_experts = domains[0].shape[-1]
        self.all = np.concatenate(self.domains).sum(0)

    def steps(self, ranks: int, tokens: int, rng: np.random.Generator, steps: int = STEPS) -> Iterator[Loads]:
        for step in range(steps):
            rows = []
            for r in range(ranks):
                domain = self.domains[(r + step * self.turned) % len(self.domains)]
                batch = r // len(self.domains) + (step if tokens >= PREFILL else step // STAY)
                likes = domain[batch % len(domain)].astype(float)
                likes /= likes.sum(-1, keepdims=True)
                rows.append(rng.multinomial(tokens * self.top_k, likes))
            yield np.stack(rows, 1).astype(np.int32)


def sum_of(ids: NDArray[Any], num_experts: int) -> NDArray[Any]:
    """[L, E] copies in tokens [N, L, K]."""
    return np.stack([np.bincount(ids[:, i].ravel(), minlength=num_experts) for i in range(ids.shape[1])])


def busy_part(busy: str, ranks: int, step: int, rng: np.random.Generator) -> NDArray[Any]:
    """[R] part of its tokens that every rank has in a step."""
    odd, soon = np.arange(ranks) % 2 == 1, step % EVERY < 8
    if busy == "half":
        return np.where(odd, soon and step >= WARM, 1.0)
    if busy == "leave":
        return np.where(odd, not soon, 1.0)
    if busy == "turns":
        return np.where(odd == (step // 8 % 2 == 1), 1.0, 0.0)
    if busy == "bursts":
        return np.where(rng.random(ranks) < 1 / 8, 1.0, 1 / 16)
    return np.where(np.arange(ranks) == step % ranks, 1.0, 0.0)


def thinned(loads: Loads, parts: NDArray[Any], tokens: int, rng: np.random.Generator) -> Loads:
    """Loads of ranks of which each has a part [R] of its tokens; at least one token where that is not 0."""
    kept = loads.copy()
    for rank, part in enumerate(parts):
        if part == 0:
            kept[:, rank] = 0
        elif part < 1:
            top_k = int(loads[0, rank].sum()) // tokens
            number = max(1, int(tokens * part)) * top_k
            for layer, row in enumerate(loads[:, rank]):
                kept[layer, rank] = rng.multivariate_hypergeometric(row, number)
    return kept


COUNTED = {
    "GLM-5.2": ("glm52_domains_a", 8),
    "Gemma 4": ("gemma4_26b_themes", 8),
    "DeepSeek-V3": ("dsv3_sglang_longin", 8),
}
SWITCH = ("switch128_bookcorpus", "switch128_cocktail")


def streams(folder: Path | None) -> Iterator[tuple[str, str, ByToken | ByCounts]]:
    """(trace, dealing, stream)"""
    shipped = read_trace(SHIPPED) if folder is None else need(folder, "gptoss20b_decode_mmlu")[0]
    assert shipped.topk_ids is not None
    yield "gpt-oss-20b", "hom", ByToken([np.asarray(shipped.topk_ids)[640:]], 32)
    if folder is None:
        return
    need(folder, *(file for file, _ in COUNTED.values()), *SWITCH)  # before hours of the others
    tasks = [np.asarray(need(folder, f"dsv2lite_esft_{task}")[0].topk_ids) for task in TASKS]
    yield "DeepSeek-V2-Lite", "hom", ByToken([tasks[0]], 64)
    yield "DeepSeek-V2-Lite", "het", ByToken(tasks, 64)
    yield "DeepSeek-V2-Lite", "turned", ByToken(tasks, 64, turned=True)
    for name, (file, top_k) in COUNTED.items():
        (trace,) = need(folder, file)
        assert trace.counts is not None and trace.cluster is not None
        clusters = [str(c) for c in trace.cluster]
        domains = [trace.counts[[c == of for c in clusters]] for of in sorted(set(clusters))]
        yield name, "hom", ByCounts([trace.counts] if name == "Gemma 4" else domains[:1], top_k)
        yield name, "het", ByCounts(domains, top_k)
        if name == "GLM-5.2":
            yield name, "turned", ByCounts(domains, top_k, turned=True)
    corpora = [trace.counts for trace in need(folder, *SWITCH)]
    yield "Switch-128", "hom", ByCounts([c for c in corpora[:1] if c is not None], 1)
    yield "Switch-128", "het", ByCounts([c for c in corpora if c is not None], 1)


class Setting:
    """A placement, and what each protocol makes of loads [L, R, E]: peaks [L]."""

    def __init__(self, totals: NDArray[Any], ranks: int, seed: int) -> None:
        self.ranks, num_experts = ranks, totals.shape[-1]
        slots = -(-num_experts // ranks) + max(1, SPARE[num_experts] * 8 // ranks)
        self.placement = isoload.place(torch.from_numpy(totals.copy()), isoload.Topology(ranks), slots)
        self.placed = self.placement.layers("cpu")
        self.tables, self.slots = self.placed.tables, self.placed.slot_to_expert.long()
        self.static = StaticPolicy().slots(self.placed).numpy()  # [L, R, E]
        self.is_replica = self.tables.is_replica().numpy()
        self.at = self._replicas(num_experts)  # [L, E, C] slots, P where there are no more
        self.weights = np.zeros(self.slots.shape)  # of the last step
        self.draw = np.random.default_rng(seed)
        self.none = torch.zeros(LAYERS, ranks, dtype=torch.int32)
        self.offset = [self.none] * ranks
        self.recent = torch.zeros(ranks, LAYERS, num_experts, dtype=torch.int64)
        self.nodes = ranks // NODE if ranks > NODE else 0
        self.node_offset = [self.none] * self.nodes

    def _replicas(self, num_experts: int) -> NDArray[Any]:
        of = [
            [np.flatnonzero((row == e) & is_one) for e in range(num_experts)]
            for row, is_one in zip(self.slots.numpy(), self.is_replica, strict=True)
        ]
        most, num_slots = max(len(x) for row in of for x in row), self.slots.shape[1]
        return np.array(
            [[np.pad(x, (0, most - len(x)), constant_values=num_slots) for x in row] for row in of]
        )

    def peak(self, sent: torch.Tensor) -> NDArray[Any]:
        """[L] of copies [L, P]."""
        return sent.view(LAYERS, self.ranks, -1).sum(-1).amax(1).numpy()

    def sampled(self, loads: Loads, weights: NDArray[Any]) -> torch.Tensor:
        """[L, P] copies that draw their slot by weights [L, P]; alike where an expert's are all 0."""
        there = self.at < self.slots.shape[1]
        part = np.take_along_axis(np.pad(weights, ((0, 0), (0, 1))), self.at.reshape(LAYERS, -1), 1)
        part = part.reshape(self.at.shape)
        part = np.where(part.sum(-1, keepdims=True) > 0, part, there)
        drawn = self.draw.multinomial(loads.sum(1), part / part.sum(-1, keepdims=True))
        sent = np.zeros((LAYERS, self.slots.shape[1] + 1), dtype=np.int64)
        np.put_along_axis(sent, self.at.reshape(LAYERS, -1), drawn.reshape(LAYERS, -1), 1)
        return torch.from_numpy(sent[:, :-1])

    def fixed(self, loads: Loads) -> torch.Tensor:
        sent = [
            np.bincount(self.static[i].ravel(), loads[i].ravel(), self.slots.shape[1]) for i in range(LAYERS)
        ]
        return torch.from_numpy(np.stack(sent)).long()

    def own(self, loads: torch.Tensor, offset: list[torch.Tensor], keep: bool = False) -> torch.Tensor:
        """loads [L, N, E] of N sources, an offset [L, R] of each."""
        rows = [
            ops.plan_own(
                loads[:, s].contiguous(), self.tables, offset[s], s, recent=self.recent[s] if keep else None
            )
            for s in range(loads.shape[1])
        ]
        return torch.stack(rows).sum(0)

    def exchange(self, given: torch.Tensor) -> None:
        """given: loads [L, R, E] of the last step."""
        of_all, last = self.recent.transpose(0, 1), given.sum(2)
        at = self.tables, self.placed.slot_to_expert, self.placement.topology
        self.offset = [offsets(of_all, last, s, *at) for s in range(self.ranks)]
        if self.nodes:
            by_node, last = (x.unflatten(1, (self.nodes, NODE)).sum(2) for x in (of_all, last))
            self.node_offset = [offsets(by_node, last, s, *at) for s in range(self.nodes)]

    def step(
        self, loads: Loads, number: int, protocols: tuple[str, ...]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        """Peaks [L] of every protocol, and the proved bound [L]."""
        given = torch.from_numpy(loads)
        exact = ops.plan_exact(given, self.tables)
        found: dict[str, Callable[[], torch.Tensor]] = {
            "hash": lambda: self.sampled(loads, np.zeros(self.slots.shape)),
            "static": lambda: self.fixed(loads),
            "last step, sampled": lambda: self.sampled(loads, self.weights),
            "own": lambda: self.own(given, [self.none] * self.ranks),
            "own + targets": lambda: self.own(given, self.offset, keep=True),
        }
        if self.nodes:
            by_node = given.unflatten(1, (self.nodes, NODE)).sum(2, dtype=torch.int32)
            found["node"] = lambda: self.own(by_node, self.node_offset)
            found["node, no targets"] = lambda: self.own(by_node, [self.none] * self.nodes)
        peaks = {name: self.peak(send()) for name, send in found.items() if name in protocols}
        self.weights = exact.quota.numpy().astype(float)
        if (number + 1) % EVERY == 0:
            self.exchange(given)
        return peaks, exact.bound.numpy()


def judge(
    name: str, dealing: str, stream: ByToken | ByCounts, ranks: int, tokens: int, busy: str = "all"
) -> list[dict[str, Any]]:
    rng, setting = np.random.default_rng(tokens), Setting(stream.all, ranks, tokens)
    protocols = PROTOCOLS if busy == "all" else BY_OWN_COUNTS
    over: dict[str, list[NDArray[Any]]] = {protocol: [] for protocol in protocols}
    draw = np.random.default_rng(ranks)  # of its own: the streams are those of busy ranks
    steps = MORE_STEPS if busy != "all" and ranks * tokens <= FEW else STEPS
    for number, loads in enumerate(stream.steps(ranks, tokens, rng, steps)):
        if busy != "all":
            loads = thinned(loads, busy_part(busy, ranks, number, draw), tokens, draw)
        peaks, bound = setting.step(loads, number, protocols)
        for protocol, peak in peaks.items():
            if number >= WARM:
                over[protocol].append(peak / bound)
    where = {"trace": name, "dealing": dealing, "ranks": ranks, "tokens": tokens, "busy": busy}
    return [
        {**where, "protocol": p, "mean": float(np.mean(x)), "p99": float(np.percentile(x, 99))}
        for p, x in over.items()
        if x
    ]


def show_idle(rows: list[dict[str, Any]]) -> None:
    """Means by who is busy, and the settings in which targets lose most."""
    for busy in BUSY:
        of = [r for r in rows if r["busy"] == busy]
        means = {p: np.mean([r["mean"] for r in of if r["protocol"] == p]) for p in BY_OWN_COUNTS}
        print(f"{busy}: " + ", ".join(f"{p} {mean:.4f}" for p, mean in means.items()))
        by: dict[tuple[Any, ...], dict[str, float]] = {}
        for r in of:
            by.setdefault((r["trace"], r["dealing"], r["ranks"], r["tokens"]), {})[r["protocol"]] = r["mean"]
        for alone, targets in (("own", "own + targets"), ("node, no targets", "node")):
            lost = sorted(((x[targets] - x[alone], at) for at, x in by.items() if targets in x), reverse=True)
            print(f"  {targets} loses most: " + "; ".join(f"{loss:+.4f} {at}" for loss, at in lost[:4]))


def show(rows: list[dict[str, Any]]) -> None:
    cells = [[str(tokens), *(" / ".join(means(rows, p, tokens)) for p in PROTOCOLS)] for tokens in TOKENS]
    title = "busiest rank over the bound of all loads, mean over traces and ranks: hom / het"
    table.show(title, " | ".join(("tokens a rank", *PROTOCOLS)), cells)
    lost, all_of = losses(rows)
    print(f"own + targets is above hash, static or last step, sampled in {len(lost)} of {all_of}:")
    for row, least in lost:
        print(
            f"  {row['trace']} {row['dealing']} {row['ranks']} x {row['tokens']}: {row['mean']:.4f} for {least:.4f}"
        )
    turned = {
        p: np.mean([r["mean"] for r in rows if (r["protocol"], r["dealing"]) == (p, "turned")] or [np.nan])
        for p in ("own", "own + targets")
    }
    print(f"domains turned in each step: own {turned['own']:.4f}, + targets {turned['own + targets']:.4f}")


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


def losses(rows: list[dict[str, Any]]) -> tuple[list[tuple[dict[str, Any], float]], int]:
    """Settings in which own + targets is above what others use, by more than 0.0005, with the least of those; of how
    many. Domains that turn are a test of stale targets, and not among them."""
    keys = ("trace", "dealing", "ranks", "tokens")
    others: dict[Any, float] = {}
    for r in rows:
        if r["protocol"] in OTHERS:
            at = tuple(r[k] for k in keys)
            others[at] = min(r["mean"], others.get(at, np.inf))
    own = [r for r in rows if r["protocol"] == "own + targets" and r["dealing"] != "turned"]
    lost = [(r, others[tuple(r[k] for k in keys)]) for r in own]
    return [(r, least) for r, least in lost if r["mean"] > least + 0.0005], len(own)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--traces", type=Path, help="folder of npz traces")
    parser.add_argument("--write", action="store_true", help="write the results file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row
        for name, dealing, stream in streams(asked.traces)
        for ranks in RANKS
        if ranks <= max(32, stream.num_experts // 4)
        for tokens in TOKENS
        for busy in ("all", *(BUSY if tokens in IDLE_TOKENS and dealing != "turned" else ()))
        for row in judge(name, dealing, stream, ranks, tokens, busy)
    ]
    show([row for row in rows if row["busy"] == "all"])
    show_idle(rows)
    if asked.write:
        print(write_results("bench_loads", rows))


if __name__ == "__main__":
    main()
