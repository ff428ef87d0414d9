"""Plug-in for vLLM's expert-parallel load balancer (EPLB), attached as a general plug-in. See docs/vllm.md.

This module maps hooks to functions, and tests them on a known batch, where they need no model, before it installs any.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from isoload.engines.seams import PlugIn, Seam, read_seams
from isoload.engines.settings import PLACEMENT, VLLM, Settings
from isoload.engines.tables import IDS, SLOTS, is_right, known_balancer, known_placement, replica_lists
from isoload.engines.vllm import dispatch, placement
from isoload.engines.vllm.layers import MODELS, Layer
from isoload.engines.vllm.placement import START, make_policy

HOOKS: dict[str, Callable[..., Any]] = {
    "add_model": dispatch.add_model,
    "_commit_eplb_maps": dispatch.on_layer_committed,
    "_commit_eplb_maps_for_layer": dispatch.on_layer_committed,
    "eplb_map_to_physical_and_record": dispatch.map_and_record,
    "step": dispatch.step,
}
AT_START: dict[str, Callable[..., Any]] = {
    "add_model": placement.add_model,
    "initialize_model": placement.initialize_model,
}


def first_replica(topk_ids: Tensor, *_: Any) -> Tensor:
    """Return every copy's first replica; replaces vLLM's function, which is a GPU kernel."""
    lists = replica_lists(known_placement())
    return lists.logical_to_physical[0, topk_ids.long(), 0].to(topk_ids.dtype)


def check_dispatch() -> bool:
    lists, right = replica_lists(known_placement()), True
    maps = lists.logical_to_physical[0], lists.num_replicas[0]
    runner = SimpleNamespace(do_naive_dispatch_combine=False)
    MODELS.by_map[maps[0].data_ptr()] = Layer(known_balancer(), None, runner, "same")
    for valid in (None, torch.tensor(3, dtype=torch.int32)):
        for record in (True, False):
            loads, rows = torch.zeros(SLOTS.shape[1], dtype=torch.int32), len(IDS) if valid is None else 3
            slots = dispatch.map_and_record(first_replica, IDS, loads, *maps, torch.tensor(record), valid)
            want = torch.bincount(slots[:rows].flatten().long(), minlength=len(loads)) * record
            right &= is_right(slots, rows) and torch.equal(slots[rows:], first_replica(IDS[rows:]))
            right &= torch.equal(loads, want.int())
    return right


def check_policy() -> bool:
    from vllm.distributed.eplb.policy import DefaultEplbPolicy

    loads, known = torch.tensor([[90, 30, 5, 5, 5, 5]], dtype=torch.int32), known_placement()
    maps = [
        policy.rebalance_experts(loads, SLOTS.shape[1], 1, 1, known.topology.num_ranks, SLOTS)
        for policy in (make_policy(MODELS.settings.placer), DefaultEplbPolicy)
    ]
    alike = all(getattr(maps[0], name) == getattr(maps[1], name) for name in ("shape", "dtype", "device"))
    return alike and maps[0].unique().tolist() == list(range(known.num_experts))


CHECKS = {"eplb_map_to_physical_and_record": check_dispatch, "rebalance_experts": check_policy}


def attach_or_leave() -> None:
    log_as_vllm()
    try:
        start_from_file(Settings.read())
    except (OSError, ValueError) as error:
        raise SystemExit(f"isoload: {error}") from None
    PLUG_IN.attach_or_leave()  # afterwards: Balancers are made from the file's locations


def start_from_file(settings: Settings) -> None:
    """Hook the start from ISOLOAD_PLACEMENT, whether isoload chooses replicas or not. Raises ValueError if the engine
    is not as isoload expects, and would ignore the file without a message."""
    if settings.placement is None or settings.mode == "off":
        return
    if wrong := FROM_FILE.attach(settings):
        raise ValueError(
            f"{PLACEMENT.name}={settings.placement:.200}: vLLM is not as isoload expects, so its experts cannot start "
            f"there: {'; '.join(wrong)}; unset {PLACEMENT.name}"
        )


def hook_start(seams: list[Seam], _: Settings) -> None:
    for seam in seams:
        wrap(seam.target, AT_START[seam.name])


def hook(seams: list[Seam], settings: Settings) -> None:
    from vllm.distributed.eplb.policy import EPLB_POLICIES

    for seam in seams:
        if seam.kind == "around":
            wrap(seam.target, HOOKS[seam.name])
    if settings.mode != "shadow":
        EPLB_POLICIES["default"] = make_policy(settings.placer)  # the only name that vLLM's option accepts


def wrap(target: str, around: Callable[..., Any]) -> None:
    """Wrap vLLM's function of a dotted path, in its own module and in modules that have imported it by name."""
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
    """Send isoload's log lines to the handlers of vLLM's logger if the program has set none."""
    import vllm.logger  # noqa: F401  # configures it

    log, theirs = logging.getLogger("isoload"), logging.getLogger("vllm")
    if not log.hasHandlers():
        for handler in theirs.handlers:
            log.addHandler(handler)
        log.setLevel(theirs.level)
        log.propagate = False  # handlers that the root gets later would write each line again


FROM_FILE = PlugIn("vLLM", PLACEMENT, START.start, {}, hook_start, read_seams("vllm_start"))
PLUG_IN = PlugIn("vLLM", VLLM, MODELS.start, CHECKS, hook)


def attach(settings: Settings) -> list[str]:
    wrong = [] if settings.placement is None else FROM_FILE.attach(settings)
    return wrong + PLUG_IN.attach(settings)
