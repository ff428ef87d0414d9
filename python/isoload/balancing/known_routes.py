"""KnownRoutes: the routes of a training step that are known before its forward pass, for example by router replay.

Loads and plans of all micro-batches and layers are made ahead of the step. A layer that is called with its plan neither
gathers loads nor plans: ranks exchange rows and weights only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload.checks import values_readable
from isoload.ops import Counted
from isoload.placement.placed_layers import OfLayer, PlacedLayers, pick_layer
from isoload.placement.placement import Placement
from isoload.policies import Policy, make_policy
from isoload.policies.plan import Plan
from isoload.traces import Trace
from isoload.traces.identity import Identity, matching_rows
from isoload.transport import Group, checksum

SPREAD = 0x9E3779B1  # odd: spreads the weights of a checksum over 31 bits
DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Routes = Sequence[Sequence[Tensor]]  # [micro-batches][ranks] ids [T, L, K]


@dataclass(frozen=True, eq=False)
class KnownPlan:
    """Plan of one micro-batch and layer, which the layer takes as ``plan=``."""

    plan: Plan  # of the layer, in the placement for which it was made
    loads: Tensor  # [R, E] int32 copies for which it was made
    number: int  # checksum of the loads and of all plans of the step, which all ranks compare
    rank: int | None  # source rank whose send_counts are in the plan; None: made when copies are routed
    step: KnownPlans  # the plans of the step
    place: tuple[int, int]  # micro-batch, and position of the layer in the placement

    def near(self, layer: int, batches: int = 0) -> KnownPlan | None:
        """Return the plan of another layer, some micro-batches later; None if the step has no such micro-batch."""
        batch = self.place[0] + batches
        return self.step[batch, layer] if batch < len(self.step.routes.loads) else None

    def check(self, counted: Sequence[Counted], ranks: Sequence[int]) -> None:
        """Raise ValueError if the owned ranks' rows are not those of the plan; on CUDA only under ISOLOAD_CHECK=1."""
        for rank, rows in zip(ranks, counted, strict=True):
            if not values_readable(rows.counts):
                continue
            differs = (self.loads[rank] != rows.counts).nonzero().flatten()
            if len(differs):
                expert = int(differs[0])
                raise ValueError(
                    f"plan must be made for these rows: rank {rank} has {int(rows.counts[expert])} copies of expert "
                    f"{expert}, the plan was made for {int(self.loads[rank, expert])}"
                )

    def placed_in(self, placed: PlacedLayers) -> Plan:
        """Return the plan in a layer's own tables; raise ValueError if it is of another placement or layer."""
        planned = self.plan.placed
        if planned.host is not placed.host or planned.layer != placed.layer:
            raise ValueError(
                f"plan must be of the layer's placement and position, {placed.layer} of {placed.host!r}, got "
                f"{planned.layer} of {planned.host!r}: pass layer.placement to KnownRoutes"
            )
        if self.loads.device != placed.home_slot.device:
            raise ValueError(f"plan must be on {placed.home_slot.device}, got {self.loads.device}")
        return replace(self.plan, placed=planned.moved_to(placed))


