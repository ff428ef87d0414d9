"""LibraStack: MoE layers called in order; each layer's borrowed experts travel while the previous layer computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from isoload.balancing.known_routes import KnownPlan
from isoload.balancing.planning import Gathered, fill
from isoload.balancing.prediction import Last, Linear, LoadsPredictor, Lookahead, Predictor
from isoload.checks import capturing, values_readable
from isoload.layer.blocks import BlockGate, find_blocks, is_known, no_gate, put_in, take_over
from isoload.layer.compiled import Choose
from isoload.layer.moe import MoE
from isoload.layer.predictor_inputs import PredictorInputs
from isoload.layer.routers import Gate
from isoload.layer.two_stage import (
    Batch,
    Fetched,
    KnownBatch,
    KnownStages,
    Span,
    run_held,
    run_planned,
    runs_apart,
)
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies.borrowing import may_keep_local
from isoload.policies.plan import in_backward
from isoload.times import Times
from isoload.topology import Topology
from isoload.transport import Call, Transport, checksum
from isoload.transport.row_dispatcher import RowDispatcher
from isoload.weights.borrowing import Borrowed
from isoload.weights.quantised import per_element
from isoload.wording import not_one_of

LOCALS = ("planned", "held")
KNOWN = "known"  # predict= of a stack whose layers take plans that were made ahead


def check_layers(layers: Sequence[MoE]) -> None:
    facts, ids = facts_of(layers[0]), set[int]()
    for i, layer in enumerate(layers):
        if layer.run_by is not None or id(layer) in ids:
            raise ValueError(f"layers must be in one stack at a time and only once, got layer {i} again")
        ids.add(id(layer))
        if (counts := layer.balancer.own_counts) is not None:
            raise ValueError(
                f"layers must have loads='gathered' in a stack, which plans by all ranks' loads, got {counts.loads!r} "
                f"in layer {i}"
            )
        for name, value in facts_of(layer).items():
            if value != facts[name]:
                raise ValueError(
                    f"layers must have the same {name}, got {facts[name]} in layer 0 and {value} in layer {i}"
                )
        if layer.transport is not layers[0].transport:
            raise ValueError(f"layers must share one transport, got another in layer {i}")


def facts_of(layer: MoE) -> dict[str, object]:
    placement, stored = layer.placement, layer._ranks()[0].stored()
    shapes = ", ".join(f"{name} {list(stack.shape[1:])}" for name, stack in stored.items())
    return {
        "num_ranks": placement.topology.num_ranks,
        "num_experts": placement.num_routed,
        "num_shared": placement.num_shared,
        "spare_slots": placement.spare_slots,
        "experts": f"{shapes} {stored['down'].dtype} on {stored['down'].device.type}",
        "borrow": None if layer.borrowing is None else layer.borrowing.backend.name,
    }


def check_local(local: str, layers: Sequence[MoE], predicts: bool) -> None:
    if local not in LOCALS:
        raise ValueError(not_one_of("local", LOCALS, local))
    if local == "planned":
        return
    dispatcher = layers[0].dispatcher
    by_rank = isinstance(dispatcher, RowDispatcher) and not dispatcher.adds_in_nodes
    if not by_rank or dispatcher.max_tokens_per_rank is None:
        raise ValueError(
            "local='held' needs a LocalTransport or CollectiveTransport with max_tokens_per_rank and "
            f"dispatch='rank', got a {type(dispatcher).__name__} with "
            f"max_tokens_per_rank={dispatcher.max_tokens_per_rank}"
        )
    for policy in (layer.policy for layer in layers):
        if policy.borrows and not (policy.ahead and predicts):
            raise ValueError(
                f"local='held' needs slots filled ahead, but policy {policy.name} fills them from the batch's own loads"
            )
        if not may_keep_local(policy):
            raise ValueError(
                f"local='held' does not support policy {policy.name}, which samples or fixes the share"
            )


def check_host_plans(local: str, layers: Sequence[MoE], predicts: bool) -> None:
    """Raise ValueError unless the host waits of a policy that plans on the CPU overlap local compute."""
    for policy in (layer.policy for layer in layers):
        if not policy.plans_on_host or not runs_apart(layers[0]._ranks()[0].row_of_slot.device):
            continue
        borrowing = layers[0].borrowing
        early = local == "planned" and borrowing is not None and borrowing.waits_for_plan
        if not (policy.ahead and predicts and (policy.keeps_local or local == "held")) or early:
            raise ValueError(
                f"policy {policy.name} must plan during local compute, because the host waits for the loads: it needs "
                "predict, slots filled ahead, copies that stay local and borrow='pull' or local='held', got "
                f"ahead={policy.ahead}, keeps_local={policy.keeps_local}, local={local!r} and predict="
                f"{'given' if predicts else 'None'}: use libra, hedge or llep"
            )


def make_predictor(
    predict: str | Predictor | None, layers: Sequence[MoE], norms: Sequence[nn.Module] | None
) -> Predictor | None:
    if norms is not None and predict != "lookahead":
        raise ValueError(f"norms must be None unless predict is 'lookahead', got {len(norms)}")
    if predict is None or predict == KNOWN:
        return None
    if predict == "lookahead":
        if any(layer.gate is no_gate for layer in layers):
            raise ValueError("predict must not be 'lookahead' for layers without gates: see from_decoder")
        predict = Lookahead([layer.gate for layer in layers], norms)
    elif predict == "last":
        predict = Last(len(layers))
    if not isinstance(predict, Predictor):
        raise ValueError(f"predict must be lookahead, last, known or a Predictor, got {predict!r}")
    if not any(layer.policy.ahead for layer in layers):
        raise ValueError(
            "predict= needs a policy that prefetches experts (hedge, libra, libra_published), got "
            f"{predict.describe()} for {layers[0].policy.name}"
        )
    num_experts = layers[0].placement.num_routed
    if predict.num_layers != len(layers) or predict.num_experts not in (None, num_experts):
        raise ValueError(
            f"predict must be of {len(layers)} layers and {num_experts} experts as the stack, "
            f"got {predict.num_layers} and {predict.num_experts}"
        )
    hidden = layers[0]._ranks()[0].stored_down.shape[1]
    for i, gate in enumerate(predict.gates if isinstance(predict, Lookahead) else ()):
        if isinstance(gate, Gate) and gate.weight.shape != (num_experts, hidden):
            raise ValueError(
                f"gates must be [{num_experts}, {hidden}] as the layers, got {list(gate.weight.shape)} for layer {i}"
            )
    for i, norm in enumerate((predict.norms or ()) if isinstance(predict, Lookahead) else ()):
        if not isinstance(norm, nn.Module):
            raise ValueError(f"norms must be modules, whose input is kept, got {norm!r:.60} for layer {i}")
    return predict.to(layers[0]._ranks()[0].row_of_slot.device) if isinstance(predict, Linear) else predict


def refuse_cost(cost: object) -> None:
    if cost is not None:
        raise ValueError(
            "cost= was removed: use times=isoload.times.load(FILE), which isoload measure writes"
        )


def count_slots(
    slots: int | str | None,
    layers: Sequence[MoE],
    times: Times | None,
    copies_per_rank: int | None,
    memory: float | None,
) -> tuple[int | None, str | None]:
    """Return the most spare slots of a rank that a stack fills, and the limit's name, see :class:`LibraStack`."""
    placement, down = layers[0].placement, layers[0]._ranks()[0].stored_down
    if slots == "auto":
        if times is None or copies_per_rank is None:
            raise ValueError(
                f"slots must come with times and copies_per_rank if 'auto', got {times}, {copies_per_rank}"
            )
        sizes = down.shape[1], down.shape[2] * per_element(down.dtype)
        if not isinstance(times, Times):
            raise ValueError(f"times must be what isoload.times.load returns, got {times!r:.60}")
        measured = times.experts.hidden, times.experts.intermediate
        if measured != sizes:
            raise ValueError(
                f"times must be of the layers' experts, {sizes[0]} x {sizes[1]}, got {measured[0]} x {measured[1]}"
            )
        if memory is not None and not 0 <= memory < inf:
            raise ValueError(f"memory must be a number of bytes from 0 on, or None, got {memory!r}")
        resident = placement.slots_per_rank - placement.spare_slots
        bounds = {
            "time": times.moves_in_time(copies_per_rank, resident),
            "spare slots": placement.spare_slots,
        }
        if memory is not None:  # one layer's weights are fetched while those of the previous layer are in use
            expert_bytes = sum(stack[0].nbytes for stack in layers[0]._ranks()[0].stored_rows())
            bounds["memory"] = int(memory // (2 * expert_bytes))
        least = min(bounds, key=bounds.__getitem__)
        return bounds[least], least
    if (times, copies_per_rank, memory) != (None, None, None):
        raise ValueError(
            f"times, copies_per_rank and memory must be None unless slots is 'auto', got slots={slots!r}"
        )
    if slots is None:
        return None, None
    if not isinstance(slots, int) or not 1 <= slots <= placement.spare_slots:
        raise ValueError(
            f"slots must be None, 'auto' or in 1..spare_slots={placement.spare_slots}, got {slots!r}"
        )
    return slots, None


AHEAD = "slots filled ahead"  # fact that ranks compare
# Names of the norm before the block in decoder layers. The last name means another norm if AFTER is there, too.
NORMS = (
    "pre_feedforward_layernorm",
    "pre_mlp_layernorm",
    "pre_ff_layernorm",
    "ffn_norm",
    "post_attention_layernorm",
)
AFTER = "post_feedforward_layernorm"


class LibraStack:
    """Stack of MoE layers that runs each layer in two stages and prefetches borrowed experts, see docs/libra.md.

    The model calls its layers in order, through the stack until :meth:`close`. While layer i computes, the spare slots
    of layer i + 1 are filled from predicted loads, and their weights travel; the first layer's while the last layer
    computes. Spare slots without prefetched weights stay empty: in a layer that is called out of order, and in the
    first layer of the first batch. For inference, and with predict="known" for training. Equal arguments on all ranks.

    Args:
        layers: layers of one transport, with equal experts and spare slots.
        predict: "lookahead" (each layer's gate on the rows of the previous layer), "last" (the previous batch) or a
            Predictor. None: no prefetching; policies that borrow fill from the batch's loads. "known": every call has
            its plan (``layer(x, plan=plans[micro_batch, layer])``), whose successor's experts are fetched.
        norms: for "lookahead": for every layer the module that computes its rows from the residual right before the
            layer. The gate then reads the next norm of the residual.
        local: "planned": plan, start dispatch, compute local copies, then received ones. "held" (the paper's): rows go
            to all ranks, and local copies are computed before the plan. Needs a transport with max_tokens_per_rank.
        slots: most spare slots of a rank that are filled. None: the policy's option. "auto": as many as can travel
            while a rank computes copies_per_rank copies, by `times`, and fit into `memory`;
            the attribute then has this number.
        times: for "auto": measured times of experts of this size, from isoload.times.load(file).
        copies_per_rank: for "auto": copies that a rank computes in a layer.
        memory: for "auto": bytes of a rank for the borrowed weights of two layers. None: no limit.

    Attributes:
        bounded_by: limit of "auto": "time", "memory" or "spare slots"; else None.
        events: for every layer the begin and end of the stages of its last batch, by stage, see :class:`Span`.
    """

    def __init__(
        self,
        layers: Sequence[MoE],
        predict: str | Predictor | None,
        norms: Sequence[nn.Module] | None = None,
        local: str = "planned",
        slots: int | str | None = None,
        *,
        times: Times | None = None,
        copies_per_rank: int | None = None,
        memory: float | None = None,
        cost: object = None,
    ) -> None:
        refuse_cost(cost)
        self.layers, self.local = list(layers), local
        if not self.layers:
            raise ValueError("layers must be at least one, got none")
        placement = self.layers[0].placement
        with self.layers[0].group.agreeing("construction") as facts:
            check_layers(self.layers)
            predictor = make_predictor(predict, self.layers, norms)
            check_local(local, self.layers, predictor is not None)
            if predict == KNOWN and local != "planned":
                raise ValueError(f"local must be 'planned' for predict='known', got {local!r}")
            if predict != KNOWN:  # known plans were made before
                check_host_plans(local, self.layers, predictor is not None)
            self.slots, self.bounded_by = count_slots(slots, self.layers, times, copies_per_rank, memory)
            if predictor is None and slots is not None:
                raise ValueError(f"slots must be None where predict is {predict!r}, got {slots!r}")
            described = str(predict) if predictor is None else predictor.describe()
            facts.update({"layers": len(self.layers), "predict": described})
            facts.update({"local": local, "slots": self.slots})
        routed, shared = placement.num_routed, placement.num_shared
        self.predictor_inputs = None if predictor is None else PredictorInputs(predictor, routed, shared)
        self.known = KnownStages(self.layers) if predict == KNOWN else None
        self.events: list[dict[str, Span]] = [{} for _ in self.layers]
        self._next = 0
        self._fetched: Fetched[PlacedLayers] | None = None
        self._runs = [partial(self._run, index) for index in range(len(self.layers))]
        for layer, run in zip(self.layers, self._runs, strict=True):
            layer.run_by = run

    @classmethod
    def from_decoder(
        cls,
        layers: Iterable[nn.Module],
        topology: Topology | int,
        *,
        transport: Transport | None = None,
        placement: Placement | None = None,
        spare_slots: int | None = None,
        predict: str | Predictor | None = "lookahead",
        local: str = "planned",
        slots: int | str | None = None,
        times: Times | None = None,
        copies_per_rank: int | None = None,
        memory: float | None = None,
        cost: object = None,
        **options: Any,
    ) -> LibraStack:
        """Create the stack of a Hugging Face decoder whose experts transformers fuses, see docs/transformers.md.

        BlockExperts replace the `experts` of each MoE block; all else and the keys of state_dict() do not change. For
        "lookahead", hooks on the norms before the blocks store the residual. An error changes no block.

        Args:
            layers: ``model.model.layers``, with the weights of all experts in every process; dense layers are skipped.
            topology: the ranks, or their number R.
            transport: None: all ranks are virtual ranks of this process, and tokens are split evenly over them.
            placement: placement of the routed experts, one layer per MoE block. None: experts in order.
            spare_slots: experts that a rank can borrow at a time, if no placement is given. None: 2.
            predict, local, slots, times, copies_per_rank, memory: as for the class.
            **options: policy (default "hedge"), its options, and other arguments of :class:`MoE`.
        """
        refuse_cost(cost)
        if predict == KNOWN:
            raise ValueError(
                "predict must not be 'known' in from_decoder, got 'known': pass LibraStack the layers that "
                "isoload.balance(model) returns, and call the model with routes= and plans="
            )
        decoder = list(layers)
        pairs = find_blocks(decoder, "layers")
        blocks = [block for _, block in pairs]
        if placement is not None and len({id(part) for part, _ in pairs}) == len(pairs):
            numbers = [i for i, part in enumerate(decoder) if any(part is holder for holder, _ in pairs)]
            placement = placement.for_model(numbers)
        if predict == "lookahead":
            predict = Lookahead(
                [BlockGate(block) for block in blocks], [norm_before(*pair) for pair in pairs]
            )
        balanced = take_over(
            blocks, topology, transport, placement, spare_slots, **{"policy": "hedge", **options}
        )
        stack = cls(
            [experts.layer for experts in balanced],
            predict,
            local=local,
            slots=slots,
            times=times,
            copies_per_rank=copies_per_rank,
            memory=memory,
        )
        put_in(blocks, balanced)
        return stack

    def close(self) -> None:
        """Detach the layers from the stack, so that each runs by itself, and remove the hooks."""
        for layer, run in zip(self.layers, self._runs, strict=True):
            if layer.run_by is run:  # the layer is not in another stack meanwhile
                layer.run_by = None
        if self.predictor_inputs is not None:
            self.predictor_inputs.close()
        self.forget()

    def forget(self) -> None:
        """Drop prefetched weights. All ranks call it after expert Parameters have changed."""
        self._fetched = None
        if self.known is not None:
            self.known.fetched = None

    def _run(
        self, index: int, rows: list[Tensor], choose: Choose, num_tokens: int | None, plan: KnownPlan | None
    ) -> list[Tensor]:
        try:
            if self.known is not None:
                batch, layer = KnownBatch(self.known, index, plan), self.layers[index]
                return layer.stages(rows, partial(batch.checked, choose), num_tokens, plan, batch)
            if plan is not None:
                raise ValueError(
                    "plan needs a LibraStack with predict='known', or no stack, got a plan: close() the stack first"
                )
            return self._stages(index, rows, choose, num_tokens)
        except BaseException:
            if not in_backward():  # a checkpoint ends its recompute early by an exception
                self.forget()
            self._next = 0
            raise

    def _stages(self, index: int, rows: list[Tensor], choose: Choose, num_tokens: int | None) -> list[Tensor]:
        layer, fetched = self.layers[index], self._take(index)
        chosen = layer.choices(rows, partial(self._checked, index, fetched, choose))
        predicted = None if self.predictor_inputs is None else self.predictor_inputs.count(index, chosen)
        chosen.call.in_gather[AHEAD] = fact_of(None if fetched is None else fetched.source)
        gathered = layer.gather(chosen, num_tokens, predicted)
        filled, borrowed = None, None
        if gathered.planned and fetched is not None:
            filled, borrowed = fetched.source, fetched.borrowed
        elif gathered.planned and (self._fills_ahead(layer) or self.local == "held"):
            filled = layer.balancer.placed_on(gathered.loads.device)
        if borrowed is not None:
            borrowed.begin("borrow")  # fetches again if other layers have used the buffer
        batch = Batch(layer, chosen, gathered, filled, borrowed, partial(self._fetch, index, gathered))
        self.events[index] = batch.spans
        outputs = (run_held if self.local == "held" and gathered.planned else run_planned)(batch)
        layer.count(gathered)
        return outputs

    def _take(self, index: int) -> Fetched[PlacedLayers] | None:
        """Return the prefetched slots of a layer, if it is called in order and its placement has not changed."""
        fetched, self._fetched = self._fetched, None
        in_order, self._next = index == self._next, (index + 1) % len(self.layers)
        if self.predictor_inputs is not None and (index == 0 or not in_order):
            self.predictor_inputs.restart()
        if not in_order or fetched is None or fetched.source.host is not fetched.layer.placement:
            return None
        if index == 0 and capturing(fetched.source.slot_to_expert.device):  # replays do not have them
            return None
        return fetched

    def _checked(
        self, index: int, fetched: Fetched[PlacedLayers] | None, choose: Choose
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """Check that the layer and the following fetch can run on this rank, and return the layer's choices."""
        if torch.is_grad_enabled():
            raise ValueError("a LibraStack must run under torch.no_grad(), got gradients recorded")
        predictor = None if self.predictor_inputs is None else self.predictor_inputs.predictor
        if (
            isinstance(predictor, LoadsPredictor)
            and type(predictor).note is not LoadsPredictor.note  # it stores loads of earlier batches
            and capturing(self.layers[index]._ranks()[0].row_of_slot.device)
        ):
            raise ValueError(
                "predict must not read earlier batches while a CUDA graph is captured, which would replay them, "
                f"got {predictor.describe()}"
            )
        if fetched is not None and not fetched.is_current():
            raise ValueError(
                "expert Parameters must stay as they are while their weights travel ahead: call forget() of the "
                "stack on all ranks after a change, got Parameters that changed since"
            )
        self.layers[self._next]._check_weights()
        return choose()

    def _fills_ahead(self, layer: MoE) -> bool:
        return self.predictor_inputs is not None and layer.policy.ahead

    def _fetch(self, index: int, gathered: Gathered, in_use: Borrowed | None) -> Borrowed | None:
        layer, filled, first = self.layers[self._next], None, self.layers[0].borrowing
        if self.predictor_inputs is None:
            return None
        if self._next == 0 and (
            capturing(gathered.loads.device) or (first is not None and first.pool.in_graphs)
        ):
            return None  # replays of CUDA graphs may overwrite the buffers between batches
        call = Call(layer.group, "plan", gathered.loads.device, {AHEAD: 0})
        with call:
            loads = self.predictor_inputs.predict(index, gathered)
            if loads is not None and self.slots != 0 and self._fills_ahead(layer):
                options = {} if self.slots is None else {"slots": self.slots}
                policy = replace(layer.policy, **options)  # type: ignore[arg-type]
                filled = fill(loads, layer.balancer.placed_on(loads.device), None, policy)
        # Ranks compare their slots first: an exchange of weights for different slots would abort the process.
        if self.predictor_inputs.may_differ and gathered.planned and values_readable(gathered.loads):
            call.facts[AHEAD] = fact_of(filled)
            call.agree("fetch")
        call.raise_failure()
        if filled is None:
            return None
        assert layer.borrowing is not None
        borrowed = layer.borrowing.borrow(filled, in_use, layer.dtype_now())
        self._fetched = Fetched(layer, filled, borrowed)
        return borrowed


def norm_before(layer: nn.Module, block: nn.Module) -> nn.Module:
    """Return the norm of a decoder layer whose output is the block's rows; ValueError if no such norm is known."""
    name = next((n for n in NORMS if isinstance(getattr(layer, n, None), nn.Module)), "")
    # FlexOlmo normalises the outputs of attention and of the block, not the block's rows.
    of_attention = name == NORMS[-1] and hasattr(layer, AFTER)
    # Each of ERNIE-4.5-VL's two blocks receives only a part of the tokens.
    shared = sum(is_known(module) for module in layer.modules()) > 1
    if block is layer or not name or of_attention or shared:
        raise ValueError(
            "predict='lookahead' needs a known norm before the block ('last' does not), got a "
            f"{type(block).__name__} in a {type(layer).__name__}"
        )
    return layer.get_submodule(name)


def fact_of(filled: PlacedLayers | None) -> int:
    """Return a number that is equal on ranks with equal slots: 0 without slots, 1 if the host cannot read them."""
    if filled is None:
        return 0
    slots = filled.slot_to_expert
    return checksum(slots.tolist()) if values_readable(slots) else 1
