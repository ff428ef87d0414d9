"""Replay: the real pipeline (count, place, plan, route) on a recorded trace, over virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from time import perf_counter_ns
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from isoload.analysis.batches import Batches, Fold, SourceBatch, calibration_folds, make_batches, strictest
from isoload.analysis.judge import without_replicas
from isoload.analysis.metrics import PolicyFigures, RoutedBatch, Tally, TimesTally, count_routed
from isoload.analysis.prediction import Forecast, IdleBorrowing, check_prediction
from isoload.balancing.balancer import Balancer
from isoload.balancing.own_counts import REMOVED_LOADS, Loads
from isoload.balancing.planning import fill, plan, plan_layers
from isoload.balancing.routing import route
from isoload.placement.placement import Placement
from isoload.placers import make_placer, parse_placer, place
from isoload.policies import POLICIES, Policy, make_policy, parse_policy
from isoload.policies.plan import Plan
from isoload.times import Times
from isoload.times.exchanges import DEFAULT_BANDWIDTHS
from isoload.topology import Topology
from isoload.traces import Trace
from isoload.transport import LocalGroup
from isoload.wording import not_one_of

# The row to which others are compared: experts in order, E/R slots per rank, as a model runs without balancing.
BASELINE = "in order, no replicas"
DEFAULT_POLICIES = (BASELINE, "static", "even", "dynamic", "exact")
SHARED_POLICIES = (BASELINE, "shared_local", "waterfill_sampled", "exact", "waterfill", "joint")


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of a replay."""

    num_ranks: int = 8
    ranks_per_node: int = 0  # divides R; 0 = all of them
    # S, spare slots included; 0 = :func:`default_slots_per_rank`, or the choice of a placer with a budget
    slots_per_rank: int = 0
    spare_slots: int = 0  # number of empty slots among each rank's S
    shared_experts: int = 0  # shared experts that every token needs in addition to the trace's routed ones
    placer: str = "eplb"  # a name in ``isoload.PLACERS``, with options as ``name:option=value``
    calibrate: str | None = None  # see :func:`calibration_folds`; None = the strictest that the batches allow
    batch_tokens: int | None = None  # None = see :func:`make_batches`
    max_batches: int = 0  # number of replayed batches per calibration, the first ones; 0 = all
    assign: str = "contiguous"  # how sequences are assigned to source ranks, see :func:`source_ranks`
    seed: int = 0  # of drawn batches and of every policy that samples
    predict: str = "last"  # forecast of policies that fill spare slots ahead, see :class:`Forecast`
    # Of one's own GPUs, for a layer's time by policy and for policies that price imports.
    times: Times | None = None
    policies: tuple[str, ...] = DEFAULT_POLICIES  # BASELINE, or as in POLICIES, with options as the placer
    loads: Loads = "gathered"  # loads from which ``exact`` plans, see :class:`isoload.Balancer`
    exchange_every: int = 16  # batches between two exchanges of its ranks, if loads are not gathered
    skip_refused: bool = False  # skip policies that do not accept the placement, see Replay.refused


@dataclass(frozen=True)
class Replay:
    """Result of a replay."""

    trace: str
    settings: dict[str, Any]  # as they took effect
    tokens: int  # number of replayed tokens; of copies, if K is unknown
    layers: int
    batches: int
    policies: tuple[PolicyFigures, ...]
    layer_times: tuple[dict[str, Any], ...] = ()  # a row per policy if the settings have times
    notes: tuple[str, ...] = ()  # sentences about policies that borrowed nothing
    # The tallies behind each policy's row.
    tallies: tuple[Tally, ...] = field(default=(), repr=False, compare=False)
    refused: dict[str, str] = field(default_factory=dict)  # by policy the reason why it is skipped


def replay(
    trace: Trace,
    settings: ReplaySettings,
    on_batch: Callable[[int, int], None] | None = None,
    placement: Placement | None = None,
) -> Replay:
    """Replay a trace under every policy of the settings, on one CPU thread.

    on_batch: called with (batches done, number of batches). placement: on which all batches are replayed, layers by
    their ids; must have the settings' ranks, slots and shared experts. Default: one is made.
    """
    threads = torch.get_num_threads()
    # Plans are small: with threads, their times would depend on the machine's other load.
    torch.set_num_threads(1)
    try:
        return _replay(trace, settings, on_batch or (lambda done, total: None), placement)
    finally:
        torch.set_num_threads(threads)


