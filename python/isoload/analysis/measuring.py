"""Time a rank's experts, the group's exchanges and its plans on this machine, and fit the constants of isoload.times.

Every rank measures at the same time, as ranks run when they serve. Times are medians; of an exchange, the slowest
rank's. The fit is robust least squares and needs SciPy; bench/fit_times.py fits public measurements with it.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor

import isoload
from isoload.analysis.models import Model
from isoload.balancing.balancer import Balancer
from isoload.balancing.own_counts import Loads
from isoload.placers import place
from isoload.times.exchanges import STEPS, AllToAllTime, Curve
from isoload.times.experts import ExpertTime, kernel_us
from isoload.times.file import Times, gpu_uuid
from isoload.topology import Topology
from isoload.transport import CollectiveTransport, LocalTransport, Transport
from isoload.transport.deep_ep import DeepEPDispatcher, DeepEPTransport, installed
from isoload.weights.compute import run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Progress = Callable[[int, int], None]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
COPIES = (1, 4, 16, 64, 256, 1024, 4096)  # of each slot with copies
TOKENS = (1, 8, 64, 256, 1024, 4096)  # of each rank in an exchange
PLAN_TOKENS = 256  # of each rank while plans are timed
SLOW_SECONDS = 1.0  # larger points of a series that reached this time are skipped
SAMPLE_SECONDS = 0.15  # for the samples of a point
DEEP_EP_DEVICES = ("cuda",)  # on which DeepEP is tried
GPU_COPY_US = 0.05  # a copy of a large expert on a GPU, the scale of the fit's bounds


def isoload_experts(rows: Tensor, slots: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the experts as :class:`isoload.MoE` does, [N, H]: the default kernel, and the interface of any other.

    Args:
        rows: [N, H] the tokens that a rank received.
        slots, weights: [N, K] int32 local slots, -1 = none, and their float32 gate weights.
        gate_up, down: [S, 2I, H] and [S, H, I].
    """
    return run_experts(rows, slots, weights, [ExpertWeights(gate_up, down)], SwiGLU())


