"""A Balancer numbers copies as it counts them, where the route looks the numbers up; it plans and shares in one op."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from isoload import Balancer
from support.small_batches import draw_ids, make_placement


class Called(TorchDispatchMode):
    """The isoload ops that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [op.__name__.split(".")[0]] if op.namespace == "isoload" else []
        return op(*args, **kwargs or {})


def test_a_copy_is_numbered_when_it_is_counted() -> None:
    """So the route looks no further than the plan."""
    rows = draw_ids(4)[0]

    def called(policy: str = "exact", **how: Any) -> list[str]:
        balancer = Balancer(make_placement(), 2, policy, tokens="same", **how)
        with Called() as ops:
            balancer(rows)
        return ops.names

    assert called() == ["balance_same"]
    assert called("even") == ["count", "plan_exact", "share", "route"]
    assert called("dynamic") == ["count", "plan_exact", "route_sampled"]
    assert called(min_tokens=10**6) == ["count"]
