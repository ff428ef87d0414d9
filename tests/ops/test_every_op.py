"""What holds of every op alike: what it refuses, its schema and fake, inputs with gaps, no layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from isoload.ops import library
from support.refusals import GOOD, REFUSALS, Refusal, raw_call
from support.sweeps import slow

# Other good calls, as changes of the first. With three layers:
LAYERED = {
    "replica_tables": "slot_to_expert=slot_to_expert.expand(3, 4)",
    "plan_exact": "loads=LOADS.expand(3, 4, 4), tables=OF_LAYERS, fixed=NONE.expand(3, 4) + 1, ticks=int32(5, 6, 7, 8),"
    "pour=int32(0, 5, 9), objective='local', ranks_per_node=2, tolerance=0.001",
    "of_a_rank": "loads=LOADS.expand(3, 4, 4), tables=OF_LAYERS, fixed=NONE.expand(3, 4) + 1, ticks=int32(1, 2, 3, 4),"
    "pour=int32(0, 5, 9), objective='local', ranks_per_node=2, tolerance=0.001, budget=7, rank=0",
    "plan_active": "loads=LOADS.expand(3, 4, 4), tables=OF_LAYERS",
    "plan_lp": "loads=LOADS.expand(3, 4, 4), tables=OF_LAYERS, dtype=torch.float64,"
    "base=torch.ones(3, 4).double()",
    "round_split": "split=split.double().expand(3, 8), loads=loads.expand(3, 4), tables=OF_LAYERS",
    "plan_joint": "loads=loads.expand(3, 4, 5), tables=placed(*SHARED, layers=3), ticks=int32(1, 2, 3, 4),"
    "objective='local', ranks_per_node=2, tolerance=0.001, budget=7, rank=0",
    "plan_fill": "loads=loads.expand(3, 2, 4), slot_to_expert=slot_to_expert.expand(3, 6), alive=~NOBODY,"
    "home_slot=home_slot.expand(3, 4), fixed=int32(1, 2).expand(3, 2), ranks_per_node=1",
    "top_up": "loads=loads[0].expand(3, 4), slot_to_expert=slot_to_expert.expand(3, 6), alive=~NOBODY,"
    "home_slot=home_slot.expand(3, 4), fixed=int32(1, 2).expand(3, 2), ranks_per_node=1",
    "plan_waterfill": "copies=copies.expand(3, 4, 4), tokens=tokens.expand(3, 4), per_token=2, ranks_per_node=2,"
    "ticks=tokens, limits=9 * tokens",
    "share": "loads=loads.expand(3, 4, 4), quota=quota.expand(3, 8), tables=OF_LAYERS, rank=1, order='rank_major'",
    "share_by_rank": "loads=loads.expand(3, 4, 4), quota=quota.expand(3, 8), tables=OF_LAYERS, order='rank_major'",
}
OTHERS = [
    ("count", "num_shared=2"),
    ("count", "topk_ids=torch.zeros(300, 4).int(), num_experts=3"),
    ("count", "topk_ids=torch.zeros(300, 4).int(), num_experts=3, num_shared=2"),
    ("count", "topk_ids=torch.zeros(0, 4).int()"),
    ("plan_own", "fixed=NONE + 1, ticks=NONE + 1024, source=1"),
    ("balance_own", "topk_ids=topk_ids.int(), ticks=NONE + 1024, source=1"),
    ("balance_same", "topk_ids=topk_ids.int(), ranks_per_node=2"),
    ("route", "counted=ops.count(IDS.int(), 4)"),
    ("route_sampled", "step=torch.tensor(3), rank=1"),
    ("route_shared", "slots=slots.int(), source_quota=3 * source_quota, num_shared=3, rank=1"),
    *[
        ("route_shared_sampled", f"rule='{rule}', step=torch.tensor(3)")
        for rule in ("static", "blog", "blog_all")
    ],
    ("route_shared_sampled", "slots=slots.int(), load=load.long(), tokens=None, rule='static'"),
    (
        "append_shared_expert",
        "slots=slots.int(), weights=weights.double(), ranks=ranks.expand(2, 2), slots_per_rank=5",
    ),
    ("append_shared_expert", "weights=weights.clone().requires_grad_(), weight=0.4"),
    ("group_copies", "first=1, num_slots=3, num_places=4, slots=int32([1, 3], [0, -1])"),
]
CALLS = [*((name, "") for name in GOOD), *LAYERED.items(), *OTHERS]
OF_ADDRESSES = ("borrow", "borrow_backward")  # they stay on the device where the addresses were taken


def test_there_are_calls_of_every_op() -> None:
    listed = (Path(__file__).parents[2] / "csrc" / "ops" / "list.h").read_text()
    called = {raw_call(*call)[0]._schema.name.removeprefix("isoload::") for call in CALLS}
    assert called | {"device_errors"} == set(re.findall(r"^  OP\((\w+),", listed, re.M))


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_refuses(refusal: Refusal) -> None:
    """And writes nothing."""
    given = refusal.arguments()
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.numel() < 2**20]
    before = [x.clone() for x in tensors]
    with pytest.raises(ValueError, match=refusal.pattern()):
        GOOD[refusal.op][0](**given)
    for x, was in zip(tensors, before, strict=True):
        torch.testing.assert_close(x, was, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "change"), [*CALLS[: len(GOOD)], *slow(*CALLS[len(GOOD) :])])
def test_opcheck(name: str, change: str) -> None:
    """Also that only what the schema says is written."""
    op, args = raw_call(name, change)
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not any(x.requires_grad for x in tree_leaves(args) if isinstance(x, Tensor)):
        utils.append("test_aot_dispatch_dynamic")  # adds up integer and float gradients and fails by itself
    torch.library.opcheck(op, args, test_utils=utils)


def with_gaps(tensor: Tensor) -> Tensor:
    wide = tensor.detach().new_full((*tensor.shape, 3), 7)
    wide[..., 1] = tensor.detach()
    return wide[..., 1]


@pytest.mark.parametrize(("name", "change"), [call for call in CALLS if call[0] not in OF_ADDRESSES])
def test_inputs_need_not_be_contiguous_and_stay(name: str, change: str) -> None:
    op, args = raw_call(name, change)

    def results(given: Callable[[Tensor], Tensor]) -> list[Any]:
        new = []
        for argument, value in zip(op._schema.arguments, args, strict=True):
            written = argument.alias_info is not None or argument.name == "parts"  # which must have no gaps
            new.append(tree_map_only(Tensor, torch.clone if written else given, value))
        before = [tree_map_only(Tensor, torch.clone, x) for x in new]
        found = library.call(op, *new)
        for argument, x, was in zip(op._schema.arguments, new, before, strict=True):
            assert argument.alias_info is not None or not isinstance(x, Tensor) or torch.equal(x, was)
        return [
            *tree_leaves(found),
            *(x for x, a in zip(new, op._schema.arguments, strict=True) if a.alias_info),
        ]

    for gaps, none in zip(results(with_gaps), results(torch.clone), strict=True):
        assert torch.equal(gaps, none) if isinstance(none, Tensor) else gaps == none


@pytest.mark.parametrize("name", LAYERED)
def test_no_layers(name: str) -> None:
    op, args = raw_call(name, LAYERED[name])
    of_layers = [x for x in args if isinstance(x, Tensor) and len(x) == 3 and x.dim() > 0]
    none = [x[:0] if any(x is y for y in of_layers) else x for x in args]
    for empty, full in zip(*(tree_leaves(library.call(op, *given)) for given in (none, args)), strict=True):
        assert empty is full is None or (empty.shape == (0, *full.shape[1:]) and empty.dtype == full.dtype)
