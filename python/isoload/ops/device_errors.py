"""What ops on CUDA found wrong in values, at which they do not wait to look: noted on the device, read when asked."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

# One per bit of csrc/cuda/cuda.h's Fault.
RULES = (
    "count: topk_ids must be in -1..E-1",
    "plan_exact: loads, fixed and pour must not be negative, must sum to less than 2^31 copies, and loads be 0 for "
    "an expert without a replica",
    "plan_active: loads must not be negative, must sum to less than 2^31 copies, and be 0 for an expert without a "
    "replica",
    "plan_waterfill: copies and tokens must not be negative, must sum to less than 2^31 copies, and fit the limits",
    "share: quota must conserve loads",
    "share_alone: counts must be part of the loads that quota was made from",
    "route: topk_ids must be in -1..E-1",
    "route: topk_ids must hold each expert as often as its share says",
    "route_sampled: topk_ids must be in -1..E-1",
    "route_sampled: weights must be positive for a replica of every expert that is routed",
    "route_shared: slots must be in -1..P-1",
    "route_shared_sampled: slots must be in -1..P-1",
    "append_shared_expert: slots and ranks must be at least -1, and what they become less than 2^31",
    "plan_lp: loads and base must not be negative, must sum to less than 2^31 copies, and loads be 0 for an expert "
    "without a replica",
    "round_split: loads must not be negative, must sum to less than 2^31 copies, and be 0 for an expert without a "
    "replica",
    "plan_spill: loads and fixed must not be negative and must sum to less than 2^31 copies, and a rank be alive",
    "borrow: slot_to_expert must be in -1..E-1, and what it borrows have a home with an address",
    "borrow_backward: slot_to_expert must be in -1..E-1, and what it borrows have a home, on this rank within totals",
)


def device_errors(device: torch.device | str) -> int:
    """The rules that ops on a device found broken since this was last asked: bit i for RULES[i].

    On CUDA an op with a wrong value goes on (an id out of range counts as -1) and sets its bit in a word of the
    device's memory, whose address captured graphs hold. This takes the word and leaves 0, after what the current
    stream still has to do, and waits for it. Ops on the CPU raise at once: there it is 0.
    """
    taken: Tensor = torch.ops.isoload.device_errors(torch.empty(0, device=device))
    return int(taken)


def check_device(device: torch.device | str) -> None:
    """Raises for the rules that ops on a device found broken since the last look; see :func:`device_errors`.

    With ISOLOAD_CHECK=1 every op does so itself, except in a graph that is being captured.

    Raises:
        ValueError: naming every op, its argument and the rule.
    """
    if broken := device_errors(device):
        rules = [rule for bit, rule in enumerate(RULES) if broken >> bit & 1]
        raise ValueError(f"{'; '.join(rules)} (found on {device}; ISOLOAD_CHECK=1 finds the call)")


def check_each(args: tuple[Any, ...]) -> None:
    """:func:`check_device` of an op's arguments under ISOLOAD_CHECK=1."""
    if torch.compiler.is_compiling() or os.environ.get("ISOLOAD_CHECK") != "1":
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        check_device(device)
