"""Attaches isoload to vLLM: all seams are as expected and a known batch passed every hook, or nothing is hooked."""

from __future__ import annotations

import functools
import logging
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from isoload.integrations import attaching
from isoload.integrations.seams import Seam, read_seams
from isoload.integrations.settings import VLLM, Settings
from isoload.integrations.vllm import dispatch, self_check
from isoload.integrations.vllm.layers import MODELS
from isoload.integrations.vllm.placement import make_policy

HOOKS: dict[str, Callable[..., Any]] = {
    "add_model": dispatch.add_model,
    "_commit_eplb_maps": dispatch.commit,
    "_commit_eplb_maps_for_layer": dispatch.commit_layer,
    "eplb_map_to_physical_and_record": dispatch.map_and_record,
    "step": dispatch.step,
}


def attach_or_leave() -> None:
    """What the entry point calls."""
    log_as_vllm()
    attaching.attach_or_leave("vLLM", VLLM, attach)


def attach(settings: Settings, seams: Sequence[Seam] | None = None) -> list[str]:
    """Puts the hooks in place, unless a seam is not as expected or a known batch does not come out right.

    Args:
        settings: what the environment says.
        seams: None = those of the data file.

    Returns:
        What is not as expected, one line each; empty: attached.
    """
    seams = read_seams("vllm") if seams is None else seams
    if found := attaching.not_as_expected(seams, MODELS.start, self_check.faults, settings):
        return found
    for seam in seams:
        if seam.kind == "around":
            hook(seam.target, HOOKS[seam.name])

    from vllm.distributed.eplb.policy import EPLB_POLICIES

    EPLB_POLICIES["default"] = make_policy(settings.placer)  # the only name that vLLM's option takes
    return []


def hook(target: str, around: Callable[..., Any]) -> None:
    """Wraps vLLM's function of a dotted path: in its own place, and where modules have imported it by name."""
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    original = getattr(owner, name)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, hooked)
    for module in [module for key, module in sys.modules.items() if key.startswith("vllm.")]:
        if vars(module).get(name) is original:
            setattr(module, name, hooked)


def log_as_vllm() -> None:
    """vLLM gives handlers to its own logger alone; where the program gave none either, isoload's lines go to them."""
    import vllm.logger  # noqa: F401  # configures it

    log, theirs = logging.getLogger("isoload"), logging.getLogger("vllm")
    if not log.hasHandlers():
        for handler in theirs.handlers:
            log.addHandler(handler)
        log.setLevel(theirs.level)
        log.propagate = False  # handlers that the root gets later would write each line again
