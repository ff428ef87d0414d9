"""The rows of bench_cluster: one question each about several GPUs, with a function that raises where the answer is no.

All ranks run a row together. What a row needs and this machine lacks raises Skipped, on all ranks alike.
"""

from __future__ import annotations

import gc
import os
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import isoload
from isoload.balancing.captured import CapturedBalancer, cuda_graph
from isoload.placement.placed_layers import PlacedLayers
from isoload.transport import CollectiveGroup, CollectiveTransport, Transport
from isoload.transport.deep_ep import DeepEPTransport, installed
from isoload.weights.borrowing import Borrowed
from isoload.weights.experts import ExpertWeights

Figures = dict[str, Any]
EXPERTS_PER_RANK, SPARE, TOP_K = 8, 2, 4
LARGE, SMALL = (4096, 1536, 2048), (32, 16, 64)  # H, I and tokens of a rank: on GPUs, in a dry run
LATE = 70.0  # seconds: more than the 60 after which torch's own barrier would end the CUDA context
TOLERANCE = {torch.bfloat16: 5e-2, torch.float64: 1e-9}


class Skipped(Exception):
    """What this machine lacks."""


@dataclass
class World:
    """The processes: one per GPU, or in a dry run on one CPU. side: a gloo group, for outcomes."""

    rank: int
    ranks: int
    per_node: int
    device: torch.device
    side: Any
    dry: bool

    @classmethod
    def join(cls, dry: bool) -> World:
        torch.set_num_threads(1)
        local = int(os.environ["LOCAL_RANK"])
        if dry:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        else:
            torch.cuda.set_device(local)
        device = torch.device("cpu") if dry else torch.device("cuda", local)
        dist.init_process_group("gloo" if dry else "nccl", timeout=timedelta(minutes=5))
        ranks, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        return cls(dist.get_rank(), ranks, per_node, device, dist.new_group(backend="gloo"), dry)

    @property
    def topology(self) -> isoload.Topology:
        return isoload.Topology(self.ranks, self.per_node)

    @property
    def experts(self) -> int:
        return self.ranks * EXPERTS_PER_RANK

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.dry else torch.bfloat16

    def needs_gpus(self) -> None:
        if self.dry:
            raise Skipped("needs GPUs")

    def wait(self) -> None:
        """Until all ranks are here and their GPUs have done what was asked for."""
        if not self.dry:
            torch.cuda.synchronize()
        dist.barrier(group=self.side)

    def median_us(self, call: Callable[[], Any]) -> float:
        """Of calls that all ranks make together, as often on each."""
        times = []
        for _ in range(5 if self.dry else 30):
            self.wait()
            start = time.perf_counter()
            call()
            if not self.dry:
                torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        return sorted(times[2:])[len(times[2:]) // 2]


# --- a layer and its dense counterpart


@dataclass
class Setup:
    """One layer: skewed routing of rows [T, H] that differ by rank, and the weights of all E experts on every rank."""

    world: World
    rows: Tensor
    dense: ExpertWeights
    router: Tensor

    @classmethod
    def make(cls, world: World) -> Setup:
        hidden, inner, tokens = SMALL if world.dry else LARGE
        draw = torch.Generator().manual_seed(1)
        dense = ExpertWeights.random(world.experts, hidden, inner, generator=draw, dtype=world.dtype)
        router = torch.randn(world.experts, hidden, generator=draw, dtype=torch.float64) / hidden**0.5
        own = torch.Generator().manual_seed(100 + world.rank)
        rows = torch.randn(tokens, hidden, generator=own, dtype=torch.float64).to(world.dtype)
        on_device = ExpertWeights(dense.gate_up.to(world.device), dense.down.to(world.device))
        return cls(world, rows.to(world.device), on_device, router.to(world.device))

    def gate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """ids and weights [T, K]; the first experts are chosen most."""
        skew = torch.linspace(3, 0, len(self.router), dtype=torch.float64, device=rows.device)
        weights, ids = (rows.detach().double() @ self.router.T + skew).softmax(-1).topk(TOP_K)
        return ids, weights.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)

    def layer(self, transport: Transport, policy: str = "llep", **how: Any) -> isoload.MoE:
        borrows = policy in ("llep", "hedge")
        extra = {"min_chunk": 1, "threshold": 1.0} if policy == "llep" else {}
        counts = torch.linspace(2, 1, self.world.experts).expand(1, -1)
        placement = isoload.place(
            counts, self.world.topology, EXPERTS_PER_RANK + (SPARE if borrows else 1),
            placer="trivial" if borrows else "eplb", spare_slots=SPARE if borrows else 0,
        )  # fmt: skip
        return isoload.MoE(self.gate, self.dense, transport, placement, policy=policy, **extra, **how)

    def check(self, layer: nn.Module, backward: bool = True) -> None:
        """Compare outputs and the rows' gradients with the experts one by one, in float32 or float64."""
        mine = self.rows.clone().requires_grad_(backward)
        (output,) = layer([mine])
        if backward:
            output.double().square().sum().backward()
        theirs = self.rows.clone().requires_grad_(backward)
        ids, weights = self.gate(theirs)
        exact = self.rows.double() if self.world.dry else self.rows.float()
        exact = exact.requires_grad_(backward)
        wanted = torch.zeros_like(exact)
        for expert in range(self.world.experts):
            token, column = (ids == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            gate_up, down = (s[expert].to(exact.dtype) for s in (self.dense.gate_up, self.dense.down))
            first, second = (exact[token] @ gate_up.T).chunk(2, dim=-1)
            made = (nn.functional.silu(first) * second) @ down.T
            wanted = wanted.index_add(0, token, made * weights[token, column, None].to(exact.dtype))
        close("outputs", output, wanted, self.world.dtype)
        if backward:
            wanted.double().square().sum().backward()
            assert mine.grad is not None and exact.grad is not None
            close("gradients of rows", mine.grad, exact.grad, self.world.dtype)


def close(what: str, got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    got, wanted = got.detach(), wanted.detach()
    error = float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30))
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(f"{what} differ by {error:.3g} of the largest")


