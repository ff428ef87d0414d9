"""What train_tiny.py measures, prints and saves.

Of every policy: rows, copies, borrowed weights and memory. Of the last model: its routing, and how accurately that is
predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from isoload import MoE
from isoload.balancing.prediction import Lookahead
from isoload.layer.routers import Routing
from isoload.traces import count_batches

BORROW_STAGES = ("borrow", "borrow backward", "borrowed gradients")


@dataclass
class Meter:
    """A forward hook of MoE layers: what every call sent where; an entry per step and layer.

    rows      [R] int64  rows that the ranks received from this one
    copies    [R] int64  copies that the ranks computed for all
    borrowed             experts that spare slots were filled with, over all ranks
    """

    rows: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    borrowed: list[int] = field(default_factory=list)

    def __call__(self, layer: MoE, *_: Any) -> None:
        plan, traffic = layer.last_plan, layer.transport.group.traffic
        assert plan is not None and plan.quota is not None
        self.rows.append(traffic.rows[layer.transport.group.ranks[0]] - sum(self.rows))
        self.copies.append(plan.quota.view(len(traffic.rows), -1).sum(1))
        self.borrowed.append(int((plan.slot_to_expert != plan.placed.resident.slot_to_expert).sum()))


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most memory that a call held at a time beyond what was there before, from the CPU allocator's own reports."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = recorded.profiler.kineto_results.events()
    reports = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate((size for _, size in reports), initial=0))


@dataclass(frozen=True)
class Run:
    """One policy's training, the same on all ranks.

    losses    [steps]                 means over all ranks' tokens
    rows      [steps * L, R] int64    received by every rank
    copies    [steps * L, R] int64    computed by every rank
    borrowed  [steps * L]             experts borrowed, over all ranks
    sent                              bytes by stage, of all ranks and steps
    peak                              bytes of the rank that needed most in the last step
    """

    losses: list[float]
    rows: Tensor
    copies: Tensor
    borrowed: list[int]
    sent: Counter[str]
    peak: int

    @classmethod
    def gather(cls, losses: list[float], meter: Meter, sent: Counter[str], peak: int) -> Run:
        """Brings what the ranks measured together. All ranks call it."""
        dist.all_reduce(rows := torch.stack(meter.rows))
        given: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(given, (sent, peak))
        of_ranks, peaks = zip(*given, strict=True)
        copies = torch.stack(meter.copies)
        return cls(losses, rows, copies, meter.borrowed, sum(of_ranks, Counter()), max(peaks))


def largest_difference(runs: Sequence[Run]) -> float:
    """Between the loss curves, at any step."""
    return float(np.ptp([run.losses for run in runs], axis=0).max())


def imbalance(copies: Tensor) -> Tensor:
    """[N] max/mean of copies [N, R]."""
    return copies.amax(1) / copies.double().mean(1)


def report(runs: dict[str, Run], title: str, before: str) -> None:
    """The policies side by side. before: what has its memory before a step."""
    table = Table("mean per step and layer", title=title, title_justify="left", caption_justify="left")
    table.caption = f"Borrowed experts, kB: over all ranks. Peak: of the last step, beyond {before}."
    for policy in runs:
        table.add_column(policy, justify="right")

    def row(name: str, cell: Callable[[Run], str]) -> None:
        table.add_row(name, *map(cell, runs.values()))

    steps = len(next(iter(runs.values())).losses)
    for number in sorted({0, steps // 4, steps // 2, steps - 1}):
        row(f"loss of step {number}", lambda run, n=number: f"{run.losses[n]:.9f}")
    row("rows, busiest rank", lambda run: f"{run.rows.amax(1).double().mean():.1f}")
    row("copies, busiest rank", lambda run: f"{run.copies.amax(1).double().mean():.1f}")
    row("copies, max/mean rank", lambda run: f"{imbalance(run.copies).mean():.3f}")
    row("experts borrowed", lambda run: f"{np.mean(run.borrowed):.2f}")
    for stage in BORROW_STAGES:
        row(f"kB of {stage}", lambda run, s=stage: f"{run.sent[s] / len(run.borrowed) / 1e3:.1f}")
    row("peak MB, worst rank", lambda run: f"{run.peak / 1e6:.2f}")
    Console(width=110, highlight=False).print(table)


def print_bars(runs: dict[str, Run], width: int = 50) -> None:
    """The picture: copies of every rank, per step and layer, under each policy; the mean is at the bar's mark."""
    most = max(float(run.copies.double().mean(0).max()) for run in runs.values())
    for policy, run in runs.items():
        mean = run.copies.double().mean(0)
        mark = round(width * float(mean.mean()) / most)
        print(f"copies of each rank under {policy}")
        for rank, copies in enumerate(mean.tolist()):
            bar = "█" * round(width * copies / most)
            print(f"  rank {rank} {bar.ljust(mark)[:mark]}|{bar[mark:]} {copies:.0f}")


