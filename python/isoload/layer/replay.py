"""Router replay for blocks of transformers: the experts are given, the gate weights are the router's own.

A :class:`Replay` answers the router's ``torch.topk`` with the given experts and the router's scores of these, so every
family's own arithmetic makes the weights. Shapes: T tokens, L MoE blocks, K experts per token, E experts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isoload.balancing.known_routes import DTYPES, KnownPlan
from isoload.checks import values_readable
from isoload.policies.plan import in_backward

MOST_CALLS = 32  # of a block, whose routes are kept for recomputation
TOPK = (torch.topk, Tensor.topk)
LOST = (
    f"a checkpoint recomputes a call whose routes are lost: run backward after at most {MOST_CALLS} calls with routes, "
    "and do not seed torch with one number before two of them (a random number names the call)"
)


class Replay(TorchFunctionMode):
    """One call of a block whose experts [T, K] are given; -1 = masked. The layer raises a failure on all ranks."""

    def __init__(
        self, block: str, ids: Tensor, num_experts: int, plan: KnownPlan | None, failure: ValueError | None
    ) -> None:
        super().__init__()
        self.block, self.ids, self.num_experts = block, ids, num_experts
        self.plan, self.failure = plan, failure
        self.present = ids.clamp(0, num_experts - 1)  # masked tokens get weights, too, which nothing reads
        self.ambiguous = False  # the recompute of another call draws the same number
        self.replaced = False
        self.entered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._topk(*args, **(kwargs or {})) if func in TOPK and self.failure is None else None
        return func(*args, **(kwargs or {})) if answer is None else answer

    def _topk(self, input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
        """Return the answer to a topk over the experts, or over groups of neighbours; None for any other topk."""
        rows, width, ids = input.shape[:-1], input.shape[-1], self.present
        if dim % input.dim() != input.dim() - 1 or rows.numel() != len(ids):
            return None
        if (width, k) == (self.num_experts, ids.shape[1]):
            self.replaced, chosen = True, ids.view(*rows, k)
            return torch.return_types.topk((input.gather(-1, chosen), chosen))
        if not 1 < width < self.num_experts or self.num_experts % width:
            return None
        # The groups with given experts come first: scores of experts outside of the chosen groups are masked.
        groups = (ids // (self.num_experts // width)).view(*rows, -1)
        best = torch.topk(input.detach().scatter(-1, groups, torch.inf), k, dim=-1).indices
        return torch.return_types.topk((input.gather(-1, best), best))

    def enter(self) -> None:
        self.entered = True
        self.__enter__()

    def leave(self) -> None:
        if self.entered:
            self.entered = False
            self.__exit__(None, None, None)

    def choices(self, num_rows: int, topk_ids: Tensor) -> Tensor:
        """Return the given experts [T, K] int64; raise ValueError if the block did not pass on these experts."""
        if self.failure is not None:
            raise self.failure
        if len(self.ids) != num_rows:
            raise ValueError(
                f"routes must have the {num_rows} tokens of {self.block}, got those of {len(self.ids)} tokens"
            )
        differs = values_readable(topk_ids) and not topk_ids.long().equal(self.present)
        if not self.replaced or topk_ids.shape != self.ids.shape or differs:
            raise ValueError(
                f"routes need a router that chooses K={self.ids.shape[1]} of {self.num_experts} experts by torch.topk, "
                f"got a {self.block} that does not"
            )
        return self.ids


class BlockReplay:
    """Hooks of one block: the routes of its calls, also of those that a checkpoint recomputes, which draw the same
    random number. A recompute raises where it could use another call's experts.
    """

    def __init__(self, block: Any, position: int, model: ModelReplay) -> None:
        self.position, self.model = position, model
        self.calls: OrderedDict[int, Replay] = OrderedDict()  # whose recompute has not begun
        self.has_dropped = False
        block.register_forward_pre_hook(self.begin)
        block.register_forward_hook(self.end, always_call=True)

    def begin(self, block: Any, args: Any) -> None:
        if in_backward():
            state = torch.get_rng_state()
            earlier = self.calls.pop(_draw(), None)
            if earlier is None and not self.has_dropped:
                torch.set_rng_state(state)  # the first call had no routes
                return
            replay = self.again(earlier, block)
        elif (routes := self.model.routes) is None:
            return
        else:
            model, number = self.model, _draw()
            plan = None if model.plans is None or model.failure is not None else model.plans[self.position]
            experts = block.experts.layer.placement.num_routed
            replay = Replay(type(block).__name__, routes[:, self.position], experts, plan, model.failure)
            same = self.calls.get(number)
            if same is not None and not same.ids.equal(replay.ids):
                replay.ambiguous = self.has_dropped = True
            self.calls[number] = replay
            if len(self.calls) > MOST_CALLS:
                self.calls.popitem(last=False)
                self.has_dropped = True
        block.experts.replay = replay
        replay.enter()

    def again(self, earlier: Replay | None, block: Any) -> Replay:
        if earlier is None or earlier.ambiguous:
            none = torch.zeros(0, 1, dtype=torch.int64)
            return Replay(type(block).__name__, none, 1, None, ValueError(LOST))
        return Replay(earlier.block, earlier.ids, earlier.num_experts, earlier.plan, earlier.failure)

    def end(self, block: Any, args: Any, output: Any) -> None:
        replay, block.experts.replay = block.experts.replay, None
        if replay is not None:
            replay.leave()


def _draw() -> int:
    return int(torch.randint(2**63 - 1, (), device="cpu"))


class ModelReplay:
    """Hooks of a model: take ``routes=`` and ``plans=`` from a call, for its MoE blocks, which raise their errors."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.blocks, self.hooks = list(blocks), list[BlockReplay]()
        self.routes: Tensor | None = None  # [T, L, K] int64
        self.plans: list[KnownPlan] | None = None
        self.failure: ValueError | None = None
        model.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
        model.register_forward_hook(self.end, always_call=True)

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if "routes" not in kwargs and "plans" not in kwargs:
            return None
        kwargs = dict(kwargs)
        routes, plans = kwargs.pop("routes", None), kwargs.pop("plans", None)
        if routes is None and plans is None:
            return args, kwargs
        if not self.hooks:
            self.hooks = [BlockReplay(block, i, self) for i, block in enumerate(self.blocks)]
        self.routes, self.failure = torch.zeros(0, len(self.blocks), 1, dtype=torch.int64), None
        try:
            self.plans = None if plans is None else list(plans)
            self.routes = self._checked(routes)
        except ValueError as error:
            self.failure = error
        return args, kwargs

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        self.routes = self.plans = self.failure = None

    def _checked(self, routes: Any) -> Tensor:
        layers = len(self.blocks)
        if not isinstance(routes, Tensor) or routes.dim() not in (3, 4) or routes.dtype not in DTYPES:
            got = (
                f"{list(routes.shape)} {routes.dtype}"
                if isinstance(routes, Tensor)
                else type(routes).__name__
            )
            raise ValueError(f"routes must be a tensor [T, L, K] or [B, S, L, K] of integers, got {got}")
        if routes.shape[-2] != layers:
            raise ValueError(
                f"routes must have the model's {layers} MoE blocks, got {routes.shape[-2]} layers"
            )
        if self.plans is not None and len(self.plans) != layers:
            raise ValueError(f"plans must be of the model's {layers} MoE blocks, got {len(self.plans)}")
        ids = routes.flatten(0, -3).long()
        if not values_readable(ids) or not ids.numel():
            return ids
        experts: int = min(block.experts.layer.placement.num_routed for block in self.blocks)  # type: ignore
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < -1 or high >= experts:
            raise ValueError(f"routes must be in -1..{experts - 1}, got {low if low < -1 else high}")
        if ((ids < 0).any(-1) != (ids < 0).all(-1)).any():
            raise ValueError("routes must have all K experts of a token or -1 in all K, got tokens with some")
        return ids
