"""What the layer sees of optimizers: every step, fused ones too, and of which experts the rows of their state are.

An optimizer keeps its state by row. A step notes beside it the experts of the rows (key ``home_experts``, saved and
loaded with the rest), and the next step compares: state of another placement raises. After a step replicas are stale,
whether or not torch counted a version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from isoload.experts.weights import NAMES
from isoload.weights.state import HOMES

if TYPE_CHECKING:
    from isoload.weights.storage import RankWeights

_seen: WeakSet[RankWeights] = WeakSet()
_hooks: list[Any] = []


def see_steps(weights: RankWeights) -> None:
    """From now on every optimizer's steps on these Parameters are seen. For all layers there is one pair of hooks."""
    _seen.add(weights)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def expert_parameters(weights: RankWeights) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and Parameters that an optimizer may hold."""
    for name in NAMES:
        if isinstance(parameter := getattr(weights, name, None), nn.Parameter):
            yield name, parameter


def has_rows(value: object, parameter: nn.Parameter) -> bool:
    """Whether what an optimizer keeps of a Parameter has a row per expert."""
    return isinstance(value, Tensor) and value.shape == parameter.shape


def note_experts(optimizer: Optimizer, weights: RankWeights) -> None:
    """The rows of what the optimizer keeps are those of the layout as it is now."""
    for _, parameter in expert_parameters(weights):
        kept = optimizer.state.get(parameter, {})
        if any(has_rows(value, parameter) for value in kept.values()):
            kept[HOMES] = list(weights.layout.homes)


def check_experts(optimizer: Optimizer, weights: RankWeights) -> None:
    """Raises ValueError if what the optimizer keeps is noted to be of other experts than the rows are now."""
    for name, parameter in expert_parameters(weights):
        noted = optimizer.state.get(parameter, {}).get(HOMES)
        if noted is not None and list(noted) != (homes := list(weights.layout.homes)):
            raise ValueError(
                f"optimizer state of {name} must be of experts {homes}, as the rows of this rank, got {noted}: move "
                "it by load_placement(optimizer=), save and load it by isoload.full_optimizer_state and "
                "isoload.load_full_optimizer_state, or drop it from optimizer.state"
            )


def _before_step(optimizer: Optimizer, _args: Any, _how: Any) -> None:
    for weights in _seen:
        check_experts(optimizer, weights)


def _after_step(optimizer: Optimizer, _args: Any, _how: Any) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for weights in _seen:
        if any(id(parameter) in held for _, parameter in expert_parameters(weights)):
            weights.note_changed()
            note_experts(optimizer, weights)
