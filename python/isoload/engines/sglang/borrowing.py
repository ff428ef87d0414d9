"""Experts that travel inside a prefill batch (ISOLOAD_SPARE_SLOTS).

The last spare slots of every rank are rows of SGLang's own expert stacks. A prefill whose exact split over the present
fill is above the policy's refill_above fills them from home slots of the same node, while tokens are dispatched.
Between two batches only isoload has a map of these experts. SGLang's own maps therefore list no spare slot as a
replica, its rebalances copy no expert from one, its recorder gets home slots, and a weight update empties the fill.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.balancing.counting import without_padding
from isoload.balancing.planning import refill
from isoload.engines.layers import EngineLayer
from isoload.engines.settings import SPARE
from isoload.engines.sglang.layers import EPLB, LAYERS, check_foreign, moe, parallel, topology_of
from isoload.engines.tables import fill_spare_slots, in_order, only_spare, with_empty
from isoload.placement.placed_layers import PlacedLayers, own_layers
from isoload.topology import Topology
from isoload.transport import Call, CollectiveGroup
from isoload.weights.backends import Backend, BorrowPlan, make_backend
from isoload.weights.layout import Address

log = logging.getLogger("isoload")
Original = Callable[..., Any]


class Spare:
    """The spare slots of one MoE layer, whose Balancer has them empty: their experts, and the weights on their way.
    `table`: [P] on the host, the expert in each slot."""

    def __init__(self, layer: EngineLayer, table: Tensor) -> None:
        self.layer = layer
        self.stacks: Sequence[Tensor] | None = None  # [S, ...] each, of this rank; None: nothing may travel
        self.backend: Backend | None = None  # of the ranks of this node
        self.module: torch.nn.Module | None = None  # that computes the experts
        topology = layer.balancer.placement.topology
        self.first = topology.node_of(LAYERS.own_rank()).start  # rank of this node
        self._plan: BorrowPlan | None = None  # kept until the next one, because another stream reads it
        self._finish: Callable[[], None] | None = None
        with torch.inference_mode(False):  # otherwise only inference mode could write it
            self.counts = torch.zeros(len(COUNTS), dtype=torch.int64, device=LAYERS.device)
            self._buffer = own_layers(self._placed.fill(self._on_device(table)))
        self.hold(table)

    @property
    def _placed(self) -> PlacedLayers:
        return self.layer.balancer.placed_on(LAYERS.device)

    def _on_device(self, table: Tensor) -> Tensor:
        return table.to(LAYERS.device, torch.int32)

    def hold(self, table: Tensor) -> None:
        """Set the expert in each slot, [P] on the host, after the engine has placed them; -1: the slot is empty. The
        memory stays, because captured graphs of decode read it."""
        placed, size = self._placed, self.size
        self.filled = placed.fill(self._buffer.slot_to_expert, tables=self._buffer.tables)
        self._write(placed.fill(self._on_device(table)))
        homes = placed.home_slot.to(torch.int32)
        self._home = torch.stack([homes // size - self.first, homes % size], dim=-1)
        self._home_rows = {e: Address(*address) for e, address in enumerate(self._home.tolist())}

    def drop(self) -> None:
        """Empty the spare slots, whose experts have been updated elsewhere; the next prefill fills them."""
        self.wait()
        self.hold(self._placed.slot_to_expert)

    def _write(self, filled: PlacedLayers) -> None:
        self._buffer.slot_to_expert.copy_(filled.slot_to_expert)
        self._buffer.tables.data.copy_(filled.tables.data)

    @property
    def size(self) -> int:
        return self.layer.balancer.placement.slots_per_rank

    @property
    def num_slots(self) -> int:
        return self.layer.balancer.placement.spare_slots

    def __call__(self, topk_ids: Tensor, num_valid: Tensor | None) -> Tensor:
        """Return the [T, K] slots of a batch, as :class:`isoload.Balancer`; all ranks call it together."""
        balancer = self.layer.balancer
        if self._finish is not None:
            raise RuntimeError(
                f"layer {balancer.layer}: the experts of the last batch were computed without a wait for the weights "
                f"that travel, because SGLang called no function that isoload hooks: unset {SPARE.name}"
            )
        try:
            ids = without_padding(topk_ids, num_valid)
        except BaseException as error:
            balancer.gather([], call=Call(balancer.group, failure=error))  # in which the other ranks raise
            raise
        batch = balancer.gather([ids])
        if self.may_fill:
            self.fill(batch.loads)
        return balancer.route(balancer.plan(batch, filled=self.filled))[0]

    @property
    def may_fill(self) -> bool:
        """Whether experts may travel in this batch; the same on all ranks."""
        if not self.layer.balancer.policy.borrows:
            return False
        if LAYERS.in_prefill_graph is not None and LAYERS.in_prefill_graph():
            raise RuntimeError(
                f"{SPARE.name} must come without graphs of prefill, which would capture one fill for all batches: pass "
                "--disable-prefill-cuda-graph"
            )
        return self.stacks is not None and (LAYERS.switch is None or LAYERS.switch.on)

    def fill(self, loads: Tensor) -> None:
        """Fill the spare slots by a batch's loads [R, E] if that lowers its peak enough, and start the moves. The host
        waits for no device."""
        placed, last = self._placed, self.filled
        new = refill(self.layer.balancer.policy, loads, placed, last)
        live = len(placed.topology.live_ranks)
        changed = torch.where(new.filled.slot_to_expert == last.slot_to_expert, -1, new.filled.slot_to_expert)
        local = changed.view(placed.topology.num_ranks, -1)[LAYERS.own_rank()]
        peaks = [peak.long() * live for peak in (new.before, new.after)]
        sums = [new.refilled.long(), (changed >= 0).sum(), *peaks, loads.sum(), (local >= 0).sum()]
        self.counts += torch.stack(sums)
        self._write(new.filled)
        self.start(changed)

    def start(self, changed: Tensor) -> None:
        """Start to copy experts to this node's spare slots; `changed`: [P] the expert that a slot gets, -1: none."""
        assert self.backend is not None and self.stacks is not None
        group, size, spare = self.backend.group, self.size, self.num_slots
        ranks = group.topology.num_ranks
        node = changed.narrow(0, self.first * size, ranks * size)
        self._plan = plan = BorrowPlan(node, self._home, self._home_rows, ranks, spare)
        if plan.on_host and not plan.moves:
            return
        pools = [stack.narrow(0, size - spare, spare) for stack in self.stacks]
        self._finish = self.backend.start("borrow", plan, [list(self.stacks)], [pools])

    @torch.no_grad()
    def wait(self) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