class KnownPlans:
    """Plans of a step, by micro-batch and position of the layer: ``plans[micro_batch, layer]``."""

    def __init__(self, routes: KnownRoutes, whole: Plan) -> None:
        self.routes, self.whole = routes, whole  # the plan of all micro-batches times layers
        self.number = checksum([checksum(whole.policy), routes.numbers])
        self._plans: dict[tuple[int, int], KnownPlan] = {}

    def __repr__(self) -> str:
        batches, layers = self.routes.loads.shape[:2]
        return f"KnownPlans({self.whole.policy.name}, {batches} micro-batches x {layers} layers)"

    @property
    def peak(self) -> Tensor | None:
        return None if self.whole.peak is None else self.whole.peak.view(self.routes.loads.shape[:2])

    @property
    def bound(self) -> Tensor:
        return self.whole.bound.view(self.routes.loads.shape[:2])

    def __getitem__(self, which: tuple[int, int]) -> KnownPlan:
        batch, layer = which
        if which in self._plans:
            return self._plans[which]
        batches, layers = self.routes.loads.shape[:2]
        if not (0 <= batch < batches and 0 <= layer < layers):
            raise ValueError(
                f"plans have micro-batches 0..{batches - 1} and layers 0..{layers - 1}, got {list(which)}"
            )
        index, loads, whole = batch * layers + layer, self.routes.loads[batch, layer], self.whole
        placed = self.routes.placement.layer(layer, loads.device)
        if whole.placed.unfilled is not None:
            quota, telemetry = (pick_layer(t, index) for t in (whole.placed.quota, whole.placed.telemetry))
            placed = placed.fill(whole.slot_to_expert[index], quota, telemetry, whole.tables[index])
        number = self.number ^ self.routes.numbers[batch][layer]
        parts = whole.pick(index, placed), loads, number, self.routes.rank
        self._plans[which] = KnownPlan(*parts, self, (batch, layer))
        return self._plans[which]

    def layers(self, micro_batch: int) -> list[KnownPlan]:
        return [self[micro_batch, layer] for layer in range(self.routes.loads.shape[1])]


