"""isoload inside of vLLM: behind its expert-parallel load balancer (EPLB), attached as a general plug-in.
docs/vllm.md describes it.

layers      the Balancers of all models, made once and refreshed in place
dispatch    hooks of the choice of replicas and of EPLB's state
placement   the policy of rebalances
start       the placement file that vLLM starts from
self_check  a known batch through every hook
"""

from __future__ import annotations

import functools
import logging
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from isoload.engines.seams import PlugIn, Seam, read_seams
from isoload.engines.settings import PLACEMENT, VLLM, Settings
from isoload.engines.vllm import dispatch, self_check, start
from isoload.engines.vllm.layers import MODELS
from isoload.engines.vllm.placement import make_policy

HOOKS: dict[str, Callable[..., Any]] = {
    "add_model": dispatch.add_model,
    "_commit_eplb_maps": dispatch.commit,
    "_commit_eplb_maps_for_layer": dispatch.commit,
    "eplb_map_to_physical_and_record": dispatch.map_and_record,
    "step": dispatch.step,
}
AT_START: dict[str, Callable[..., Any]] = {
    "add_model": start.add_model,
    "initialize_model": start.initialize_model,
}


def attach_or_leave() -> None:
    log_as_vllm()
    try:
        start_from_file(Settings.read())
    except (OSError, ValueError) as error:
        raise SystemExit(f"isoload: {error}") from None
    PLUG_IN.attach_or_leave()  # after it: Balancers are made where the file has the experts


def start_from_file(settings: Settings) -> None:
    """Hook the start from ISOLOAD_PLACEMENT, if there is one, whether isoload chooses replicas or not.

    Raises:
        ValueError: the engine is not as isoload expects, and would start elsewhere in silence.
    """
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
        EPLB_POLICIES["default"] = make_policy(settings.placer)  # the only name that vLLM's option takes


def wrap(target: str, around: Callable[..., Any]) -> None:
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


FROM_FILE = PlugIn("vLLM", PLACEMENT, start.START.start, {}, hook_start, read_seams("vllm_start"))
PLUG_IN = PlugIn("vLLM", VLLM, MODELS.start, self_check.CHECKS, hook)


def attach(settings: Settings) -> list[str]:
    """Hook what these settings ask for, and return what is not as expected, a line each."""
    wrong = [] if settings.placement is None else FROM_FILE.attach(settings)
    return wrong + PLUG_IN.attach(settings)