@dataclass(frozen=True)
class Machine:
    """What is measured, and on which device."""

    model: Model
    device: torch.device
    transport: Transport
    kernel: Kernel
    kernel_name: str
    slots: int  # of a rank, whose weights are allocated while experts are timed
    most_copies: int  # limit of a rank in one point

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.model.dtype]

    @property
    def topology(self) -> Topology:
        return self.transport.group.topology

    @property
    def experts_per_rank(self) -> int:
        return -(-self.model.experts // self.topology.num_ranks)

    def weights(self) -> ExpertWeights:
        draw = torch.Generator(self.device).manual_seed(0)
        shape = self.slots, self.model.hidden, self.model.intermediate
        return ExpertWeights.random(*shape, generator=draw, dtype=self.dtype, device=self.device)


class Point(NamedTuple):
    """A measured call of the experts' kernel."""

    loads: np.ndarray[Any, np.dtype[np.int64]]  # [S] copies of each slot
    rows: int
    us: float
    held_out: bool


class Exchange(NamedTuple):
    """Whose dispatch and combine are timed, its name in the times file, and DeepEP's version or why it is not timed."""

    transport: Transport
    kernel: str
    deep_ep: str


def make_machine(
    model: Model,
    memory: float,
    ranks_per_node: int = 0,
    kernel: Kernel = isoload_experts,
    kernel_name: str = "isoload",
) -> Machine:
    """Return what to measure on this process's device, over the default process group if any; memory: bytes."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    topology = Topology(ranks, ranks_per_node)
    transport = CollectiveTransport(topology) if ranks > 1 else LocalTransport(topology)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    with transport.group.agreeing("the choice of what to measure") as facts:
        facts["device"] = device_name(device)
        facts["model"], facts["kernel"] = model, kernel_name
        if model.dtype not in DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(DTYPES)}, which isoload measure can make weights of, "
                f"got {model.dtype}"
            )
        facts["slots"] = slots = min(-(-model.experts // ranks), int(memory / 2 // model.expert_bytes))
        if slots < 1:
            raise ValueError(
                f"memory must hold two experts of {model.name}, {2 * model.expert_bytes / 2**30:.2f} GiB, got "
                f"{memory / 2**30:.2f} GiB"
            )
    row_bytes = (3 * model.hidden + 3 * model.intermediate) * DTYPES[model.dtype].itemsize
    max_copies = min(int(memory / 2 // row_bytes), 2**20)
    return Machine(model, device, transport, kernel, kernel_name, slots, max(max_copies, 1))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def measure(machine: Machine, on_point: Progress = lambda done, total: None) -> Times:
    """Measure and fit everything; all ranks call it together and get the same result, or all raise."""
    group, ranks = machine.transport.group, machine.topology.num_ranks
    designs = list(expert_designs(machine))
    exchanges = [tokens for tokens in TOKENS if tokens * machine.model.top_k <= machine.most_copies]
    exchanges = exchanges if ranks > 1 else []
    total, done = len(designs) + len(exchanges) + 3, 0

    def step() -> None:
        nonlocal done
        done += 1
        on_point(done, total)

    points: list[Point] = []
    with group.agreeing("the experts' times"):
        points = list(time_experts(machine, designs, step))
        experts = fit_experts(machine, points)
    typical = float(np.median([point.us for point in points]))
    all_us = group.gather_objects("the ranks' speeds", typical)
    speeds = tuple(round(max(all_us) / us, 4) for us in all_us)
    gpus = tuple(filter(None, group.gather_objects("the ranks' GPUs", gpu_uuid(machine.device))))
    exchange = choose_exchange(machine, max(exchanges, default=0))
    exchange_points = [
        [float(tokens), *time_exchange(machine, exchange.transport, tokens, step)] for tokens in exchanges
    ]
    steps = fit_exchanges(machine, exchange.kernel, exchange_points)
    move_us = time_move(machine) if ranks > 1 else None
    step()
    plan_us = dict(time_plans(machine, step))
    on_gpu = machine.device.type == "cuda"
    software = {
        "torch": torch.__version__,
        "isoload": isoload.__version__,
        "driver": f"CUDA {torch.version.cuda}" if on_gpu else platform.platform(),
        "date": datetime.date.today().isoformat(),
    } | ({"deep_ep": exchange.deep_ep} if exchanges else {})
    raw = {
        "experts": [[point.us, point.rows, float(point.held_out), *point.loads.tolist()] for point in points],
        "exchange": exchange_points,
    }
    device = device_name(machine.device), software, ranks, machine.topology.num_nodes
    return Times(*device, experts, *steps, move_us, plan_us, speeds, raw, gpus)


def expert_designs(machine: Machine) -> Iterator[tuple[list[int], int, bool]]:
    """Yield loads of the slots, local copies of each row, and whether the point is held out of the fit.

    Even points have the same copies in some of the slots. Held-out ones have all slots, with shares that fall.
    """
    slots, max_copies = machine.slots, machine.most_copies
    few = sorted({1, max(slots // 4, 1), slots})
    for per_row in sorted({1, min(machine.model.top_k, slots)}):
        for active in few:
            for copies in COPIES:
                if active >= per_row and active * copies <= max_copies:
                    yield [copies] * active + [0] * (slots - active), per_row, False
    for copies in COPIES[2:]:
        for power in (0.5, 1.2):
            shares = np.arange(1, slots + 1) ** -power
            loads = np.floor(shares / shares.sum() * copies * slots).astype(int).tolist()
            if slots > 1 and sum(loads) and copies * slots <= max_copies:
                yield loads, 1, True


def time_experts(
    machine: Machine, designs: Sequence[tuple[list[int], int, bool]], step: Callable[[], None]
) -> Iterator[Point]:
    """Time the kernel on each design; larger points of a series that has become slow are skipped."""
    draw = torch.Generator(machine.device).manual_seed(0)
    model, weights = machine.model, machine.weights()
    slow: dict[tuple[int, int, bool], int] = {}
    for loads, per_row, held_out in designs:
        series = sum(copies > 0 for copies in loads), per_row, held_out
        if sum(loads) >= slow.get(series, sum(loads) + 1):
            step()
            continue
        ids = local_slots(loads, per_row).to(machine.device)
        rows = torch.randn(len(ids), model.hidden, generator=draw, device=machine.device, dtype=machine.dtype)
        gates = torch.full(ids.shape, 1 / per_row, device=machine.device)

        def call(rows: Tensor = rows, ids: Tensor = ids, gates: Tensor = gates) -> Tensor:
            return machine.kernel(rows, ids, gates, weights.gate_up, weights.down)

        with torch.no_grad():
            _check_rows(call(), rows, machine.kernel_name)
            us = median_us(call, machine.device)
        if us > SLOW_SECONDS * 1e6:
            slow[series] = sum(loads)
        step()
        yield Point(np.array(loads), len(ids), us, held_out)


def local_slots(loads: Sequence[int], per_row: int) -> Tensor:
    """Return [N, K] int32 slots of N rows whose copies have these loads, -1 = none; no row has a slot twice."""
    ids = torch.repeat_interleave(torch.arange(len(loads), dtype=torch.int32), torch.tensor(loads))
    rows = max(-(-len(ids) // per_row), max(loads))
    columns = -(-len(ids) // rows)
    padded = torch.full((rows * columns,), -1, dtype=torch.int32)
    padded[: len(ids)] = ids
    return padded.view(columns, rows).t().contiguous()


def _check_rows(result: object, rows: Tensor, kernel: str) -> None:
    if not isinstance(result, Tensor) or result.shape != rows.shape:
        got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"kernel {kernel} must return {list(rows.shape)}, a row for each row that it is given, got {got}"
        )
    if not bool(result.isfinite().all()):
        raise ValueError(
            f"kernel {kernel} must return finite values, got some that are infinite or not numbers"
        )


def median_us(call: Callable[[], object], device: torch.device, seconds: float = SAMPLE_SECONDS) -> float:
    """Return the median of a call's microseconds of wall time, after two warm-up calls."""
    call(), call()
    wait, samples = _waiter(device), list[float]()
    wait()
    end = time.perf_counter() + seconds
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 1000):
        start = time.perf_counter_ns()
        call()
        wait()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    return float(np.median(samples))


