"""Routing of a recorded trace in a live engine, to measure on one's own GPUs. See docs/times.md.

Every token goes to experts that the trace has for its layer: by the strategy ``isoload:FILE`` of vLLM's simulated
routings, and in SGLang by ISOLOAD_ROUTING, which replaces the ids of the top-k.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isoload.engines.seams import PlugIn, Seam, read_seams
from isoload.engines.settings import ROUTING, Settings
from isoload.traces.identity import Identity, matching_rows
from isoload.traces.recordings import read_trace

log = logging.getLogger("isoload")
VLLM_STRATEGY = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
MOST_ROWS = 65536  # of a layer's table in memory: 2 MiB with 8 experts per token
ROWS = 16384  # of a table drawn from counts, in which each expert has its share within half a copy
Ids = npt.NDArray[np.int32]
Original = Callable[..., Any]


def rows_from_counts(counts: npt.NDArray[np.int64], top_k: int, num_rows: int, seed: int) -> Ids:
    """Return [N, K] experts, none twice in a row, each as often as its part of the counts [E], within one copy. Copies
    sorted by expert are dealt into K columns, one after another: an expert with at most N copies is in no row twice.
    Experts and rows are then in random order, by the seed."""
    if (counts > 0).sum() < top_k:
        raise ValueError(f"counts must have at least {top_k} experts with copies, got {(counts > 0).sum()}")
    draw = np.random.default_rng(seed)
    part = counts / counts.sum() * num_rows * top_k
    while (full := part > num_rows).any():  # an expert is at most once in each row
        remaining = np.where(full | (part == num_rows), 0, part)
        excess = (part[full] - num_rows).sum()
        part = np.where(full, num_rows, part + excess * remaining / remaining.sum())
    copies = np.floor(part).astype(np.int64)
    left = num_rows * top_k - int(copies.sum())
    open_ones = np.argsort(np.where(copies < num_rows, copies - part, 1), kind="stable")
    copies[open_ones[:left]] += 1
    order = draw.permutation(len(counts))
    ids = np.repeat(order, copies[order]).reshape(top_k, num_rows).T
    return np.ascontiguousarray(ids[draw.permutation(num_rows)], dtype=np.int32)


class RecordedRouting:
    """A trace as a router: ``FILE``, or ``FILE:seed=N:phase=prefill`` for the batches of one phase.

    Each layer has a table of rows of K experts and a position on the device, which moves on with every batch, in a
    captured graph too. A whole round through the table has the trace's counts.
    """

    def __init__(self, text: str) -> None:
        path, *options = text.split(":")
        values = {"seed": "0", "phase": ""}
        for option in options:
            name, _, value = option.partition("=")
            if name not in values or not value:
                raise ValueError(
                    f"options of a recorded routing must be seed=N or phase=NAME, got {option!r}"
                )
            values[name] = value
        if not values["seed"].isdecimal() or len(values["seed"]) > 9:
            raise ValueError(f"seed must be a whole number, got {values['seed']!r}")
        self.path, self.seed, self.phase = path, int(values["seed"]), values["phase"]
        self.trace = read_trace(path)
        self.batches = self._batches()
        self.tables: dict[int, Tensor] = {}
        self.positions: dict[int, Tensor] = {}

    def _batches(self) -> npt.NDArray[np.int64]:
        labels = self.trace.cluster or ()
        if self.phase and self.phase not in labels:
            known = ", ".join(sorted(set(labels))) or "none"
            raise ValueError(f"{self.path} has no batches of phase {self.phase}, but of: {known}")
        chosen = [i for i, label in enumerate(labels) if label == self.phase]
        return np.array(chosen if self.phase else range(self.trace.num_batches))

    def prepare(
        self, layer: int, experts: int, top_k: int, device: torch.device, part: float = 0.0,
        model: Identity | None = None,
    ) -> None:  # fmt: skip
        """Make a layer's table; raise ValueError if the trace is of another model or lacks the layer. `layer` is the
        model's own number. The table starts at `part`, so that ranks with tokens of their own differ."""
        trace = self.trace
        if (trace.num_experts, trace.top_k or top_k) != (experts, top_k):
            raise ValueError(
                f"{self.path} has {trace.num_experts} experts and {trace.top_k} per token but the model has {experts} "
                f"and {top_k}: pass a trace of this model"
            )
        (row,) = matching_rows(
            model or Identity("model"), [layer], "the model", trace.identity, trace.layer_ids, self.path
        )
        rows = self._rows(row, top_k)
        self.tables[layer] = torch.from_numpy(rows).to(device)
        self.positions[layer] = torch.tensor([int(part * len(rows))], device=device)

    def _rows(self, row: int, top_k: int) -> Ids:
        trace, draw = self.trace, np.random.default_rng([self.seed, row])
        if trace.topk_ids is not None and not self.phase:
            ids = trace.topk_ids[:, row]
            ids = ids[(ids >= 0).all(1)]
            if len(ids):
                return np.ascontiguousarray(ids[draw.permutation(len(ids))[:MOST_ROWS]])
        counts = trace.batch_counts()[self.batches, row].sum(0)
        return rows_from_counts(counts, top_k, ROWS, int(draw.integers(2**31)))

    def __call__(self, layer: int, num_tokens: int) -> Tensor:
        table, position = self.tables[layer], self.positions[layer]
        rows = (torch.arange(num_tokens, device=table.device) + position) % len(table)
        position.add_(num_tokens)
        return table[rows]

    def warn(self, engine: str) -> None:
        log.warning(
            f"isoload: {engine} routes as {self.path} does (seed {self.seed}), not as its router: tokens have no "
            "meaning, with dummy weights or the model's own"
        )


