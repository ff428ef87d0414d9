"""The shipped constants that an engine's kernels take for a model: experts, and the all-to-all around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from isoload.analysis.models import Model
from isoload.times import AllToAllTime, ExpertTime, LayerTime, Times, available
from isoload.topology import Topology, as_topology
from isoload.wording import not_one_of

PHASES = ("prefill", "decode")
MEASURE = "isoload measure times the kernels of your GPUs, and --times takes its file in place of --gpu"
ALL_TO_ALL = {  # DeepEP's normal mode and its low-latency one
    "sglang": {"prefill": "sglang_deepep_normal", "decode": "sglang_deepep_low_latency"},
    "vllm": {"prefill": "vllm_deepep_ht", "decode": "vllm_deepep_ll"},
}


def layer_time(
    gpu: str,
    engine: str,
    phase: str,
    model: Model,
    topology: Topology | int,
    kernel: str | None = None,
    exchange_phase: str | None = None,
) -> tuple[LayerTime, list[str]]:
    """A layer's constants, and what of them stands for something else, in words.

    Args:
        gpu: "h200" or "h200_sxm".
        kernel: of the experts, as the tables name it; None: DeepEP's of this phase where it was measured, else the one
            that was fitted best.
        exchange_phase: whose all-to-all is taken; None: that of `phase`.

    Raises:
        ValueError: naming the argument, and the choices.
    """
    if engine not in ALL_TO_ALL:
        raise ValueError(not_one_of("engine", ALL_TO_ALL, engine))
    if phase not in PHASES:
        raise ValueError(not_one_of("phase", PHASES, phase))
    rows = [row for row in available() if row["table"] == "experts"]
    gpus = sorted({row["gpu"] for row in rows})
    full = next((name for name in gpus if gpu in (name, name.removesuffix("_sxm"))), None)
    if full is None:
        raise ValueError(not_one_of("gpu", gpus, gpu, " (or --times FILE, which isoload measure writes)"))
    shape: dict[str, Any] = {"hidden": model.hidden, "intermediate": model.intermediate, "dtype": model.dtype}
    other = f"_{PHASES[phase == 'prefill']}"
    usable = [
        row
        for row in rows
        if row["gpu"] == full and row["kernel"].startswith(f"{engine}_") and not row["kernel"].endswith(other)
    ]
    fitting = [row for row in usable if all(row[key] == value for key, value in shape.items())]
    if not fitting:
        raise ValueError(_no_experts(f"{engine} was measured with on {full} for {phase}", usable, model))
    names = sorted({row["kernel"] for row in fitting})
    if kernel is not None and kernel not in names:
        raise ValueError(not_one_of("kernel", names, kernel))
    best = min(fitting, key=lambda row: (not row["kernel"].endswith(f"_{phase}"), row["fit_error"]))
    experts = ExpertTime.load(full, kernel or best["kernel"], **shape)
    steps, notes = _exchange(full, ALL_TO_ALL[engine][exchange_phase or phase], model, as_topology(topology))
    return LayerTime(steps[0], experts, steps[1]), notes


def measured_layer(times: Times, model: Model, topology: Topology) -> tuple[LayerTime, list[str]]:
    """Return the constants of a layer by a times file, and notes on them.

    Raises:
        ValueError: times of other experts, or of a group that says nothing about this one.
    """
    measured = times.experts
    shape = measured.hidden, measured.intermediate, measured.dtype
    if shape != (model.hidden, model.intermediate, model.dtype):
        raise ValueError(
            f"times of {times.source} are of experts {shape[0]} x {shape[1]} {shape[2]}, and {model.name} has "
            f"{model.hidden} x {model.intermediate} {model.dtype}: run isoload measure --model {model.name}"
        )
    return times.layer(topology.num_ranks, topology.num_nodes, model.top_k)


def _no_experts(where: str, usable: list[dict[str, Any]], model: Model) -> str:
    """Return the error for experts without constants, with the shapes and dtypes that have some."""
    own = model.hidden, model.intermediate
    shapes = sorted({(row["hidden"], row["intermediate"]) for row in usable if row["dtype"] == model.dtype})
    dtypes = sorted({row["dtype"] for row in usable if (row["hidden"], row["intermediate"]) == own})
    listed = ", ".join(f"{hidden} x {inner}" for hidden, inner in shapes) or "none"
    also = f"; {own[0]} x {own[1]} was measured in {', '.join(dtypes)}: --dtype {dtypes[0]}" if dtypes else ""
    return (
        f"model must have experts that {where} in {model.dtype} ({listed}), got {model.name}, {own[0]} x {own[1]} "
        f"{model.dtype}{also}. {MEASURE}"
    )


def layer_times(
    gpu: str, engine: str, phase: str, model: Model, topology: Topology | int, kernel: str | None = None
) -> tuple[dict[str, LayerTime], list[str]]:
    """Constants by phase, the kernel being of the phase asked for; a phase without any is left out, and said."""
    found, gaps = {}, []
    for each in PHASES:
        try:
            chosen = kernel if each == phase else None
            found[each] = layer_time(gpu, engine, each, model, topology, chosen)[0]
        except ValueError as error:
            gaps.append(f"Kernels of {each} are left out: {error}.")
    return found, gaps


def _exchange(
    gpu: str, kernel: str, model: Model, topology: Topology
) -> tuple[tuple[AllToAllTime | None, AllToAllTime | None], list[str]]:
    """Dispatch and combine. Rows of a width that was not measured take the time of the nearest one's bytes."""
    ranks, nodes = topology.num_ranks, topology.num_nodes
    if ranks == 1:
        return (None, None), []
    rows = [row for row in available() if row["table"] == "exchanges" and row["kernel"] == kernel]
    widths = sorted({row["hidden"] for row in rows if row["gpu"] == gpu})
    if not widths:
        raise ValueError(f"gpu must have measured times of {kernel}, got {gpu}")
    hidden = min(widths, key=lambda width: (abs(width - model.hidden), width))
    counts = sorted({row["top_k"] for row in rows if row["gpu"] == gpu and row["hidden"] == hidden})
    top_k = min(counts, key=lambda count: (abs(count - model.top_k), count))
    found, notes = [], []
    for step in ("dispatch", "combine"):
        time = AllToAllTime.load(gpu, kernel, step, hidden=hidden, top_k=top_k, ranks=ranks, nodes=nodes)
        part = model.hidden * model.top_k / (hidden * top_k)
        low, high = (curve._replace(s_us=curve.s_us * part) for curve in (time.low, time.high))
        found.append(replace(time, low=low, high=high))
    if part != 1:
        measured = f"{hidden}, top-{top_k}, by bytes"
        notes.append(f"the all-to-all of rows of {model.hidden}, top-{model.top_k}, is that of {measured}")
    if found[0].note:
        notes.append(f"the upper end of the all-to-all's range was measured on {found[0].note}")
    if sizes := found[0].extrapolated_from:
        size = f"{ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}"
        notes.append(f"the all-to-all of {size} is extrapolated; measured were {sizes}")
    return (found[0], found[1]), notes