# What Spare.counts sums over the prefill batches of a layer: batches that were filled, experts that travelled, R times
# the peak over the last fill and over the new fill, copies; and experts that came to this rank.
COUNTS = ("fills", "moves", "before", "after", "copies", "arrivals")


def begin() -> None:
    """Make the spare slots of the layers' Balancers, once; the engine's maps list all slots until :func:`bind`."""
    if LAYERS.settings.spare_slots:
        for i, layer in LAYERS.by_id.items():
            if layer.spare is None:
                layer.spare = Spare(layer, LAYERS.tables[i])


def spares() -> dict[int, Spare]:
    return {i: layer.spare for i, layer in LAYERS.by_id.items() if isinstance(layer.spare, Spare)}


def check_start(metadata: Any, algorithm: str | None) -> None:
    if LAYERS.settings.spare_slots:
        from sglang.srt.runtime_context import get_exec

        check_options(algorithm, metadata.ep_size, moe(), get_exec().overlap, parallel())
        check_layout(metadata)


def check_redundant(redundant: int, num_ranks: int) -> None:
    spare = LAYERS.settings.spare_slots
    if redundant % num_ranks or redundant < spare * num_ranks:
        raise ValueError(
            f"{SPARE.name} must come with --ep-num-redundant-experts "
            f"{max(-(-redundant // num_ranks), spare) * num_ranks}, a multiple of {num_ranks} ranks with at least "
            f"{spare} of each rank, got {redundant}"
        )


# Two micro-batches of a layer would share the spare slots; MegaMoE's kernel reads experts while they travel; DWDP moves
# the same weights; ranks of elastic EP may leave; Waterfill's shared experts follow the spare slots.
UNFIT = (
    "enable_two_batch_overlap", "moe_a2a_backend", "dwdp_size", "elastic_ep_backend", "enable_waterfill",
    "enable_deepep_waterfill",
)  # fmt: skip