def _waiter(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def fit_experts(machine: Machine, points: Sequence[Point]) -> ExpertTime:
    """Fit the five constants to the even points, and compare them with the held-out ones."""

    even = [point for point in points if not point.held_out]
    copies = [int(point.loads.sum()) for point in even]
    rows, us = (np.array([getattr(point, name) for point in even], np.float64) for name in ("rows", "us"))
    slower = max(float(np.min(us / np.maximum(copies, 1))) / GPU_COPY_US, 1.0)
    (a, b, c, rho, p), errors = fit_kernel([point.loads for point in even], rows, us, tile=1, slower=slower)
    model, fit_error = machine.model, float(np.abs(errors).mean())
    kind = device_name(machine.device), machine.kernel_name, model.dtype, model.hidden, model.intermediate
    limits = 1, min(copies), max(copies), fit_error
    experts = ExpertTime(*kind, a, b, c, rho, p, *limits, source="isoload measure")
    skewed = [point for point in points if point.held_out]
    if not skewed:
        return experts
    wrong = [abs(1e6 * float(experts.seconds(point.loads, point.rows)) / point.us - 1) for point in skewed]
    return replace(experts, held_out_error=float(np.median(wrong)))


def choose_exchange(machine: Machine, max_tokens: int) -> Exchange:
    """Return DeepEP's exchange if the ranks are on GPUs and DeepEP moves a batch on every rank, else isoload's own."""
    group, model = machine.transport.group, machine.model
    fallback = Exchange(machine.transport, "isoload", "")
    if not max_tokens:
        return fallback
    reason, transport = "", fallback.transport
    if machine.device.type not in DEEP_EP_DEVICES:
        reason = f"the ranks are on {machine.device.type}"
    elif machine.dtype != torch.bfloat16:
        reason = f"it sends rows of bfloat16, and --dtype is {model.dtype}"
    else:
        try:
            transport = DeepEPTransport(
                machine.topology,
                hidden=model.hidden,
                top_k=model.top_k,
                slots_per_rank=machine.experts_per_rank,
                max_tokens_per_rank=max_tokens,
            )
            exchange_times(machine, transport, 1, 1)  # its kernels are compiled in the first call
        except Exception as error:  # DeepEP asserts, and fails in the compiler and in the driver
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    reasons = group.gather_objects("the start of DeepEP", reason)
    if any(reasons):
        # The other ranks quote the error of the rank where DeepEP failed, so that its own text is the shortest.
        reason = min(filter(None, reasons), key=len)
        rank = "" if len(set(reasons)) == 1 else f"rank {reasons.index(reason)}: "
        return fallback._replace(deep_ep=f"not timed: {rank}{reason}")
    assert isinstance(transport.dispatcher, DeepEPDispatcher)
    kind = transport.dispatcher.wire.kind
    versions = [str(package) for package in installed() if kind in package.buffers]
    return Exchange(transport, "deep_ep", f"{kind} of {versions[0]}")


def time_exchange(
    machine: Machine, transport: Transport, tokens: int, step: Callable[[], None]
) -> tuple[float, float]:
    """Return the microseconds of dispatch and of combine with `tokens` tokens of each rank, evenly routed.

    Dispatch ends on the slowest rank; combine begins when the last rank has computed its experts.
    """
    samples = exchange_times(machine, transport, tokens, 8 + 2)
    all_samples = machine.transport.group.gather_objects("the exchanges' times", samples[2:])
    step()
    dispatched, computed, combined = np.max(all_samples, axis=0).T / 1e3
    return float(np.median(dispatched)), float(np.median(combined - computed))


def exchange_times(machine: Machine, transport: Transport, tokens: int, calls: int) -> list[list[int]]:
    """Return for each call this rank's nanoseconds until rows have arrived, its experts are computed, and results are
    back.

    Experts run in between as in the layer: without them an exchange over CPU processes takes half of its time there.
    """
    model, device, slots = machine.model, machine.device, machine.experts_per_rank
    draw = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.rand(tokens, model.experts, generator=draw).topk(model.top_k, dim=-1).indices.int().to(device)
    gates = torch.full(ids.shape, 1 / model.top_k, device=device)
    x = torch.randn(tokens, model.hidden, generator=draw).to(device, machine.dtype)
    weights = machine.weights()
    dispatcher, wait, samples = transport.dispatcher, _waiter(device), list[list[int]]()

    def reached(start: int) -> int:
        wait()
        return time.perf_counter_ns() - start

    with torch.no_grad():
        for _ in range(calls):
            dist.barrier()
            start = time.perf_counter_ns()
            (received,) = dispatcher.dispatch([x], [ids], [gates], slots)
            dispatched = reached(start)
            # Fewer slots than experts fit into the memory that the user gives.
            local = torch.where(received.slots < 0, received.slots, received.slots % machine.slots)
            rows = machine.kernel(received.rows, local, received.weights, weights.gate_up, weights.down)
            computed = reached(start)
            dispatcher.combine([rows], [received])
            samples.append([dispatched, computed, reached(start)])
    return samples


def fit_exchanges(
    machine: Machine, kernel: str, points: Sequence[Sequence[float]]
) -> tuple[AllToAllTime | None, AllToAllTime | None]:
    if not points:
        return None, None
    tokens, *steps = np.array(points).T
    fitted = []
    for name, us in zip(STEPS, steps, strict=True):
        constants, errors = fit_curve(tokens, us)
        at = device_name(machine.device), kernel, name, machine.topology.num_ranks, machine.topology.num_nodes
        curve, limits = Curve(*constants), (float(tokens.max()), float(np.abs(errors).mean()))
        fitted.append(AllToAllTime(*at, curve, curve, *limits, source="isoload measure"))
    return fitted[0], fitted[1]


def time_move(machine: Machine) -> float:
    """Return the microseconds in which each rank sends the weights of one expert to the next rank."""
    rank, ranks = dist.get_rank(), machine.topology.num_ranks
    size = int(machine.model.expert_bytes)
    buffer = torch.zeros(size, dtype=torch.uint8, device=machine.device)
    other, wait, samples = torch.empty_like(buffer), _waiter(machine.device), list[int]()
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter_ns()
        operations = [
            dist.P2POp(dist.isend, buffer, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, other, (rank - 1) % ranks),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        wait()
        samples.append(time.perf_counter_ns() - start)
    slowest = np.max(machine.transport.group.gather_objects("the moves' times", samples[1:]), axis=0)
    return float(np.median(slowest)) / 1e3


def time_plans(machine: Machine, step: Callable[[], None]) -> Iterator[tuple[str, float]]:
    """Yield each way to choose replicas, and a layer's microseconds with the gather until its slots are known."""
    model, ranks, device = machine.model, machine.topology.num_ranks, machine.device
    counts = np.random.default_rng(0).zipf(1.5, (1, model.experts)).clip(max=1000)
    placement = place(counts, machine.topology, min(-(-model.experts // ranks) + 1, model.experts))
    draw = torch.Generator().manual_seed(dist.get_rank() if ranks > 1 else 0)
    shape = PLAN_TOKENS, model.experts
    ids = torch.rand(shape, generator=draw).topk(model.top_k, dim=-1).indices.int().to(device)
    group = machine.transport.group
    modes: dict[str, Loads] = {"exact": "gathered", "own": "own"}
    for name, loads in modes.items():
        balancer = Balancer(placement, group=group, loads=loads)
        wait, samples = _waiter(device), list[int]()
        for _ in range(13):
            start = time.perf_counter_ns()
            balancer(ids)
            wait()
            samples.append(time.perf_counter_ns() - start)
        all_samples = group.gather_objects("the plans' times", samples[3:])
        step()
        yield name, float(np.median(np.max(all_samples, axis=0))) / 1e3


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SOFT = 0.05  # relative errors weigh linearly from here on, so that a stray row does not bend a fit
# Of a, b, c, rho (microseconds) and p - 1. Constants that the points do not determine keep their start.
LEAST, MOST = (1e-2, 1e-4, 1e-6, 1e-7, 0.02), (3e3, 3e2, 10.0, 1.0, 10.0)


def features(loads: Ints, tile: int) -> tuple[Floats, Floats]:
    """Return [...] the slots with copies, and the copies after each slot's number is rounded up to a tile."""
    return (loads > 0).sum(-1).astype(np.float64), (-(-loads // tile) * tile).sum(-1).astype(np.float64)


def fit_kernel(
    loads: list[Ints],
    rows: Floats,
    us: Floats,
    tile: int,
    with_rows: bool = True,
    soft: float = SOFT,
    slower: float = 1.0,
) -> tuple[list[float], Floats]:
    """Return a, b, c, rho, p of kernel_us and each point's relative error; slower: factor over the bounds' GPUs."""
    active, padded = map(np.array, zip(*(features(row, tile) for row in loads), strict=True))

    def constants(x: Floats) -> tuple[float, float, float, float, float]:
        a, b, c, rho, p = np.exp(x).tolist()
        return a, b, c, rho if with_rows else 0.0, 1 + p

    def errors(x: Floats) -> Floats:
        return np.asarray(np.log(kernel_us(*constants(x), active, padded, rows) / us))

    best: Any = None
    for rho in (1e-3, 6e-3):
        for p in (0.3, 2.0):
            start = np.log([max(us.min() / 2, 1.0), 5.0 * slower, 0.05 * slower, rho * slower, p])
            upper = np.log(MOST) + np.log([slower, slower, slower, slower, 1.0])
            tried = least_squares(errors, start, loss="soft_l1", f_scale=soft, bounds=(np.log(LEAST), upper))
            best = tried if best is None or tried.cost < best.cost else best
    return list(constants(best.x)), np.expm1(errors(best.x))


def fit_curve(tokens: Floats, us: Floats) -> tuple[list[float], Floats]:
    """Return a, s, q of a Curve and the relative error of every point."""

    def errors(x: Floats) -> Floats:
        return np.asarray(np.log(Curve(*np.exp(x))(tokens) / us))

    start = np.log([us.min(), us[-1] / tokens[-1], 1.5])
    # With a power beyond these the points do not distinguish a curve from one at the bound.
    bounds = ([-np.inf, -np.inf, np.log(0.3)], [np.inf, np.inf, np.log(6.0)])
    result = least_squares(errors, start, loss="soft_l1", f_scale=SOFT, bounds=bounds)
    return list(np.exp(result.x)), np.expm1(errors(result.x))
