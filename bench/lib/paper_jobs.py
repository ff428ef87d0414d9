"""What `make papers` computes: each job returns figures that stand beside a paper's. Counts and plans are exact.

A job names the traces that it reads, from the folder of --traces. Jobs of wall time run with --times alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import bench_balance
import bench_craft
import bench_grace
import bench_libra
import bench_lookahead
import isoload
from isoload.analysis.inspection import inspect_placement, inspect_trace
from isoload.balancing import planning
from isoload.policies import published_borrowing as listing
from lib.llep_plans import LISTING, OURS, plan_rows
from lib.result_tables import by
from lib.streams import FILES, Stream, streams
from lib.trace_files import need

Figures = dict[str, Any]
DSV3, LAW, OLMOE, QWEN = (
    "dsv3_sglang_longin",
    "dsv2lite_esft_law",
    "olmoe_mmlu_small",
    "qwen3_30b_pertoken_small",
)
GPT = "gptoss20b_decode_mmlu"


@dataclass(frozen=True)
class Job:
    run: Callable[[Path], Figures]
    traces: tuple[str, ...]
    timed: bool


JOBS: dict[str, Job] = {}


def job(
    *traces: str, timed: bool = False
) -> Callable[[Callable[[Path], Figures]], Callable[[Path], Figures]]:
    def add(run: Callable[[Path], Figures]) -> Callable[[Path], Figures]:
        JOBS[run.__name__] = Job(run, traces, timed)
        return run

    return add


# --- CRAFT


@job(DSV3)
def craft_balance(folder: Path) -> Figures:
    """Balance of unseen batches without replicas, with 8 of a rank, and with EPLB's; the part of EPLB's gain."""
    (trace,) = need(folder, DSV3)
    found: Figures = {}
    for experts, ranks in ((256, 64), (384, 48), (384, 64), (384, 96)):
        row = bench_craft.row(bench_craft.widened(trace.batch_counts(), experts), ranks)
        found[f"e{experts}_r{ranks}"] = row | {
            "part": (row["R8"] - row["base"]) / (row["eplb"] - row["base"])
        }
    return found


@job(DSV3)
def craft_skew(folder: Path) -> Figures:
    """Hottest expert over the mean by layer, over all batches."""
    (trace,) = need(folder, DSV3)
    total = trace.batch_counts().sum(0)
    over = total.max(-1) / total.mean(-1)
    worst = int(over.argmax())
    top_two = float(np.sort(total[worst])[-2:].sum() / total[worst].sum())
    layer = trace.layer_ids[worst]
    return {
        "most": float(over.max()),
        "least": float(over.min()),
        "above_10": int((over > 10).sum()),
        "layers": len(over),
        "layer": int(layer),
        "top_two": top_two,
    }


@job(DSV3)
def craft_replicas(folder: Path) -> Figures:
    """Balance by technique, and by replicas of a layer, alike in all layers, on 64 ranks."""
    (trace,) = need(folder, DSV3)
    placement = isoload.place(trace, isoload.Topology(64), 5, "eplb")
    found = inspect_placement(trace, placement)
    balance = dict(zip(found["replicas"], found["balancedness_by_replicas"], strict=True))
    layers = np.array([layer["by_replicas"] for layer in found["layers"]])
    enough = (layers >= layers.max(1, keepdims=True) - 0.02).argmax(1)
    plateau = np.array(found["replicas"])[enough]
    means = {
        key: float(np.mean([layer[key] for layer in found["layers"]]))
        for key in ("in_order", "placed", "replicated")
    }
    return {
        **means,
        **{f"b{number}": value for number, value in balance.items()},
        "from_16_to_64": balance[64] - balance[16],
        "from_0_to_16": balance[16] - balance[0],
        "plateau_least": int(plateau.min()),
        "plateau_most": int(plateau.max()),
        "plateau_median": float(np.median(plateau)),
    }


@job()
def craft_memory(folder: Path) -> Figures:
    """What the paper's own figures imply: 60 replicas of a rank take 75 % of the KV cache of six nodes."""
    return {
        "kv_of_8": 0.75 * 8 / 60,
        "fewer_d": 58 / 8,
        "fewer_k": 60 / 8,
        "gib_of_60": 60 * 3 * 7168 * 2048 * 2 / 2**30,
    }


@job(DSV3, timed=True)
def craft_planning(folder: Path) -> Figures:
    """Seconds of Algorithms 1 to 3 on 64 ranks, 3,000 batches; one thread."""
    (trace,) = need(folder, DSV3)
    counts = trace.batch_counts()
    draw = np.random.default_rng(0)
    shares = counts.sum(0) / counts.sum(0).sum(-1, keepdims=True)
    batches = np.stack([draw.multinomial(4096 * 8, shares) for _ in range(3000)])
    start = time.perf_counter()
    isoload.place(batches, isoload.Topology(64), placer="craft", replicas=8, objective="gain")
    return {"seconds": time.perf_counter() - start}