def check_options(algorithm: str | None, num_ranks: int, options: Any, *others: Any) -> None:
    check_redundant(options.ep_num_redundant_experts, num_ranks)
    check_foreign(SPARE.name, UNFIT, options, *others)
    backend, recorder = options.moe_a2a_backend, options.expert_distribution_recorder_mode
    wanted = "dynamic" if backend == "none" else "lp"
    placed_by = options.eplb_algorithm if options.enable_eplb else "isoload"
    at_sender = backend == "none" or (backend != "mori" and options.deepep_mode == "normal")
    refused = (
        (SPARE.name in LAYERS.lost, "with the SGLang functions that isoload expects: see the lines above"),
        (
            algorithm != wanted or wanted in LAYERS.lost,
            f"with --ep-dispatch-algorithm {wanted} and --moe-a2a-backend {backend}, got {algorithm!r}",
        ),
        (
            placed_by != "isoload" or EPLB in LAYERS.lost,
            f"with --eplb-algorithm isoload, because other placers put experts in spare slots alone, got {placed_by!r}",
        ),
        (
            recorder is not None and (recorder == "stat_approx" or not at_sender),
            "with --expert-distribution-recorder-mode stat and --deepep-mode normal, which record copies where they "
            f"are routed, got {recorder!r} and {options.deepep_mode!r}",
        ),
    )
    for wrong, rule in refused:
        if wrong:
            raise ValueError(f"{SPARE.name} must come {rule}")


def check_layout(metadata: Any) -> None:
    """Give every expert a slot that is not spare, before SGLang loads weights, or raise ValueError for a file."""
    spare, topology = LAYERS.settings.spare_slots, topology_of(metadata)
    tables, experts = metadata.physical_to_logical_map_cpu, metadata.num_logical_experts
    missing = only_spare(tables, experts, topology.num_ranks, spare)
    if not len(missing):
        return
    if moe().init_expert_location != "trivial":
        layer, expert = missing[0].tolist()
        raise ValueError(
            f"--init-expert-location has expert {expert} of layer {layer} in spare slots alone, the last {spare} of "
            f"each rank ({SPARE.name}): pass --init-expert-location trivial, or a file whose other slots hold every "
            "expert"
        )
    placed = in_order(tables, experts, topology, spare)
    write_maps(metadata, range(len(tables)), fill_spare_slots(placed, torch.ones(len(tables), experts)))


def write_maps(metadata: Any, layers: Sequence[int], tables: Tensor, listed: Tensor | None = None) -> None:
    """Write [L, P] the experts of some layers' slots into SGLang's maps, in place. `listed`: [L, P] with -1 in the
    slots that the lists of replicas leave out; None: they list all."""
    experts, slots = metadata.num_logical_experts, metadata.num_physical_experts
    index = torch.tensor(list(layers))
    shown = (tables if listed is None else listed)[index].unsqueeze(1)
    there = shown == torch.arange(experts).view(1, experts, 1)
    lists = torch.where(there, torch.arange(slots), slots).sort(dim=-1).values
    lists = torch.where(lists == slots, -1, lists)
    for target, values in (
        (metadata.physical_to_logical_map, tables[index]),
        (metadata.physical_to_logical_map_cpu, tables[index]),
        (metadata.logical_to_all_physical_map, lists),
        (metadata.logical_to_all_physical_map_cpu, lists),
        (metadata.logical_to_all_physical_map_num_valid, (lists >= 0).sum(-1)),
    ):
        target[index.to(target.device)] = values.to(target.device, target.dtype)


def hide(metadata: Any, layers: Sequence[int]) -> None:
    """Leave spare slots out of SGLang's lists of replicas. Where SGLang chooses by itself (detached, switched off, rows
    of padding, weight updates), it then chooses slots that no batch fills."""
    tables = metadata.physical_to_logical_map_cpu
    size, spare = tables.shape[1] // metadata.ep_size, LAYERS.settings.spare_slots
    resident = tables.view(len(tables), -1, size)[:, :, : size - spare]
    write_maps(metadata, layers, tables, with_empty(resident.flatten(1), metadata.ep_size, spare))


