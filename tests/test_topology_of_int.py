"""A number of ranks is accepted wherever the public API takes a Topology."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import isoload
from isoload import Topology
from isoload.analysis.advice import Question
from isoload.analysis.models import find_model, layer_time, layer_times
from isoload.analysis.timeline import timeline
from isoload.layer import LibraStack
from isoload.topology import as_topology
from isoload.transport.deep_ep import DeepEPTransport
from support import deep_ep_double
from support.hugging_face import make_model

MODEL = find_model("deepseek-v3")


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def deep_ep(ranks: Any) -> Any:
    sizes = {"hidden": 256, "top_k": 2, "slots_per_rank": 4, "max_tokens_per_rank": 4}
    buffer = deep_ep_double.EPBuffer.__new__(deep_ep_double.EPBuffer)
    return DeepEPTransport(ranks, buffer=buffer, **sizes).group.topology


def seconds(ranks: Any) -> Any:
    time = layer_time("h200", "sglang", "prefill", MODEL, 8)[0]
    return timeline(time, np.ones((1, 8, 256)), 32, ranks).seconds


def read(ranks: Any, folder: Path) -> Any:
    path = folder / "engine.json"
    if not path.exists():
        isoload.write_placement(
            isoload.place(np.ones((1, 4)), Topology(2)).with_moe_layers(0), path, "sglang"
        )
    return isoload.read_placement(path, ranks).topology


# Derived from a Placement, which has its topology already.
DERIVED = {"PlacedLayers", "offsets"}
COUNTS = np.ones((1, 16))
CALLS: dict[Any, tuple[Callable[..., Any], int]] = {
    isoload.Placement: (lambda ranks: isoload.Placement([[0, 1, 2, 3]], ranks, 4).topology, 2),
    isoload.place: (lambda ranks: isoload.place(COUNTS, ranks, 3).topology, 8),
    isoload.LocalGroup: (lambda ranks: isoload.LocalGroup(ranks).topology, 4),
    isoload.LocalTransport: (lambda ranks: isoload.LocalTransport(ranks).group.topology, 4),
    isoload.transport.Group: (lambda ranks: isoload.LocalGroup(ranks).topology, 4),
    isoload.CollectiveGroup: (lambda ranks: isoload.CollectiveGroup(ranks).topology, 1),
    isoload.CollectiveGroup.own: (lambda ranks: isoload.CollectiveGroup.own(ranks).topology, 1),
    isoload.CollectiveTransport: (lambda ranks: isoload.CollectiveTransport(ranks).group.topology, 1),
    DeepEPTransport: (deep_ep, 1),
    isoload.balance: (lambda ranks: isoload.balance(make_model("qwen3"), ranks)[0].placement.topology, 2),
    LibraStack.from_decoder: (
        lambda ranks: (
            LibraStack.from_decoder(make_model("qwen3").model.layers, ranks).layers[0].group.topology
        ),
        2,
    ),
    Question: (
        lambda ranks: Question(MODEL, layer_time("h200", "sglang", "decode", MODEL, 8)[0], ranks, 1).topology,
        8,
    ),
    layer_time: (lambda ranks: layer_time("h200", "sglang", "prefill", MODEL, ranks), 8),
    layer_times: (lambda ranks: layer_times("h200", "sglang", "prefill", MODEL, ranks), 8),
    timeline: (seconds, 8),
}


@pytest.mark.parametrize("taken", CALLS, ids=lambda taken: taken.__qualname__)
def test_a_number_is_a_topology(taken: Any, one_process: None) -> None:
    call, ranks = CALLS[taken]
    assert call(ranks) == call(np.int64(ranks)) == call(Topology(ranks))


def test_a_file_of_an_engine_is_read_with_a_number(tmp_path: Path) -> None:
    assert read(2, tmp_path) == read(Topology(2), tmp_path) == Topology(2)


def takers() -> Iterator[Any]:
    """The public callables with a parameter named topology: names of some ``__all__``, and their class methods."""
    frameworks = "isoload.engines.megatron", "isoload.engines.torchtitan"  # are not installed
    skipped = ("isoload.kernels", "isoload.__main__", "isoload._C", *frameworks)
    names = [m.name for m in pkgutil.walk_packages(isoload.__path__, "isoload.")]
    for module in map(import_module, ["isoload", *(n for n in names if not n.startswith(skipped))]):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            methods = (
                [getattr(value, m) for m in vars(value) if m[0] != "_"] if inspect.isclass(value) else []
            )
            for one in (value, *methods):
                try:
                    parameters = inspect.signature(one).parameters if callable(one) else {}
                except ValueError:
                    continue
                if "topology" in parameters:
                    yield one


def test_every_public_callable_is_in_the_table() -> None:
    assert {one.__qualname__ for one in takers()} <= {
        *(taken.__qualname__ for taken in CALLS),
        isoload.read_placement.__qualname__,
        *DERIVED,
    }


@pytest.mark.parametrize("wrong", [True, 4.0, "4", None])
def test_other_things_are_refused(wrong: Any) -> None:
    message = f"^topology must be a Topology or the number of ranks, got {wrong!r}$"
    with pytest.raises(ValueError, match=message):
        as_topology(wrong)
    with pytest.raises(ValueError, match=r"^num_ranks must be an integer in 1\.\.1024, got 0$"):
        isoload.place(COUNTS, 0)