# --- Waterfill and LPLB


@job(DSV3)
def blog_matrix(folder: Path) -> Figures:
    """Change of the busiest rank against shared copies on their own rank, 4,096 tokens per batch of 16 ranks."""
    found: Figures = {}
    need(folder, DSV3)
    for name, placement in (("none", "no EPLB"), ("red0", "red0"), ("red16", "red16"), ("red32", "red32")):
        rows = bench_balance.run(folder / f"{DSV3}.npz", placement, 4096)
        cell = {row["policy"]: row for row in rows}
        found[name] = {
            "imbalance": cell["shared_local"]["imbalance_mean"],
            "waterfill": cell["waterfill_sampled:rule=dynamic"]["busiest"],
            "exact": cell["exact"]["busiest"],
            "joint": cell["joint"]["busiest"],
        }
    return found


# --- GRACE-MoE


def grace(folder: Path, name: str) -> Figures:
    """The components on 2 nodes of 2 ranks, relative to what the paper relates them to."""
    (trace,) = need(folder, name)
    rows = {row["variant"]: row for row in bench_grace.bench(trace, 2, 2)}
    vanilla, groups = rows["in order"], rows["affinity, controlled"]
    weights, locality = rows["+ replicas, weights"], rows["+ replicas, locality"]
    fixed = rows["one replica, weights"]

    def change(row: Figures, base: Figures, key: str) -> float:
        return float(row[key] / base[key] - 1)

    def inside(row: Figures) -> float:
        return float(row["rank_rows"] - row["node_rows"])  # to other ranks of the own node

    node = "node_dispatch_rows"
    return {
        "tokens": groups["tokens"],
        "hg_nodes": change(groups, vanilla, node),
        "hg_inside": inside(groups) / inside(vanilla) - 1,
        "hg_idle": change(groups, vanilla, "idle_share"),
        "hg_deviation": change(groups, vanilla, "deviation"),
        "equal_nodes": change(rows["affinity, equal"], vanilla, node),
        "any_nodes": change(rows["affinity, any size"], vanilla, node),
        "dr_idle": change(weights, groups, "idle_share"),
        "dr_deviation": change(weights, groups, "deviation"),
        "fr_idle": change(fixed, groups, "idle_share"),
        "fr_share": fixed["idle_share"],
        "everywhere_idle": change(rows["fixed count, weights"], groups, "idle_share"),
        "everywhere_share": rows["fixed count, weights"]["idle_share"],
        "hot_deviation": change(rows["fixed count, weights"], groups, "deviation"),
        "partners_deviation": change(rows["collaborative, weights"], groups, "deviation"),
        "wrr_nodes": change(weights, groups, node),
        "wrr_inside": inside(weights) / inside(groups) - 1,
        "tar_nodes": change(locality, weights, node),
        "tar_inside": inside(locality) / inside(weights) - 1,
        "tar_idle": change(locality, weights, "idle_share"),
        "tar_deviation": change(locality, weights, "deviation"),
    }


@job(LAW)
def grace_v2lite(folder: Path) -> Figures:
    return grace(folder, LAW)


@job(OLMOE)
def grace_olmoe(folder: Path) -> Figures:
    return grace(folder, OLMOE)


@job(QWEN)
def grace_qwen3(folder: Path) -> Figures:
    return grace(folder, QWEN)


@job(LAW)
def grace_groups(folder: Path) -> Figures:
    """Load of the groups of each layer over their mean, and the experts that carry half of the heaviest group's."""
    (trace,) = need(folder, LAW)
    seen, _ = bench_grace.halves(trace)
    placement = isoload.place(seen, isoload.Topology(4, 2), placer="grace", replicate=False)
    counts = seen.batch_counts().sum(0)
    over, half = [], []
    for slots, load in zip(placement.arrays[0].reshape(len(counts), 4, -1), counts, strict=True):
        groups = [load[row[row >= 0]] for row in slots]
        sums = np.array([group.sum() for group in groups])
        over.append(sorted(sums / sums.mean(), reverse=True))
        heaviest = np.sort(groups[int(sums.argmax())])[::-1]
        half.append((np.cumsum(heaviest) < heaviest.sum() / 2).sum() + 1)
    median = np.median(over, axis=0)
    five = list(trace.layer_ids).index(5)
    return {
        **{f"group{i}": float(value) for i, value in enumerate(median)},
        "half_in_layer_5": int(half[five]),
        "half_median": float(np.median(half)),
        "experts_median": float(np.median([(row >= 0).sum() for row in placement.arrays[0]]) / 4),
    }