def gates_of(model: nn.Module) -> list[nn.Module]:
    return [layer.gate for layer in model.modules() if isinstance(layer, MoE)]


def run_hooked(model: nn.Module, batches: Sequence[Tensor], hooks: Sequence[RemovableHandle]) -> None:
    """Runs the model on batches [B, T], then removes the hooks."""
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for hook in hooks:
        hook.remove()


def prediction_accuracy(
    model: nn.Module, norms: Sequence[nn.Module], batches: Sequence[Tensor], num_experts: int
) -> dict[str, float]:
    """Part of the tokens' true choices among the K predicted, over all ranks, a mean over layers 1, 2, ..

    lookahead    the layer's own gate, on its own norm of the residual before the previous layer's norm
    popularity   the top-k experts that the layer's tokens chose most often in earlier batches, the lowest of equals

    The first batch has no earlier ones and is not scored. All ranks call it, with batches [B, T] of equal size.

    Args:
        norms: of every MoE layer the module that makes its rows from the residual.
    """
    gates = gates_of(model)
    given: list[Tensor] = []  # residuals [B * T, H], batch by batch, layer by layer
    made: list[Tensor] = []  # choices [B * T, K], likewise
    hooks = [norm.register_forward_pre_hook(lambda _, x: given.append(x[0].flatten(0, -2))) for norm in norms]
    hooks += [gate.register_forward_hook(lambda _, __, y: made.append(y.topk_ids)) for gate in gates]
    run_hooked(model, batches, hooks)
    residuals, chosen = (torch.stack(part).unflatten(0, (-1, len(gates))) for part in (given, made))

    dist.all_reduce(counts := F.one_hot(chosen, num_experts).sum((2, 3)))  # [batches, L, E]
    order = counts.cumsum(0)[:-1].argsort(dim=-1, descending=True, stable=True)
    popular = order[:, 1:, None, : chosen.shape[-1]]  # [batches - 1, L - 1, 1, K]
    lookahead = Lookahead(gates, norms)
    ahead = [[lookahead.choose(i + 1, x) for i, x in enumerate(batch[:-1])] for batch in residuals[1:]]
    foreseen = torch.stack([torch.stack(batch) for batch in ahead])  # [batches - 1, L - 1, B * T, K]

    scored = chosen[1:, 1:, :, :, None]
    hits = torch.stack([(scored == ids[..., None, :]).any(-1).sum() for ids in (foreseen, popular)])
    dist.all_reduce(hits)
    found = hits.double() / (scored.numel() * dist.get_world_size())
    return dict(zip(("lookahead", "popularity"), found.tolist(), strict=True))


def save_routing(path: Path, model: nn.Module, batches: Sequence[Tensor], num_experts: int) -> None:
    """Rank 0 writes what the routers see and choose on batches [B, T] of every rank, an .npz. All ranks call it.

    hidden [tokens, L, H]    the routers' input rows            gate [L, E, H]   the routers' weights
    topk_ids [tokens, L, K]  their choices, best first          source_rank, seq_id [tokens]
    counts [batches, L, E]   copies of every expert             tokens_per_batch [batches]

    Tokens are in order of batch, source rank, sequence, position. isoload.read_trace and `isoload inspect` read it.
    """
    seen: list[list[Tensor]] = []  # rows and choices [B * T, F], batch by batch, layer by layer

    def see(_: nn.Module, given: tuple[Tensor], routing: Routing) -> None:
        seen.append([given[0], routing.topk_ids])

    gates = gates_of(model)
    run_hooked(model, batches, [gate.register_forward_hook(see) for gate in gates])
    mine = [torch.stack(part).unflatten(0, (-1, len(gates))).numpy() for part in zip(*seen, strict=True)]
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, mine)
    if dist.get_rank():
        return
    # [R] of [batches, L, B * T, F] -> [batches, R, B * T, L, F] -> [tokens, L, F]
    parts = [np.stack(of_ranks, axis=1).swapaxes(2, 3) for of_ranks in zip(*given, strict=True)]
    hidden, topk_ids = (part.reshape(-1, *part.shape[3:]) for part in parts)
    batch, source, _ = np.indices(parts[0].shape[:3]).reshape(3, -1)  # of every token
    tokens_per_batch = np.bincount(batch)
    np.savez_compressed(
        path,
        hidden=hidden,
        topk_ids=topk_ids,
        counts=count_batches(topk_ids, tokens_per_batch, num_experts),
        tokens_per_batch=tokens_per_batch,
        seq_id=np.arange(len(hidden)) // batches[0].shape[1],
        source_rank=source,
        gate=np.stack([gate.weight.detach().numpy() for gate in gates]),
    )
