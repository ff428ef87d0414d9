"""``isoload measure``: time experts, exchanges, moves and plans on this machine's GPUs, for ``--times``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from isoload.cli.options import Experts, ExpertsPerToken, Force, Range, RanksPerNode

if TYPE_CHECKING:
    from isoload.analysis.measuring import Kernel
    from isoload.times import Times

GIB = 2.0**30


def measure(
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The times file to write.")],
    model: Annotated[
        str, Option(metavar="NAME|FILE", help="A model's name, or its config.json; its experts are timed.")
    ],
    dtype: Annotated[
        str | None,
        Option(help="Dtype of the experts' weights: bfloat16, float16 or float32. Default: bfloat16."),
    ] = None,
    experts: Experts = None,
    top_k: ExpertsPerToken = None,
    kernel: Annotated[
        str,
        Option(
            metavar="isoload|MODULE:FUNCTION",
            help="Function that computes the experts, called as isoload.analysis.measuring.isoload_experts is.",
        ),
    ] = "isoload",
    memory: Annotated[
        float, Range(0.001, 10**6), Option(help="GiB per rank that weights and rows may take.")
    ] = 8.0,
    ranks_per_node: RanksPerNode = 0,
    force: Force = False,
) -> None:
    """Time experts, dispatch, combine, moves of weights and plans on this machine, for advise --times.

    Dispatch and combine are DeepEP's if the ranks are on GPUs and DeepEP moves a batch on each of them, else isoload's.

    Run it alone for one rank's experts, or on all ranks that will serve: torchrun --nproc-per-node 8 -m isoload
    measure ... It takes at most a few minutes.
    """
    if find_spec("scipy") is None:
        raise ImportError("isoload measure fits its points with SciPy: pip install 'isoload[plan]'")
    from isoload.analysis import measuring
    from isoload.analysis.models import find_model
    from isoload.cli.arguments import check_targets, progress
    from isoload.files import write_json

    check_targets([], force, json=str(output))
    chosen = find_model(model, dtype or "bfloat16", experts, top_k, layers=1)
    function = measuring.isoload_experts if kernel == "isoload" else named_function(kernel)
    with ranks() as rank, progress("points", shown=rank == 0) as on_point:
        machine = measuring.make_machine(chosen, memory * GIB, ranks_per_node, function, kernel)
        times = measuring.measure(machine, on_point)
    if rank == 0:
        write_json(times.to_json(), str(output))
        if str(output) != "-":
            _print(times, str(output))


def named_function(text: str) -> Kernel:
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"kernel must be isoload or MODULE:FUNCTION, got {text!r}")
    try:
        function: Kernel = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"kernel {text} cannot be imported: {error}") from None
    if not callable(function):
        raise ValueError(f"kernel {text} must be a function, got {type(function).__name__}")
    return function


@contextmanager
def ranks() -> Iterator[int]:
    """Join the process group that torchrun describes, and yield this process's rank; without torchrun it is rank 0."""
    import os

    import torch
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _print(times: Times, target: str) -> None:
    from rich.console import Console

    from isoload.cli.tables import say

    experts = times.experts
    lines = [
        f"{times.device}, {times.ranks} rank{'s' * (times.ranks > 1)} on {times.nodes} node{'s' * (times.nodes > 1)}",
        f"experts {experts.hidden} x {experts.intermediate} {experts.dtype}, {experts.kernel}: a call "
        f"{experts.a_us:.3g} µs, the weights of a slot {experts.b_us:.3g} µs, a copy {experts.c_us:.3g} µs"
        f"{_errors(experts.fit_error, experts.held_out_error)}",
    ]
    if times.dispatch is not None:
        whose = {"isoload": "isoload's, DeepEP", "deep_ep": "DeepEP's"}[times.dispatch.kernel]
        lines.append(f"dispatch and combine: {whose} {times.software['deep_ep']}")
    for step in filter(None, (times.dispatch, times.combine)):
        cost = f"a call {step.high.a_us:.3g} µs, a token {step.high.s_us:.3g} µs"
        lines.append(f"{step.step}: {cost}{_errors(step.fit_error, None)}")
    if times.move_us is not None:
        lines.append(
            f"the weights of an expert move in {times.move_us:.3g} µs: a borrow pays from {times.break_even} copies, "
            "if nothing hides the transfer"
        )
    plans = ", ".join(f"{name} {us:.3g} µs" for name, us in times.plan_us.items())
    lines.append(f"planning a layer: {plans}")
    spread = max(times.speeds) / min(times.speeds) - 1
    lines.append(f"the fastest rank's experts are {100 * spread:.1f} % faster than the slowest's")
    lines.append(f"Wrote {target}.")
    say(Console(highlight=False), ("", lines))


def _errors(fit: float | None, held_out: float | None) -> str:
    parts = [] if fit is None else [f"fit error {100 * fit:.1f} %"]
    parts += [] if held_out is None else [f"{100 * held_out:.1f} % on skewed loads that were not fitted"]
    return f" ({', '.join(parts)})" if parts else ""