@job(LAW)
def grace_everywhere(folder: Path) -> Figures:
    """Deviation of rank loads as the hottest experts have a replica on every rank: 1 to 64 of 64 experts."""
    (trace,) = need(folder, LAW)
    seen, judged = bench_grace.halves(trace)
    found = {}
    for number in (1, 2, 4, 8, 16, 32, 64):
        placement = isoload.place(seen, isoload.Topology(4, 2), placer="grace", everywhere=number)
        row = bench_grace.figures(judged, placement, "grace:locality=False")
        found[f"d{number}"] = row["deviation"]
    return found


# --- LLEP


@job()
def llep_plans(folder: Path) -> Figures:
    """Section 5.1's 36 settings: the listing and isoload's `llep`, and Equation 4 against plain EP."""
    rows = plan_rows()
    cells = list(by(rows, "shape", "share", "num_hot", last="whose").values())
    found: Figures = {"settings": len(cells)}
    for key, whose in (("listing", LISTING), ("llep", OURS), ("ep", "plain EP")):
        mine = [cell[whose] for cell in cells]
        found[key] = {
            "peak": max(row["peak"] for row in mine),
            "imports": max(row["imports"] for row in mine),
            "imports_least": min(row["imports"] for row in mine),
            "of_a_rank": max(row["imports_of_a_rank"] for row in mine),
            "chunks": max(row.get("chunks_below_m", 0) for row in mine),
        }
    for name, model in (("gpt", "gpt-oss-120b"), ("dsv3", "DeepSeek-V3"), ("kimi", "Kimi-K2")):
        chosen = [
            cell
            for key, cell in by(rows, "shape", "share", "num_hot", last="whose").items()
            if key[0] == model
        ]
        found[name] = {
            "copies": max(cell["plain EP"]["peak"] for cell in chosen),
            "memory": max(cell["plain EP"]["memory"] / cell[OURS]["memory"] for cell in chosen),
            "ep_gb": max(cell["plain EP"]["memory"] for cell in chosen) / 1e9,
            "llep_gb_least": min(cell[OURS]["memory"] for cell in chosen) / 1e9,
            "llep_gb": max(cell[OURS]["memory"] for cell in chosen) / 1e9,
        }
    return found


@job(GPT)
def llep_shares(folder: Path) -> Figures:
    """gpt-oss-20b: the largest share that an expert position and a rank take in any layer, 8 ranks."""
    (trace,) = need(folder, GPT)
    counts = trace.batch_counts()[10:].sum(0)
    share = (counts / counts.sum(-1, keepdims=True)).max(0)
    ranks = counts.reshape(len(counts), 8, 4).sum(-1)
    of_ranks = (ranks / ranks.sum(-1, keepdims=True)).max(0)
    order = np.argsort(-share)
    return {
        "hottest": int(order[0]),
        "share": float(share[order[0]]),
        "e11": float(share[11]),
        "e11_place": int(np.flatnonzero(order == 11)[0]) + 1,
        "rank": int(of_ranks.argmax()),
        "rank_share": float(of_ranks.max()),
        "rank0_share": float(of_ranks[0]),
    }


# --- Libra


def stream_of(folder: Path, name: str) -> Stream:
    return next(stream for stream in streams(folder) if stream.name == name and stream.deal == "even")


def libra_balance(folder: Path, name: str) -> Figures:
    """Mean imbalance of unseen batches on 8 ranks, 8 experts more on each; EPLB has one slot more in every layer."""
    stream = stream_of(folder, name)
    kinds = ("0.8", "path") if stream.per_token else ("0.8",)
    ahead = {kind: forecast for kind, forecast in bench_libra.forecasts(stream).items() if kind in kinds}
    spared, resident = bench_libra.place(stream, 8, "trivial"), bench_libra.place(stream, 1, "eplb")
    found: dict[str, list[list[float]]] = {}
    for index in stream.fold.replay:
        batch = stream.batch(index)
        loads = batch.loads(stream.trace.num_experts)
        plans = {
            "none": isoload.plan(loads, spared, None, "none"),
            "eplb": isoload.plan(loads, resident, None, "dynamic", step=index),
        }
        pairs = [("libra_published", "0.8"), ("libra", "0.8"), ("hedge", "0.8")]
        pairs += [("lina", "path")] * ("path" in ahead)
        for text, kind in pairs:
            policy = bench_libra.policy_of(text)
            filled = planning.fill(ahead[kind].of(batch, index, loads, 0), spared, None, policy)
            plans[text] = isoload.plan(loads, spared, None, policy, filled=filled)
        for text, plan in plans.items():
            found.setdefault(text, []).append(bench_libra.figures(plan, loads, batch)["imbalance"])
    return {text: float(np.mean(values)) for text, values in found.items()}


@job(*FILES[:3])
def libra_v2lite(folder: Path) -> Figures:
    return libra_balance(folder, "DeepSeek-V2-Lite")