def same(what: str, got: Tensor, wanted: Tensor) -> None:
    if not torch.equal(got, wanted):
        raise AssertionError(
            f"{what} must be {wanted.flatten()[:4].tolist()} ..., got {got.flatten()[:4].tolist()} ..."
        )


# --- the rows


def machines(world: World) -> Figures:
    """Which hosts, GPUs and library versions take part; two ranks must not share a GPU."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    uuid = "" if world.dry else str(torch.cuda.get_device_properties(world.device).uuid)
    own = {
        "host": socket.gethostname(),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "gpu": uuid,
    }
    found: list[Any] = [None] * world.ranks
    dist.all_gather_object(found, own, group=world.side)
    if not world.dry and len({(of["boot"], of["gpu"]) for of in found}) < world.ranks:
        raise AssertionError(f"each rank must have a GPU of its own, got {[of['gpu'] for of in found]}")
    return {"hosts": len({of["boot"] for of in found}), "names": sorted({of["host"] for of in found})}


def gather(world: World) -> Figures:
    """The eager gather of loads."""
    group = CollectiveGroup(world.topology)
    own = torch.arange(257, dtype=torch.int32, device=world.device) + 1000 * world.rank
    wanted = torch.stack([own - 1000 * world.rank + 1000 * rank for rank in range(world.ranks)])
    same("gathered loads", group.gather("count", [own]), wanted)
    return {"us": world.median_us(lambda: group.gather("count", [own]))}


def graph_gather(world: World) -> Figures:
    """An NCCL gather that is captured and replayed by all ranks."""
    world.needs_gpus()
    own = torch.zeros(257, dtype=torch.int32, device=world.device)
    whole = own.new_empty(world.ranks * 257)
    dist.all_gather_into_tensor(whole, own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_gather_into_tensor(whole, own)
    for number in range(3):
        own.fill_(10 * number + world.rank)
        graph.replay()
        ranks = torch.arange(world.ranks, dtype=torch.int32, device=world.device)
        same("gathered", whole.view(world.ranks, -1)[:, 0], 10 * number + ranks)
    return {"us": world.median_us(graph.replay)}


def by_calling(call: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """In place of a CUDA graph in a dry run: a replay makes the call again."""
    result = call()

    def replay() -> None:
        for old, new in zip(result, call(), strict=True):
            old.copy_(new)

    return replay, result


def failing(call: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    raise RuntimeError("no graph on this rank")


def balancers(world: World, fails: bool = False) -> tuple[Tensor, CapturedBalancer, isoload.Balancer]:
    """ids [T, K] of this rank, a Balancer by a CUDA graph and one without. fails: the last rank's capture fails."""
    setup = Setup.make(world)
    placement = isoload.place(
        torch.linspace(2, 1, world.experts).expand(1, -1), world.topology, EXPERTS_PER_RANK + 1
    )
    by_graph, eager = (
        isoload.Balancer(placement, 0, "exact", group=CollectiveGroup(world.topology)) for _ in range(2)
    )
    ids, _ = setup.gate(setup.rows)
    capture = by_calling if world.dry else cuda_graph
    if fails and world.rank == world.ranks - 1:
        capture = failing
    return ids, CapturedBalancer(by_graph, len(ids), TOP_K, device=world.device, capture=capture), eager