class KnownRoutes:
    """Routes and loads of all micro-batches and layers of one training step.

    Args:
        routes: ids of the step's tokens, ``[micro_batches][ranks]`` tensors [T, L, K] of one device; -1 = masked. T
            differs between ranks and may be 0. With a group whose processes own some ranks each, these are the owned
            ranks' ids, and the loads are gathered once for the step. Or a Trace with seq_id, which every process has.
        placement: of the model's layers. A Trace's layers are matched by their numbers; tensors have the placement's
            layers in order.
        micro_batches: with a Trace: [sequences] micro-batch of every sequence, by ascending seq_id. None: one.
        ranks: with a Trace: [sequences] source rank of every sequence. None: rank 0 of a single rank.
        group: of the ranks; errors are raised on all of them. None: routes are those of all ranks.
        device: of loads and plans, for a Trace.

    Attributes:
        loads: [micro_batches, L, R, E] int32 copies, shared experts included.
    """

    def __init__(
        self,
        routes: Routes | Trace,
        placement: Placement,
        *,
        micro_batches: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
        group: Group | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.placement = placement
        # The rank whose part of the shares is computed ahead
        self.rank = group.ranks[0] if group is not None and len(group.ranks) == 1 else None
        self._tokens: list[list[Any]] | None = None
        if group is None:
            self._set(self._count(routes, micro_batches, ranks, None, device))
            return
        with group.agreeing("known routes") as facts:
            loads = self._count(routes, micro_batches, ranks, group, device)
            batches, layers, owned, experts = loads.shape
            facts.update({"micro-batches of routes": batches, "ranks of routes": owned})
        if owned < placement.topology.num_ranks:
            flat = loads.transpose(0, 2).transpose(1, 2).reshape(owned, -1)  # [owned, M * L * E]
            gathered = group.gather_loads(list(flat.unbind(0)))
            loads = gathered.view(-1, batches, layers, experts).permute(1, 2, 0, 3).contiguous()
        self._set(loads)

    def _set(self, loads: Tensor) -> None:
        self.loads = loads
        ranks, experts = loads.shape[2:]
        weights = (torch.arange(1, ranks * experts + 1, device=loads.device) * SPREAD) & (2**31 - 1)
        numbers = (loads.long() * weights.view(ranks, experts)).sum((2, 3)) & (2**31 - 1)
        self.numbers: list[list[int]] = numbers.tolist()

    def __repr__(self) -> str:
        batches, layers, ranks, experts = self.loads.shape
        return f"KnownRoutes({batches} micro-batches, {layers} layers, {ranks} ranks, {experts} experts)"

    def plans(self, policy: str | Policy = "exact", **options: Any) -> KnownPlans:
        """Return the plans of all micro-batches and layers, from one call of the policy (a name or a Policy)."""
        chosen = make_policy(policy, options)
        chosen.check(self.placement)
        placed = repeated(self.placement, len(self.loads), self.loads.device)
        return KnownPlans(self, chosen.plan(self.loads.flatten(0, 1), placed, self.rank))

    def tokens(self, micro_batch: int, rank: int) -> np.ndarray[Any, Any]:
        """Return the [T] tokens of the Trace, ascending, that a rank has in a micro-batch."""
        if self._tokens is None:
            raise ValueError("tokens need routes that are a Trace, got tensors")
        of_rank: np.ndarray[Any, Any] = self._tokens[micro_batch][rank]
        return of_rank

    def _count(
        self,
        routes: Routes | Trace,
        micro_batches: Sequence[int] | None,
        ranks: Sequence[int] | None,
        group: Group | None,
        device: torch.device | str,
    ) -> Tensor:
        num_ranks = self.placement.topology.num_ranks
        if isinstance(routes, Trace):
            ids = placement_ids(routes, self.placement)
            self._tokens = _split(routes, micro_batches, ranks, num_ranks)
            batches = [[torch.from_numpy(ids[tokens]) for tokens in of_ranks] for of_ranks in self._tokens]
            return count_routes([[rows.to(device) for rows in row] for row in batches], self.placement)
        if micro_batches is not None or ranks is not None:
            raise ValueError("micro_batches and ranks belong to routes that are a Trace, got tensors")
        allowed = {num_ranks} | (set() if group is None else {len(group.ranks)})
        batches = [list(of_ranks) for of_ranks in routes]
        if not batches or any(len(of_ranks) not in allowed for of_ranks in batches):
            got = sorted({len(of_ranks) for of_ranks in batches})
            raise ValueError(
                f"routes must have micro-batches with one tensor per rank ({num_ranks}), or per owned rank with a "
                f"group, got {got or 'none'}"
            )
        return count_routes(batches, self.placement)


@dataclass(frozen=True, eq=False)
class RepeatedLayers(PlacedLayers):
    """All layers of a placement, once for every micro-batch; ``num_layers`` of them differ."""

    num_layers: int = 0

    def stacked(self, derive: OfLayer) -> Tensor:
        """Return the result for each layer; derived once per layer of the model."""
        once = np.stack([derive(self.host, i) for i in range(self.num_layers)])
        table = torch.tensor(once, device=self.home_slot.device)
        return table.repeat(self.host.num_layers // self.num_layers, *[1] * (table.dim() - 1))


@lru_cache(maxsize=4)  # every step of a training run uses the same ones
def repeated_placement(placement: Placement, times: int) -> Placement:
    rows = list(range(placement.num_layers)) * times
    return placement.with_rows(rows, range(len(rows)), Identity("order"))


def repeated(placement: Placement, times: int, device: torch.device) -> PlacedLayers:
    """Return the layers of a placement, repeated for every micro-batch, as one batch of layers [times * L]."""
    placed = repeated_placement(placement, times).layers(device)
    values = {name: getattr(placed, name) for name in PlacedLayers.__dataclass_fields__}
    return RepeatedLayers(**{**values, "memos": {}}, num_layers=placement.num_layers)


def count_routes(routes: Routes, placement: Placement) -> Tensor:
    """Return the loads [micro-batches, L, n, E] int32 of ids ``[micro-batches][n]`` of [T, L, K], counted in one op."""
    layers, routed, shared = placement.num_layers, placement.num_routed, placement.num_shared
    num_batches, num_ranks = len(routes), len(routes[0])
    parts = [rows for of_ranks in routes for rows in of_ranks]
    for rows in parts:
        if not isinstance(rows, Tensor) or rows.dim() != 3 or rows.dtype not in DTYPES:
            got = f"{list(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"routes must be tensors [T, L, K] of integers, got {got}")
        if rows.shape[1] != layers or rows.shape[2] != parts[0].shape[2]:
            raise ValueError(
                f"routes must have the placement's {layers} layers and equal K, got {list(rows.shape)} after "
                f"{list(parts[0].shape)}"
            )
    ids = torch.cat([rows.long() for rows in parts])  # [N, L, K]
    if values_readable(ids) and ids.numel():
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < -1 or high >= routed:
            raise ValueError(f"routes must be in -1..{routed - 1}, got {low if low < -1 else high}")
    present = (ids >= 0) & (ids < routed)
    if shared:  # every token with a routed choice needs all shared experts
        more = torch.arange(routed, routed + shared, device=ids.device).expand(*ids.shape[:2], -1)
        ids = torch.cat([ids, more], dim=2)
        present = torch.cat([present, present.any(2, keepdim=True).expand_as(more)], dim=2)
    experts = routed + shared
    sizes = torch.tensor([len(rows) for rows in parts], device=ids.device)
    index = torch.arange(len(parts), device=ids.device).repeat_interleave(sizes, output_size=len(ids))
    batch, rank = index // num_ranks, index % num_ranks
    first = batch.view(-1, 1, 1) * layers + torch.arange(layers, device=ids.device).view(-1, 1)
    keys = (first * num_ranks + rank.view(-1, 1, 1)) * experts + ids
    total = num_batches * layers * num_ranks * experts
    keys = torch.where(present, keys, total).flatten()
    counts = torch.zeros(total + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, keys, counts.new_ones(1).expand(len(keys)))
    return counts[:total].view(num_batches, layers, num_ranks, experts)


def placement_ids(trace: Trace, placement: Placement) -> np.ndarray[Any, Any]:
    if trace.topk_ids is None:
        raise ValueError(f"routes must have topk_ids, trace {trace.name} has only counts")
    if trace.num_experts != placement.num_routed and trace.provenance.get("num_experts_from") != "largest id":
        raise ValueError(
            f"routes must be of the placement's {placement.num_routed} routed experts, trace {trace.name} has "
            f"{trace.num_experts}"
        )
    what = f"trace {trace.name}"
    rows = matching_rows(
        placement.identity, placement.layer_ids, "placement", trace.identity, trace.layer_ids, what
    )
    if len(rows) < trace.num_layers:
        raise ValueError(
            f"routes and placement must have the same layers, {what} has {trace.identity.describe(trace.layer_ids)}, "
            f"the placement {placement.identity.describe(placement.layer_ids)}"
        )
    return trace.topk_ids[:, rows]


def _split(
    trace: Trace, micro_batches: Sequence[int] | None, ranks: Sequence[int] | None, num_ranks: int
) -> list[list[np.ndarray[Any, Any]]]:
    """Return the tokens of every micro-batch and rank, ascending."""
    assert trace.topk_ids is not None
    if trace.seq_id is None and not (micro_batches is None and ranks is None and num_ranks == 1):
        raise ValueError(
            "routes must have seq_id to be split, got a trace without (sequence_lengths of read_routes)"
        )
    seq_id = np.zeros(len(trace.topk_ids), dtype=int) if trace.seq_id is None else trace.seq_id
    sequences, of_token = np.unique(seq_id, return_inverse=True)
    if ranks is None and num_ranks > 1:
        raise ValueError(f"ranks must name the source rank of every sequence, 0..{num_ranks - 1}, got None")

    def checked(name: str, values: Sequence[int] | None, limit: int | None) -> np.ndarray[Any, Any]:
        array = np.zeros(len(sequences), dtype=int) if values is None else np.asarray(values)
        if array.shape != sequences.shape or array.dtype.kind not in "iu":
            raise ValueError(
                f"{name} must be one integer per sequence ({len(sequences)}), got {list(array.shape)} {array.dtype}"
            )
        if array.min() < 0 or (limit is not None and array.max() >= limit):
            wanted = "from 0 on" if limit is None else f"in 0..{limit - 1}"
            raise ValueError(f"{name} must be {wanted}, got {array.min()}..{array.max()}")
        return array

    batch, rank = checked("micro_batches", micro_batches, None), checked("ranks", ranks, num_ranks)
    key = (batch * num_ranks + rank)[of_token]
    order, groups = np.argsort(key, kind="stable"), (int(batch.max()) + 1) * num_ranks
    cuts = np.split(order, np.cumsum(np.bincount(key, minlength=groups))[:-1])
    return [cuts[b : b + num_ranks] for b in range(0, groups, num_ranks)]