def _replay(
    trace: Trace,
    settings: ReplaySettings,
    on_batch: Callable[[int, int], None],
    fixed_placement: Placement | None,
) -> Replay:
    topology = Topology(settings.num_ranks, settings.ranks_per_node)
    _check(settings, trace)
    placer, options = parse_placer(settings.placer)
    planner = make_placer(placer, options)
    with_tokens = planner.needs_tokens or (planner.uses_tokens and trace.has_tokens)
    ahead = any(_policy(name, settings, 0).ahead for name in settings.policies)
    batches = make_batches(trace, settings.batch_tokens, settings.seed)
    others = settings.spare_slots, settings.shared_experts
    if fixed_placement is None:
        calibrate = settings.calibrate or strictest(len(batches.counts), batches.clusters)
        settings = replace(settings, calibrate=calibrate)
        whole = calibration_folds(len(batches.counts), calibrate, batches.clusters)
        default = default_slots_per_rank(trace.num_experts, settings.num_ranks, sum(others))
        slots_per_rank = settings.slots_per_rank or (None if planner.has_budget else default)
    else:
        whole = [Fold((), tuple(range(len(batches.counts))))]
        fixed_placement = fitting(fixed_placement, trace, settings)
        topology, slots_per_rank = fixed_placement.topology, None
    folds = [Fold(fold.calibrate, fold.replay[: settings.max_batches or None]) for fold in whole]
    tallies = [Tally(name, topology, trace.top_k > 0) for name in settings.policies]
    timed: list[TimesTally] = []
    if settings.times:
        layer_time, extrapolated = settings.times.layer(topology.num_ranks, topology.num_nodes, trace.top_k)
        timed = [TimesTally(layer_time, settings.times.move_us or 0.0) for _ in settings.policies]
    idle = [IdleBorrowing(name) for name in settings.policies]
    tokens = done = widest = 0
    refused: dict[str, str] = {}
    total = sum(len(fold.replay) for fold in folds)
    for fold in folds:
        data: Any = batches.part(fold.calibrate) if with_tokens else batches.counts[list(fold.calibrate)]
        shape = topology, slots_per_rank, placer, *others
        placement = fixed_placement or place(data, *shape, **options)
        widest = max(widest, placement.slots_per_rank)
        plain = in_order(placement) if BASELINE in settings.policies else placement
        placements = placement, plain
        refused |= _warm_up(placements, settings)
        accepted = [i for i, tally in enumerate(tallies) if tally.policy not in refused]
        tallies, idle = [tallies[i] for i in accepted], [idle[i] for i in accepted]
        timed = [timed[i] for i in accepted] if timed else []
        settings = replace(settings, policies=tuple(tally.policy for tally in tallies))
        mode = settings.loads, settings.exchange_every
        by_loads = {
            name: LayersByLoads(placement, _policy(name, settings, 0), *mode)
            for name in settings.policies
            if settings.loads != "gathered" and _parsed(name)[0] == "exact"
        }
        forecast = Forecast(settings.predict, trace, batches, fold, settings.seed) if ahead else None
        for index in fold.replay:
            batch = batches.source_batch(index, settings.num_ranks, settings.assign)
            batch = batch.with_shared(trace.num_experts, settings.shared_experts)
            _replay_batch(batch, index, placements, settings, forecast, by_loads, tallies, timed, idle)
            tokens, done = tokens + batch.num_tokens, done + 1
            on_batch(done, total)
    figures = tuple(tally.figures() for tally in tallies)
    resolved = _resolved(settings, trace, batches, folds, widest)
    resolved["layers_with_freedom"] = sum(placement.has_freedom)
    if fixed_placement is not None:
        resolved |= {"placer": None, "calibrate": None, "placement": fixed_placement.provenance}
        if topology.speeds is not None:
            resolved["speeds"] = list(topology.speeds)
    predicted = tuple(tally.figures() for tally in timed)
    for row in predicted:
        row["layer_us_change"] = row["layer_us_high"] / predicted[0]["layer_us_high"] - 1
    notes = tuple(note for borrowing in idle if (note := borrowing.note()))
    notes += tuple(f"{note}." for note in extrapolated) if timed else ()
    results = figures, predicted, notes, tuple(tallies), refused
    return Replay(trace.name, resolved, tokens, trace.num_layers, total, *results)


def fitting(placement: Placement, trace: Trace, settings: ReplaySettings) -> Placement:
    topology = placement.topology
    pairs = {
        "num_ranks": (settings.num_ranks, topology.num_ranks),
        "ranks_per_node": (settings.ranks_per_node or topology.ranks_per_node, topology.ranks_per_node),
        "slots_per_rank": (settings.slots_per_rank or placement.slots_per_rank, placement.slots_per_rank),
        "spare_slots": (settings.spare_slots, placement.spare_slots),
        "shared_experts": (settings.shared_experts, placement.num_shared),
        "num_experts": (trace.num_experts, placement.num_routed),
    }
    for name, (wanted, has) in pairs.items():
        if wanted != has:
            raise ValueError(f"{name} must be the placement's {has}, got {wanted}")
    if topology.alive is not None and not all(topology.alive):
        raise ValueError("placement must have all ranks alive: every rank is a source of tokens")
    return placement.for_trace(trace)


