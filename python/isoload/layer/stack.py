"""LibraStack: MoE layers that a model calls in order, each of which gets its replicas while the one before computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isoload.cost import CostModel
from isoload.layer.compiled import Choose
from isoload.layer.decoder import Decoder
from isoload.layer.feed import Feed
from isoload.layer.fetch import Fetched, fact_of, fetch, fill_ahead
from isoload.layer.held import run_held
from isoload.layer.moe import MoE
from isoload.layer.stack_checks import check_layers, check_local, count_slots, make_predictor
from isoload.layer.two_stage import Batch, Span, run_planned
from isoload.placement import Placement
from isoload.planning import Gathered
from isoload.predict import Lookahead, Predictor
from isoload.topology import Topology
from isoload.transport import Transport
from isoload.value_checks import values_readable
from isoload.weights.borrow import Borrowed

AHEAD = "slots filled ahead"  # what ranks compare


class LibraStack:
    """Runs layers in two stages, with spare slots filled ahead. Inference only.

    The model calls its layers as before, in order; each call goes through the stack until :meth:`close`. While layer i
    computes, the spare slots of layer i + 1 are filled from predicted loads and their weights travel, into the buffer
    of the pool that layer i leaves alone; those of the first layer while the last one computes. Spare slots of a layer
    for which nothing was fetched stay empty: of one that is called out of order, of the first batch's first layer.

    Args:
        layers: of one transport, with equal experts and spare slots.
        predict: "lookahead" (each layer's own gate on the rows of the one before), "last" or a Predictor. None: nothing
            is filled ahead, policies that borrow fill from the batch's loads.
        norms: for "lookahead": of every layer the module that makes its rows from the residual, and is called right
            before it. The gate then reads the next norm of the residual.
        local: "planned": plan, start dispatch, compute copies that stay on their rank, then the others. "held" (the
            paper's): rows, choices and weights go to all ranks, and what a rank holds of its own copies is computed
            before the plan, which keeps it there. Needs a transport with max_tokens_per_rank.
        slots: most spare slots of a rank that are filled; None = as the policy says; "auto" = so many as can travel
            while a rank computes copies_per_rank copies, by `cost`, at most the spare ones, none if that is too short.
        cost: of experts of the layers' size, for "auto".
        copies_per_rank: that a rank computes in a layer, for "auto".

    Attributes:
        slots: as above, "auto" as a number.
        events: of every layer when the stages of its last batch began and ended, see :class:`Span`.

    Raises:
        ValueError: naming the argument, the rule and the value; on the other ranks naming the rank and the stage.
    """

    def __init__(
        self,
        layers: Sequence[MoE],
        predict: str | Predictor | None,
        norms: Sequence[nn.Module] | None = None,
        local: str = "planned",
        slots: int | str | None = None,
        *,
        cost: CostModel | None = None,
        copies_per_rank: int | None = None,
    ) -> None:
        self.layers, self.local = list(layers), local
        if not self.layers:
            raise ValueError("layers must be at least one, got none")
        placement = self.layers[0].placement
        with self.layers[0].group.agreeing("construction") as facts:
            check_layers(self.layers)
            predictor = make_predictor(predict, self.layers, norms)
            check_local(local, self.layers, predictor is not None)
            self.slots = count_slots(slots, self.layers, cost, copies_per_rank)
            if predictor is None and slots is not None:
                raise ValueError(f"slots must be None where predict is, got {slots!r}")
            described = "nothing" if predictor is None else predictor.describe()
            facts.update(
                {"layers": len(self.layers), "predict": described, "local": local, "slots": self.slots}
            )
        shape = placement.num_routed, placement.num_shared
        self.feed = None if predictor is None else Feed(predictor, *shape)
        self.events: list[dict[str, Span]] = [{} for _ in self.layers]
        self._next = 0
        self._fetched: Fetched | None = None
        self._runs = [partial(self._run, index) for index in range(len(self.layers))]
        for layer, run in zip(self.layers, self._runs, strict=True):
            layer.run_by = run

    @classmethod
    def from_decoder(
        cls,
        layers: Iterable[nn.Module],
        topology: Topology,
        *,
        transport: Transport | None = None,
        placement: Placement | None = None,
        predict: str | Predictor | None = "lookahead",
        local: str = "planned",
        slots: int | str | None = None,
        cost: CostModel | None = None,
        copies_per_rank: int | None = None,
        **how: Any,
    ) -> LibraStack:
        """The stack of a Hugging Face decoder: Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V3 or gpt-oss.

        A BlockExperts takes the place of each MoE block's `experts`; router, auxiliary loss, outputs and the keys of
        state_dict() stay the model's. Hooks on ``post_attention_layernorm`` keep the residual, for "lookahead".

        Args:
            layers: ``model.model.layers``, with the weights of all experts in every process; dense ones are skipped.
            topology: R ranks.
            transport: None = all ranks in this process, which the tokens are dealt to evenly.
            placement: of the routed experts, a layer for each MoE block; None = in order, with 2 spare slots per rank.
            predict, local, slots, cost, copies_per_rank: as of the class.
            **how: policy (default "hedge"), its options, and what else :class:`MoE` takes.

        Raises:
            ValueError: before any block has changed: naming the argument, the rule and the value.
        """
        decoder = Decoder.of(layers)
        if predict == "lookahead":
            predict = Lookahead(decoder.gates(), decoder.norms)
        made = decoder.experts(topology, transport, placement, **{"policy": "hedge", **how})
        stack = cls(
            [experts.layer for experts in made],
            predict,
            local=local,
            slots=slots,
            cost=cost,
            copies_per_rank=copies_per_rank,
        )
        for block, experts in zip(decoder.blocks, made, strict=True):
            block.experts = experts
        return stack

    def close(self) -> None:
        """Gives the layers back: from now on each runs by itself."""
        for layer, run in zip(self.layers, self._runs, strict=True):
            if layer.run_by is run:  # not of another stack since
                layer.run_by = None
        if self.feed is not None:
            self.feed.close()
        self.forget()

    def forget(self) -> None:
        """Drops what was fetched ahead: on all ranks, after expert Parameters have changed."""
        self._fetched = None

    def _run(self, index: int, rows: list[Tensor], choose: Choose, num_tokens: int | None) -> list[Tensor]:
        """One layer's batch; what MoE.run is without a stack."""
        try:
            return self._stages(index, rows, choose, num_tokens)
        except BaseException:
            self.forget()
            self._next = 0
            raise

    def _stages(self, index: int, rows: list[Tensor], choose: Choose, num_tokens: int | None) -> list[Tensor]:
        layer, fetched = self.layers[index], self._take(index)
        chosen, beside = layer.choices(rows, partial(self._checked, index, fetched, choose)), None
        if self.feed is not None:
            chosen, beside = self.feed.count(index, chosen)
        facts = {AHEAD: fact_of(None if fetched is None else fetched.filled)}
        gathered = layer.gather(chosen, num_tokens, beside, facts)
        filled, borrowed = None, None
        if gathered.planned and fetched is not None:
            filled, borrowed = fetched.filled, fetched.borrowed
        elif gathered.planned and (self._fills_ahead(layer) or self.local == "held"):
            filled = layer.balancer.placed_on(gathered.loads.device)
        if borrowed is not None:
            borrowed.begin("borrow")  # again, if others took its buffer
        batch = Batch(layer, chosen, gathered, filled, borrowed, partial(self._fetch, index, gathered))
        self.events[index] = batch.spans
        return (run_held if self.local == "held" and gathered.planned else run_planned)(batch)

    def _take(self, index: int) -> Fetched | None:
        """What was fetched for a layer, if it is the one that comes next."""
        fetched, self._fetched = self._fetched, None
        in_order, self._next = index == self._next, (index + 1) % len(self.layers)
        if self.feed is not None and (index == 0 or not in_order):
            self.feed.restart()
        return fetched if in_order and fetched is not None and fetched.is_placed else None

    def _checked(
        self, index: int, fetched: Fetched | None, choose: Choose
    ) -> Sequence[tuple[Tensor, Tensor]]:
        """The layer's choices, once nothing on this rank stands against its run or the fetch that follows."""
        if torch.is_grad_enabled():
            raise ValueError("a LibraStack must run under torch.no_grad(), got gradients recorded")
        if fetched is not None:
            fetched.check()
        self.layers[self._next]._check_weights()
        return choose()

    def _fills_ahead(self, layer: MoE) -> bool:
        return self.feed is not None and layer.policy.ahead

    def _fetch(self, index: int, gathered: Gathered, beside: Borrowed | None) -> Borrowed | None:
        """Fetches for the layer after this one."""
        if self.feed is None:
            return None
        layer, filled, failure = self.layers[self._next], None, None
        try:
            loads = self.feed.predict(index, gathered)
            if loads is not None and self.slots != 0 and self._fills_ahead(layer):
                filled = fill_ahead(layer, loads, self.slots)
        except Exception as error:
            failure = error
        # No exchange can be begun with slots that differ: that of weights would abort the process.
        if self.feed.may_differ and gathered.planned and values_readable(gathered.loads):
            facts = [[fact_of(filled)]] * len(layer.group.ranks)
            layer.group.agree("fetch", [AHEAD], facts, gathered.loads.device, failure, "plan")
        elif failure is not None:
            raise failure
        if filled is None:
            return None
        self._fetched = fetch(layer, filled, beside)
        return self._fetched.borrowed