def alike(number: int, by_graph: CapturedBalancer, eager: isoload.Balancer, ids: Tensor) -> None:
    one, other = by_graph(ids), eager(ids)
    assert isinstance(one, Tensor) and isinstance(other, Tensor)
    same(f"slots of batch {number}", one, other)


def captured(world: World) -> Figures:
    """Plans and routes by a CUDA graph: the eager Balancer's slots, batch after batch."""
    ids, by_graph, eager = balancers(world)
    for number in range(6):
        alike(number, by_graph, eager, ids.roll(number, 0)[: len(ids) - number * world.rank])
    eager_us = world.median_us(lambda: eager(ids))
    return {"us": world.median_us(lambda: by_graph(ids)), "eager_us": eager_us}


def captured_recorder(world: World) -> Figures:
    """One rank changes its recorder while the others replay: slots and counts stay right."""
    ids, by_graph, eager = balancers(world)
    recorder = isoload.Recorder(1, world.experts, device=world.device)
    for number in range(6):
        if number == 3 and world.rank == world.ranks - 1:
            by_graph.balancer.recorder = recorder
        alike(number, by_graph, eager, ids)
        if by_graph.balancer.recorder is recorder:
            recorder.step()
    if world.dry:  # there a replay calls the recorder, too
        return {}
    if world.rank == world.ranks - 1 and int(recorder.trace().batch_counts().sum()) != 3 * ids.numel():
        raise AssertionError("the recorder must have counted three batches")
    return {}