@job(GPT)
def libra_gptoss(folder: Path) -> Figures:
    return libra_balance(folder, "gpt-oss-20b")


@job("glm52_domains_a")
def libra_glm52(folder: Path) -> Figures:
    return libra_balance(folder, "GLM-5.2")


@job(*FILES[:3])
def libra_path(folder: Path) -> Figures:
    """Lina's path table: right choices of a token, fitted on all tasks and on other tasks."""
    rows = bench_libra.other_tasks(folder)
    found: Figures = {}
    for key, fitted in (("all", "all"), ("other", "other tasks")):
        values = [row["accuracy"] for row in rows if (row["predictor"], row["fitted"]) == ("path", fitted)]
        found |= {f"{key}_least": min(values), f"{key}_most": max(values)}
    return found


@job()
def libra_lookahead(folder: Path) -> Figures:
    """The next gate run ahead, in a tiny model trained here."""
    return bench_lookahead.judge(0)


@job(*FILES[:3])
def libra_traffic(folder: Path) -> Figures:
    rows = bench_libra.traffic(stream_of(folder, "DeepSeek-V2-Lite"), 0)
    row = next(row for row in rows if (row["policy"], row["spare"]) == ("libra", 8))
    return {"gather_over_all_to_all": row["all_gather_mb"] / row["all_to_all_mb"]}


@job(LAW, GPT, "qwen3_30b_decode_totals")
def libra_models(folder: Path) -> Figures:
    """Imbalance of 8 ranks with experts in order, mean over layers of all batches together."""
    names = {"v2lite": LAW, "gptoss": GPT, "qwen3": "qwen3_30b_decode_totals"}
    found = {}
    for key, name in names.items():
        (trace,) = need(folder, name)
        found[key] = float(np.mean([layer["imbalance"] for layer in inspect_trace(trace, 8)]))
    return found


MENDED = ("perfect", "0.9", "0.8", "0.45", "0.12", "last", "popularity")


@job(*FILES[:3], GPT)
def libra_mended(folder: Path) -> Figures:
    """Algorithm 2 as printed, and where a rank gives no more than its excess, under slots filled by isoload's `libra`:
    settings of two traces and seven forecasts, eight slots, in which the mended one has the lower mean imbalance."""
    lower = higher = settings = 0
    most = 0.0
    for name in ("DeepSeek-V2-Lite", "gpt-oss-20b"):
        stream = stream_of(folder, name)
        spared = bench_libra.place(stream, 8, "trivial")
        ahead = {kind: made for kind, made in bench_libra.forecasts(stream).items() if kind in MENDED}
        for forecast in ahead.values():
            means: dict[bool, list[float]] = {False: [], True: []}
            for index in stream.fold.replay[:4]:
                batch = stream.batch(index)
                loads = batch.loads(stream.trace.num_experts)
                filled = planning.fill(forecast.of(batch, index, loads, 0), spared, None, "libra")
                ranks = spared.topology.num_ranks
                for layer, counts in enumerate(loads.numpy()):
                    slots = filled.slot_to_expert[layer].numpy()
                    homes = spared.arrays[1][layer, : counts.shape[1]].astype(np.int64)
                    one = listing.Layer(
                        counts.astype(np.int64), slots, homes, np.zeros(ranks, np.int64), np.ones(ranks, bool)
                    )
                    for mended in means:
                        means[mended].append(sharded(one, mended) * ranks / counts.sum())
            settings += 1
            gain = float(np.mean(means[False]) - np.mean(means[True]))
            lower, higher, most = lower + (gain > 0), higher + (gain < 0), max(most, gain)
    return {"lower": lower, "higher": higher, "settings": settings, "largest_gain": most}


def sharded(layer: listing.Layer, mended: bool) -> float:
    """The busiest rank's copies after Algorithm 2. mended: line 11 takes no more than the giver's excess, too."""
    resident = layer.first_slots() >= 0
    owner, target = layer.home // layer.size, int(layer.target)
    remote = np.zeros_like(layer.loads)
    remote[owner, np.arange(len(owner))] = np.where(resident, 0, layer.loads).sum(0)
    load = np.where(resident, layer.loads, 0).sum(1) + remote.sum(1)
    moved = True
    while moved and load.max() > target:
        moved = False
        for source in [r for r in np.argsort(-load, kind="stable") if load[r] > target]:
            for expert in np.argsort(-remote[source], kind="stable")[: np.count_nonzero(remote[source])]:
                takers = [r for r in np.flatnonzero(resident[:, expert]) if r != source]
                if not takers or load[taker := min(takers, key=lambda r: load[r])] >= target:
                    continue
                part = min(remote[source, expert], target - load[taker])
                if mended:
                    part = min(part, load[source] - target)
                remote[source, expert] -= part
                remote[taker, expert] += part
                load[source] -= part
                load[taker] += part
                moved = True
                break
    return float(load.max())