def bind(metadata: Any, weights: Mapping[int, Any], modules: Mapping[int, torch.nn.Module]) -> None:
    """Let experts travel from now on; all ranks call it when the model is loaded. `weights`: by layer the stacks [S,
    ...] that SGLang moves when experts move; `modules`: :func:`expert_modules`."""
    layers = spares()
    for i, stacks in weights.items():
        check_stacks(i, stacks, parameters_of(modules.get(i)), layers[i].size)
    backend = node_backend(topology_of(metadata))
    for i, stacks in weights.items():
        if backend.reads_peers:
            rehome(backend, stacks, parameters_of(modules.get(i)))
        layers[i].stacks, layers[i].backend, layers[i].module = stacks, backend, modules.get(i)
    hide(metadata, range(metadata.num_layers))


def node_backend(topology: Topology) -> Backend:
    """Return how experts travel between the ranks of this node; all ranks call it together."""
    engine_group, size = LAYERS.engine_group(), topology.ranks_per_node
    first = LAYERS.own_rank() // size * size
    ranks = dist.get_process_group_ranks(engine_group)[first : first + size]
    # Synchronised among these ranks alone: ranks of other nodes and pipeline stages make groups of their own.
    group = dist.new_group(ranks, backend=dist.get_backend(engine_group), use_local_synchronization=True)
    backend = make_backend(CollectiveGroup(Topology(size), group), None, LAYERS.device)
    if LAYERS.device.type == "cuda" and not backend.reads_peers:
        raise ValueError(
            f"{SPARE.name} must come with GPUs that read each other's memory within a node, got {backend.why}"
        )
    return backend