def captured_failed_capture(world: World) -> Figures:
    """A capture fails on one rank: all ranks run eagerly, with the same slots."""
    world.needs_gpus()  # what stands for a capture in a dry run exchanges
    ids, by_graph, eager = balancers(world, fails=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            alike(number, by_graph, eager, ids)
    if not any("runs eagerly" in str(of.message) for of in caught):
        raise AssertionError("each rank must warn that it runs eagerly")
    return {}


def captured_error(world: World) -> Figures:
    """One rank's call fails while the others replay: all ranks raise, and the next batch is right."""
    ids, by_graph, eager = balancers(world)
    for number in range(4):
        alike(number, by_graph, eager, ids)
    message = ""
    try:
        by_graph(ids.float() if world.rank == world.ranks - 1 else ids)
        by_graph.balancer.group.check()
    except (ValueError, RuntimeError) as error:
        message = str(error)
    if not agreed(world, message):
        raise AssertionError("a call with topk_ids of a wrong dtype must raise on all ranks, got slots")
    alike(4, by_graph, eager, ids)
    return {"message": message[:200]}


def agreed(world: World, text: str) -> str:
    """What all ranks say; raises unless all or none say something."""
    found: list[Any] = [None] * world.ranks
    dist.all_gather_object(found, text, group=world.side)
    if any(found) != all(found):
        raise AssertionError(f"all ranks must be refused or none, got {found}")
    return found[0] or ""


def peers(world: World) -> Figures:
    """Whether ranks read each other's memory, and whether it is the memory of the rank that they ask for."""
    world.needs_gpus()
    reached = CollectiveGroup(world.topology).peers(world.device)
    if isinstance(reached, str):
        return {"borrow": "all_to_all", "reason": reached}
    own = reached.new((4,), torch.int64, world.device)
    own.fill_(1 + world.rank)
    reached.meet()
    read = torch.stack([part[0] for part in reached.reach([own])])
    reached.meet()
    same("words of the peers", read, torch.arange(1, world.ranks + 1, device=world.device))
    return {"outcome": "right words of all ranks"}


def late(world: World) -> Figures:
    """A rank that comes to a barrier of peers' memory after 70 s: the others wait, as in any collective."""
    world.needs_gpus()
    reached = CollectiveGroup(world.topology).peers(world.device)
    if isinstance(reached, str):
        raise Skipped(reached)
    if world.rank == world.ranks - 1:
        time.sleep(LATE)
    reached.meet()
    torch.cuda.synchronize()
    return {"outcome": f"waited {LATE:g} s"}


def borrow(world: World, backend: str) -> Figures:
    """Experts borrowed for one batch, and their gradients, against the dense layer."""
    transport = CollectiveTransport(world.topology)
    setup = Setup.make(world)
    try:
        layer = setup.layer(transport, borrow=backend)
    except ValueError as error:
        if "cannot read each other's memory" in str(error):
            raise Skipped(str(error)) from None
        raise
    setup.check(layer)
    assert layer.borrowing is not None
    filled: list[PlacedLayers] = []
    bring = layer.borrowing.borrow

    def noted(slots: PlacedLayers, **how: Any) -> Borrowed | None:
        filled.append(slots)
        return bring(slots, **how)

    with torch.no_grad(), patch.object(layer.borrowing, "borrow", noted):
        us = world.median_us(lambda: layer([setup.rows]))

    def alone() -> None:
        if (borrowed := bring(filled[-1])) is not None:
            borrowed.wait()

    with torch.no_grad():
        alone_us = world.median_us(alone)
    mine = filled[-1].slot_to_expert.view(world.ranks, -1)[world.rank, -SPARE:]
    size = sum(of[0].nbytes for of in (setup.dense.gate_up, setup.dense.down))
    arrived = int((mine >= 0).sum()) * size
    rate = {"gb_per_s": arrived / alone_us / 1e3} if arrived else {}
    most: list[Any] = [None] * world.ranks
    dist.all_gather_object(most, (arrived, rate.get("gb_per_s")), group=world.side)
    if not any(imports for imports, _ in most):
        raise AssertionError("the batch must borrow experts, got none")
    slowest = min(of for imports, of in most if imports)
    return {"us": us, "alone_us": alone_us, "gb_per_s": slowest, "mb": max(most)[0] / 1e6}


def two_streams(world: World) -> Figures:
    """Two layers whose backwards run on two streams: gradients as on one stream."""
    world.needs_gpus()
    setup, transport = Setup.make(world), CollectiveTransport(world.topology)
    layers = [setup.layer(transport) for _ in range(2)]

    def gradients(streams: list[torch.cuda.Stream]) -> list[Tensor]:
        losses, grads = [], []
        for layer in layers:
            layer.zero_grad()
            (output,) = layer([setup.rows])
            losses.append(output.float().square().sum())
        torch.cuda.synchronize()
        for loss, stream in zip(losses, streams, strict=True):
            with torch.cuda.stream(stream):
                loss.backward()
        torch.cuda.synchronize()
        for layer in layers:
            grads += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        return grads

    current = torch.cuda.current_stream()
    one = gradients([current, current])
    two = gradients([torch.cuda.Stream(), torch.cuda.Stream()])
    for first, second in zip(one, two, strict=True):
        close("gradients", second, first, world.dtype)
    return {"outcome": f"{len(one)} gradients alike"}


def memory(world: World) -> Figures:
    """A layer that is made and deleted again and again: its memory comes back, that of peers too."""
    setup, transport = Setup.make(world), CollectiveTransport(world.topology)
    used = []
    for _ in range(4):
        layer = setup.layer(transport)
        with torch.no_grad():
            layer([setup.rows])
        world.wait()
        del layer
        gc.collect()
        if not world.dry:
            torch.cuda.empty_cache()
            free, whole = torch.cuda.mem_get_info()
            used.append(whole - free)
        world.wait()
    if used and used[-1] > used[1] + 2**20:
        raise AssertionError(f"memory in use must stay, got {[round(of / 2**20) for of in used]} MiB")
    return {"mib": round(used[-1] / 2**20) if used else None}


def writes(world: World) -> Figures:
    """Weights that change right after a batch which others may still read: every batch has its own."""
    setup, transport = Setup.make(world), CollectiveTransport(world.topology)
    layer = setup.layer(transport)
    with torch.no_grad():
        (first,) = layer([setup.rows])
        for number in range(8):
            if not world.dry and world.rank == number % world.ranks:
                torch.cuda._sleep(20_000_000)  # this rank reads late
            (output,) = layer([setup.rows])
            close(f"outputs of batch {number}", output, 2.0 ** (-number) * first, world.dtype)
            layer.load_state_dict(
                {k: v / 2 if k.endswith("down") else v for k, v in layer.state_dict().items()}
            )
    return {"outcome": "8 loads of weights"}


def layer(world: World, policy: str) -> Figures:
    """The layer over torch.distributed, forward and backward, against the dense layer."""
    setup, transport = Setup.make(world), CollectiveTransport(world.topology)
    made = setup.layer(transport, policy)
    setup.check(made)
    with torch.no_grad():
        return {"us": world.median_us(lambda: made([setup.rows]))}


def deep_ep(world: World, kind: str, low_latency: bool = False) -> Figures:
    """The layer with its rows by DeepEP, against the dense layer."""
    world.needs_gpus()
    if not any(kind in package.buffers for package in installed()):
        raise Skipped(f"DeepEP's {kind} is not installed")
    setup = Setup.make(world)
    tokens, hidden = setup.rows.shape
    if low_latency:
        setup.rows = setup.rows[:64]
        tokens = 64
    transport = DeepEPTransport(
        world.topology, hidden=hidden, top_k=TOP_K, slots_per_rank=EXPERTS_PER_RANK + 1, max_tokens_per_rank=tokens,
        kind=None if low_latency else kind, low_latency=low_latency,
    )  # fmt: skip
    made = setup.layer(transport, "exact")
    with torch.no_grad():
        setup.check(made, backward=False)
        us = world.median_us(lambda: made([setup.rows]))
    if not low_latency:
        setup.check(made)
    return {"us": us}


@dataclass(frozen=True)
class Row:
    question: str
    run: Callable[[World], Figures]
    limit: float | None = None  # seconds, where the default is too short


def row(function: Callable[..., Figures], limit: float | None = None, **how: Any) -> Row:
    question = (function.__doc__ or "").partition("\n")[0]
    return Row(question, partial(function, **how), limit)


ROWS: dict[str, Row] = {
    "machines": row(machines),
    "gather": row(gather),
    "graph_gather": row(graph_gather),
    "captured": row(captured),
    "captured_recorder": row(captured_recorder),
    "captured_failed_capture": row(captured_failed_capture),
    "captured_error": row(captured_error),
    "peers": row(peers),
    "late": row(late, limit=LATE + 50),
    **{f"borrow_{name}": row(borrow, backend=name) for name in ("pull", "copy", "all_to_all")},
    "two_streams": row(two_streams),
    "memory": row(memory),
    "writes": row(writes),
    **{f"layer_{name}": row(layer, policy=name) for name in ("none", "exact", "llep")},
    **{f"deep_ep_{kind}": row(deep_ep, kind=kind) for kind in ("EPBuffer", "ElasticBuffer", "Buffer")},
    "deep_ep_low_latency": row(deep_ep, kind="Buffer", low_latency=True),
}