def default_slots_per_rank(num_experts: int, num_ranks: int, others: int = 0) -> int:
    """Return S: E/R rounded up, plus an eighth of it but at least one, plus spare and shared slots."""
    dense = -(-num_experts // num_ranks)
    return dense + max(1, dense // 8) + others


def _replay_batch(
    batch: SourceBatch,
    index: int,
    placements: tuple[Placement, Placement],
    settings: ReplaySettings,
    forecast: Forecast | None,
    by_loads: dict[str, LayersByLoads],
    tallies: list[Tally],
    timed: list[TimesTally],
    idle: list[IdleBorrowing],
) -> None:
    placement = placements[0]  # then the baseline's
    ranks, loads = range(batch.num_ranks), batch.loads(placement.num_experts)
    best = "joint" if placement.num_shared else "exact"
    bound = plan_layers(loads, placement, best).bound.numpy()
    ahead = loads if forecast is None else forecast.of(batch, index, loads, placement.num_shared)
    for position, tally in enumerate(tallies):
        plans: list[Plan] = []
        placement = placements[tally.policy == BASELINE]
        if by_own := by_loads.get(tally.policy):
            slots = by_own.route(batch, tally)
        else:
            policy = _policy(tally.policy, settings, index, placement.topology)
            plans = _timed_plans(loads, ahead, placement, policy, tally)
            idle[position].add(plans, loads, placement, policy)
            routes = [
                [route(batch.on_rank(layer, rank), loads[layer], layer_plan, rank) for rank in ranks]
                for layer, layer_plan in enumerate(plans)
            ]
            slots = torch.stack([torch.cat(of_ranks) for of_ranks in routes])
        size, shared = placement.slots_per_rank, placement.num_shared
        routed = count_routed(slots.numpy(), batch.sources(), placement.topology, size, shared)
        if tally.policy == BASELINE:  # it has no replicas, so nothing is planned
            tally.layer_ns[-len(loads) :], tally.batched_ns[-1] = [0] * len(loads), 0.0
        _check_realised(plans, routed, tally.policy)
        tally.add(routed, bound)
        if timed:
            timed[position].add(plans, routed, placement, batch.num_tokens)


def _timed_plans(
    loads: Tensor, ahead: Tensor, placement: Placement, policy: Policy, tally: Tally
) -> list[Plan]:
    """Return every layer's plan, made one by one. This call, and one for all layers, is timed; a fill ahead is not."""
    filled = fill(ahead, placement, None, policy) if policy.ahead else None
    start = perf_counter_ns()
    plan(loads, placement, None, policy, filled=filled)
    tally.batched_ns.append((perf_counter_ns() - start) / len(loads))
    plans = []
    for layer, layer_loads in enumerate(loads):
        filled_layer = None if filled is None else filled[layer]
        start = perf_counter_ns()
        layer_plan = plan(layer_loads, placement, layer, policy, filled=filled_layer)
        tally.layer_ns.append(perf_counter_ns() - start)
        plans.append(layer_plan)
    return plans


def _check_realised(plans: list[Plan], routed: RoutedBatch, policy: str) -> None:
    for layer, layer_plan in enumerate(plans):
        if layer_plan.quota is None:
            continue
        copies = routed.slot_copies[layer]
        if layer_plan.realisation == "sample":  # quotas are of the routed experts only
            routed_slots = layer_plan.slot_to_expert.numpy() < layer_plan.placed.host.num_routed
            copies = np.where(routed_slots, copies, 0)
        if not np.array_equal(layer_plan.quota.numpy(), copies):
            raise RuntimeError(f"routed slots do not meet the quota of policy {policy} in layer {layer}")


def _check(settings: ReplaySettings, trace: Trace) -> None:
    policies, loads = settings.policies, settings.loads
    if settings.max_batches < 0:
        raise ValueError(f"max_batches must be at least 0, got {settings.max_batches}")
    if not trace.top_k and (settings.times or settings.shared_experts):
        raise ValueError("top_k must be known where times or shared_experts count tokens, got none")
    names, listed = [_parsed(policy)[0] for policy in policies], ", ".join(policies)
    if not policies or len(set(policies)) < len(policies):
        raise ValueError(f"policies must be distinct and at least one, got {listed or 'none at all'}")
    if loads in REMOVED_LOADS:
        raise ValueError(REMOVED_LOADS[loads])
    if loads not in get_args(Loads):
        raise ValueError(not_one_of("loads", get_args(Loads), loads))
    if settings.exchange_every < 1:
        raise ValueError(f"exchange_every must be at least 1, got {settings.exchange_every}")
    if loads != "gathered" and "exact" not in names:
        raise ValueError(f"policies must have exact for loads={loads!r}, got {listed}: others plan by all")
    if loads != "gathered" and settings.times:
        raise ValueError(f"times must be none for loads={loads!r}: layers are timed by plans of all ranks")
    check_prediction(settings.predict)


class LayersByLoads:
    """Policy ``exact`` without gathered loads: a Balancer for each layer, over virtual ranks that exchange."""

    def __init__(self, placement: Placement, policy: Policy, loads: Loads, exchange_every: int) -> None:
        group = LocalGroup(placement.topology)
        layers = range(placement.num_layers)
        self.layers = [Balancer(placement, i, policy, group, loads=loads) for i in layers]
        self.exchange_every, self.batches = exchange_every, 0

    def route(self, batch: SourceBatch, tally: Tally) -> Tensor:
        """Return [L, T, K] slots of the next batch; add the planning time of one source and layer."""
        slots, spent = [], []
        for i, layer in enumerate(self.layers):
            counted = layer.gather([batch.on_rank(i, rank) for rank in range(batch.num_ranks)])
            start = perf_counter_ns()
            planned = layer.plan(counted)
            spent.append((perf_counter_ns() - start) // batch.num_ranks)
            slots.append(torch.cat(layer.route(planned)))
        tally.layer_ns += spent
        tally.batched_ns.append(sum(spent) / len(spent))
        self.batches += 1
        if self.batches % self.exchange_every == 0:
            self.layers[0].exchange(*self.layers[1:])
        return torch.stack(slots)


def _parsed(policy: str) -> tuple[str, dict[str, Any]]:
    return ("none", {}) if policy == BASELINE else parse_policy(policy)


def in_order(placement: Placement) -> Placement:
    """Return the baseline of a placement: the same experts in order on the same ranks, without replicas."""
    ones = np.ones((placement.num_layers, placement.num_routed))
    trivial = place(ones, placement.topology, placer="trivial", num_shared=placement.num_shared)
    return without_replicas(trivial)  # if R does not divide E


def _policy(policy: str, settings: ReplaySettings, step: int, topology: Topology | None = None) -> Policy:
    """Return the policy with the replay's seed, batch and price of imports; its own options take precedence."""
    name, options = _parsed(policy)
    known = {field.name for field in fields(POLICIES[name])}
    defaults: dict[str, Any] = {"seed": settings.seed, "step": step}
    if settings.times and settings.times.move_us and topology is not None:
        near, _ = topology.bandwidths or DEFAULT_BANDWIDTHS
        defaults |= {"expert_bytes": settings.times.move_us * near * 1e3, "token_us": settings.times.copy_us}
    defaults = {key: value for key, value in defaults.items() if key in known}
    return make_policy(name, {**defaults, **options})


def _warm_up(placements: tuple[Placement, Placement], settings: ReplaySettings) -> dict[str, str]:
    """Plan every layer once, so that values derived once are not timed; return by policy why it is skipped."""
    refused = {}
    for policy in settings.policies:
        placement = placements[policy == BASELINE]
        shape = placement.num_layers, settings.num_ranks, placement.num_experts
        loads, tally = torch.zeros(shape, dtype=torch.int32), Tally(policy, placement.topology)
        try:
            _timed_plans(loads, loads, placement, _policy(policy, settings, 0, placement.topology), tally)
        except ValueError as error:
            if not settings.skip_refused:
                raise
            refused[policy] = str(error)
    return refused


def _resolved(
    settings: ReplaySettings, trace: Trace, batches: Batches, folds: list[Fold], slots_per_rank: int
) -> dict[str, Any]:
    resolved = asdict(replace(settings, times=None))
    resolved["times"] = settings.times and settings.times.source
    del resolved["skip_refused"]
    if not any(_policy(name, settings, 0).ahead for name in settings.policies):
        del resolved["predict"]  # nothing was predicted
    if settings.loads == "gathered":
        del resolved["loads"], resolved["exchange_every"]  # nothing was exchanged
    else:  # only exchanges after which a batch follows
        resolved["exchanges"] = sum((len(fold.replay) - 1) // settings.exchange_every for fold in folds)
    return {
        **resolved,
        "ranks_per_node": settings.ranks_per_node or settings.num_ranks,
        "slots_per_rank": slots_per_rank,
        "policies": list(settings.policies),
        "model": trace.provenance.get("model"),
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "layer_ids": list(trace.layer_ids),
        "drawn": batches.drawn,
        "calibration_batches": sorted({len(fold.calibrate) for fold in folds}),
    }