def rehome(backend: Backend, stacks: list[Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Move one layer's stacks, in place, to memory that the ranks of the node read. Raises ValueError if a stack
    belongs to no parameter: the experts would be computed from the old memory."""
    for j, stack in enumerate(stacks):
        users = [parameter for parameter in parameters.values() if parameter.data_ptr() == stack.data_ptr()]
        if not users:
            raise ValueError(
                f"{SPARE.name} must come with expert weights that are parameters, got a tensor {list(stack.shape)}: "
                f"unset {SPARE.name}"
            )
        shown = backend.new_stack(stack, len(stack))
        shown.copy_(stack)
        for parameter in users:
            parameter.data = shown
        stacks[j] = shown


def expert_modules(model: Any) -> dict[int, torch.nn.Module]:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    experts = [module for module in model.modules() if isinstance(module, FusedMoE)]
    return {module.layer_id: module for module in experts}


def parameters_of(experts: torch.nn.Module | None) -> dict[str, Tensor]:
    return {} if experts is None else dict(experts.named_parameters())


def check_model(model: Any) -> None:
    """Raise ValueError if SGLang's rebalances would move a part of an expert without its weights."""
    modules = expert_modules(model)
    for i, stacks in dict(getattr(model, "routed_experts_weights_of_layer", {})).items():
        if i in modules:
            check_whole(i, stacks, parameters_of(modules[i]))


def check_whole(layer: int, stacks: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError if SGLang's list of a layer lacks weights of its experts, which would not move with the rest."""
    listed = {stack.data_ptr() for stack in stacks}
    names = [name for name, tensor in parameters.items() if tensor.data_ptr() in listed]
    for part in ("w13", "w2"):
        if not any(name.startswith(f"{part}_") and not name.endswith(NO_WEIGHTS) for name in names):
            raise ValueError(
                f"layer {layer}: SGLang moves {', '.join(names) or 'nothing'} of an expert and not its {part} weights, "
                "as with gpt-oss in MXFP4 and Triton kernels: pass another --moe-runner-backend, or neither "
                f"--enable-eplb nor {SPARE.name}"
            )


# Ends of the names of parameters that belong to an expert's weights.
NO_WEIGHTS = (
    "bias", "scale", "scales", "scale_inv", "scale_2", "zeros", "qzeros", "zero_point", "g_idx", "shape",
)  # fmt: skip


def check_stacks(layer: int, stacks: Sequence[Tensor], parameters: Mapping[str, Tensor], size: int) -> None:
    for stack in stacks:
        if not stack.is_contiguous() or len(stack) != size:
            how = "contiguous" if stack.is_contiguous() else "not contiguous"
            raise ValueError(
                f"layer {layer}: {SPARE.name} must come with contiguous expert weights of {size} slots, got "
                f"{list(stack.shape)}, {how}: pass another --moe-runner-backend, or unset {SPARE.name}"
            )
    check_whole(layer, stacks, parameters)


def moved(metadata: Any, layers: Sequence[int]) -> None:
    """Follow a rebalance of some layers: SGLang has written its new map's experts into their spare slots, too."""
    for i, spare in spares().items():
        if i in layers:
            spare.hold(LAYERS.tables[i])
    if spares():
        hide(metadata, layers)


def meet() -> None:
    """Let later writes to expert weights wait for ranks that still read them. All ranks call it together."""
    layers = spares().values()
    for spare in layers:
        spare.wait()
    for backend in {spare.backend for spare in layers if spare.backend is not None}:
        backend.meet()


def report() -> None:
    rows = {i: spare.counts.tolist() for i, spare in spares().items() if spare.stacks is not None}
    rows = {i: row for i, row in rows.items() if row[COUNTS.index("copies")]}
    if not rows:
        return
    layers = spares()
    for i, row in rows.items():
        layers[i].counts.zero_()
        arrivals = row[COUNTS.index("arrivals")]
        LAYERS.metrics.add("experts_travelled_total", arrivals)
        stacks = layers[i].stacks or ()
        LAYERS.metrics.add("bytes_travelled_total", arrivals * sum(stack[0].nbytes for stack in stacks))
    if LAYERS.engine_rank():
        return
    fills, moves, *_ = map(sum, zip(*rows.values(), strict=True))
    last, filled = ([row[i] / row[4] for row in rows.values()] for i in (2, 3))
    LAYERS.metrics.add("fills_total", fills)
    LAYERS.metrics.set_imbalance("prefill", "last_fill", last)
    LAYERS.metrics.set_imbalance("prefill", "filled", filled)
    log.info(
        f"isoload SGLang: spare slots of {len(rows)} layers were filled {fills} times by {moves} experts; imbalance of "
        f"prefill {sum(last) / len(last):.3f} over the last fill, {sum(filled) / len(filled):.3f} filled"
    )


def update_expert_weights(original: Original, **kwargs: Any) -> Any:
    """Wrap _update_expert_weights: SGLang copies replicas from where its old map lists them, so list no spare slot."""
    old, layers = kwargs["old_expert_location_metadata"], spares()
    meet()
    for i in set(kwargs["update_layer_ids"]) & set(layers):
        spare = layers[i]
        old.physical_to_logical_map_cpu[i].view(-1, spare.size)[:, spare.size - spare.num_slots :] = -1
    return original(**kwargs)


def update_weights(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the weight updates of SGLang, which write each expert to its listed slots: empty all spare slots."""
    meet()
    for spare in spares().values():
        spare.drop()
    result = original(self, *args, **kwargs)
    stop_where_replaced()
    return result


def stop_where_replaced() -> None:
    """Let no expert travel any more if some layer computes with other memory than its stacks; the same on all ranks."""
    replaced = []
    for i, spare in spares().items():
        present = {parameter.data_ptr() for parameter in parameters_of(spare.module).values()}
        if spare.stacks is not None and any(stack.data_ptr() not in present for stack in spare.stacks):
            replaced.append(i)
    if replaced:
        for spare in spares().values():
            spare.stacks = None
        log.error(
            f"isoload SGLang: a weight update has replaced the memory of experts in layers {replaced}: no expert "
            "travels from now on. Restart to let experts travel again"
        )


def wait_for_experts(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the functions that compute the experts of a layer: wait for the weights that travel."""
    spare = spares_of(self)
    if spare is not None:
        spare.wait()
    return original(self, *args, **kwargs)


def spares_of(experts: Any) -> Spare | None:
    layer = LAYERS.by_id.get(getattr(experts, "layer_id", -1))
    return layer.spare if layer is not None and isinstance(layer.spare, Spare) else None


def home_slots(layer_id: int, slots: Tensor) -> Tensor:
    """Return the home slots of routed slots [T, K], from which SGLang's recorder derives experts; -1 stays -1."""
    layer = LAYERS.layer(layer_id)
    if layer is None or not isinstance(layer.spare, Spare):
        return slots
    filled = layer.spare.filled
    experts = filled.slot_to_expert[slots.clamp(min=0).long()].long()
    homes = filled.home_slot[experts.clamp(min=0)].to(slots.dtype)
    return torch.where((slots >= 0) & (experts >= 0), homes, slots)