@dataclass
class Skew:
    """The recorded routing of this process; the only state of the hooks."""

    routing: RecordedRouting | None = None


SKEW = Skew()


# --- vLLM


class Strategy:
    """vLLM's RoutingStrategy. vLLM passes no layer, so the router whose batch it is has one: see compute_routing."""

    layer = -1

    def route_tokens(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert SKEW.routing is not None
        ids = SKEW.routing(self.layer, len(hidden_states))
        weights = torch.full(ids.shape, 1 / top_k, dtype=torch.float32, device=ids.device)
        return weights, ids.to(indices_type or torch.int32)


STRATEGY = Strategy()


def compute_routing(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap RoutingSimulatorRouter._compute_routing: set the layer of the batch."""
    layer = getattr(self, "isoload_layer", None)
    if layer is None:
        raise ValueError(f"{VLLM_STRATEGY} must not be of isoload for a layer that isoload has not prepared")
    STRATEGY.layer = layer
    return original(self, *args, **kwargs)


def initialize_model(original: Original, vllm_config: Any, **kwargs: Any) -> Any:
    """Wrap vLLM's function, which makes a model without weights: prepare the tables before weights load."""
    from vllm.distributed.parallel_state import get_ep_group

    from isoload.engines.vllm.layers import tokens_of

    assert SKEW.routing is not None
    if vllm_config.speculative_config is not None:
        raise ValueError(
            f"{VLLM_STRATEGY}=isoload:FILE must come without a draft model, whose layers are not recorded"
        )
    model = original(vllm_config, **kwargs)
    runners = [
        module for module in model.modules() if hasattr(module, "router") and hasattr(module, "layer_id")
    ]
    runners = [runner for runner in runners if type(runner.router).__name__ == "RoutingSimulatorRouter"]
    if not runners:
        raise ValueError(
            f"{VLLM_STRATEGY}=isoload:FILE must be for a model of experts, got {type(model).__name__}"
        )
    group, device = get_ep_group(), torch.device(vllm_config.device_config.device)
    numbers = tuple(sorted({int(runner.layer_id) for runner in runners}))
    whole = vllm_config.parallel_config.pipeline_parallel_size == 1
    for runner in runners:
        layer, router = int(runner.layer_id), runner.router
        apart = tokens_of(runner, vllm_config.parallel_config, "own")[0] == "own"
        part = group.rank_in_group / group.world_size if apart else 0.0
        experts = runner.moe_config.num_logical_experts
        model_facts = Identity("model", numbers if whole else ())
        SKEW.routing.prepare(layer, experts, router.top_k, device, part, model_facts)
        router.isoload_layer = layer
    SKEW.routing.warn("vLLM")
    return model


def hook_vllm(seams: list[Seam], _: Settings) -> None:
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator

    from isoload.engines.vllm import wrap

    hooks: dict[str, Original] = {"_compute_routing": compute_routing, "initialize_model": initialize_model}
    for seam in seams:
        wrap(seam.target, hooks[seam.name])
    RoutingSimulator.register_strategy(os.environ[VLLM_STRATEGY], STRATEGY)


# --- SGLang


def post_process(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang's _post_process_topk_ids: replace the routed experts of every token."""
    from isoload.engines.sglang.dispatch import NAMES
    from isoload.engines.sglang.layers import moe, parallel

    assert SKEW.routing is not None
    arguments = dict(zip(NAMES, args, strict=False)) | kwargs
    ids, layer, config = arguments["topk_ids"], arguments["layer_id"], arguments["topk_config"]
    older = getattr(config, "num_fused_shared_experts", 0)  # the name up to 0.5.22
    width = config.top_k - getattr(config, "num_shared_topk_slots", older)
    if layer not in SKEW.routing.tables:
        apart = moe().moe_a2a_backend != "none"
        part = parallel().moe_ep_rank / parallel().moe_ep_size if apart else 0.0
        SKEW.routing.prepare(layer, arguments["router_logits"].shape[1], width, ids.device, part)
    ids[:, :width] = SKEW.routing(layer, len(ids)).to(ids.dtype)
    return original(**arguments)


def hook_sglang(seams: list[Seam], _: Settings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for seam in seams:
        HookRegistry.register(seam.target, post_process, HookType(seam.kind))
    assert SKEW.routing is not None
    SKEW.routing.warn("SGLang")


def attach_to(engine: str, text: str) -> None:
    name, hook = {"vLLM": (VLLM_STRATEGY, hook_vllm), "SGLang": (ROUTING.name, hook_sglang)}[engine]
    try:
        SKEW.routing = RecordedRouting(text)
        seams = read_seams(f"{engine.lower()}_routing")
        wrong = PlugIn(engine, ROUTING, lambda settings: None, {}, hook, seams).attach(Settings.read({}))
    except (OSError, ValueError) as error:
        raise SystemExit(f"isoload: {name}: {error}") from None
    if wrong:
        raise SystemExit(f"isoload: {name}: {engine} is not as isoload expects: {'; '.join(wrong)}")
