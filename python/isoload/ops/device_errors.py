"""What ops on CUDA found wrong in values, at which they do not wait to look: noted on the device, read when asked."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from isoload.ops.load import RULES, ints, op

__all__ = ["RULES", "check_device", "device_errors", "device_to_check"]

_device_errors = op("device_errors", lambda a: ints(a.like))


def device_errors(device: torch.device | str) -> int:
    """The rules that ops on a device found broken since this was last asked: bit i for RULES[i].

    On CUDA an op with a wrong value goes on (an id out of range counts as -1) and sets its bit in a word of the
    device's memory, whose address captured graphs hold. This takes the word and leaves 0, after what the current
    stream still has to do, and waits for it. Ops on the CPU raise at once: there it is 0.
    """
    return int(error_word(device))


def error_word(device: torch.device | str) -> Tensor:
    """[] int32 on the device: :func:`device_errors` without a wait of the host."""
    word: Tensor = _device_errors(torch.empty(0, device=device))
    return word


def check_device(device: torch.device | str) -> None:
    """Raises for the rules that ops on a device found broken since the last look; see :func:`device_errors`.

    With ISOLOAD_CHECK=1 every op does so itself, except in a graph that is being captured.

    Raises:
        ValueError: naming every op, its argument and the rule.
    """
    raise_broken(device_errors(device), device)


def raise_broken(broken: int, device: torch.device | str) -> None:
    """Raises for the rules of :func:`device_errors`; see :func:`check_device`."""
    if broken:
        rules = [rule for bit, rule in enumerate(RULES) if broken >> bit & 1]
        raise ValueError(f"{'; '.join(rules)} (found on {device}; ISOLOAD_CHECK=1 finds the call)")


def device_to_check(args: tuple[Any, ...]) -> torch.device | None:
    """The CUDA device of an op's arguments if ISOLOAD_CHECK=1 asks for its values now, when it may be waited for."""
    if torch.compiler.is_compiling() or os.environ.get("ISOLOAD_CHECK") != "1":
        return None
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    return device if device.type == "cuda" and not torch.cuda.is_current_stream_capturing() else None
