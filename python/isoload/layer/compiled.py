"""The layer under torch.compile: one op from choices to outputs, which calls the eager layer, because tracing could not
record exchanges whose sizes the host reads, errors that reach every rank, and checks. ``cudagraph_unsafe``: ranks would
capture their exchanges at different times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from isoload.weights.storage import ExpertParameter

if TYPE_CHECKING:
    from isoload.layer.moe import MoE

Choice = tuple[Tensor, Tensor]  # ids and weights [T, K] of a rank
Choose = Callable[[], Sequence[Choice]]  # choices of every owned rank; an error in it is raised on all ranks

P = ParamSpec("P")
T = TypeVar("T")

_layers: WeakValueDictionary[int, MoE] = WeakValueDictionary()
_recordings: WeakValueDictionary[int, Recording] = WeakValueDictionary()
_numbers = itertools.count()


def between_graphs(reason: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate like torch.compiler.disable, but call it only while compiling, because it imports Triton."""

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break(msg=reason)  # reports the reason, which the next line would not
                result: T = torch.compiler.disable(call)(*args, **kwargs)
                return result
            return call(*args, **kwargs)

        return run

    return decorate


def handle_of(layer: MoE) -> Tensor:
    """Return a new number, [] float64 on the CPU, by which compiled code finds the layer: a tensor, so that one graph
    serves all equal layers, with a gradient, so that every rank enters the backward of its layers.
    """
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(float(number), dtype=torch.float64, device="cpu", requires_grad=True)


def run_in_graph(
    layer: MoE, rows: list[Tensor], chosen: Sequence[Choice], num_tokens: int | None
) -> list[Tensor]:
    parameters = layer.expert_parameters()
    whole = all(type(parameter) in (nn.Parameter, ExpertParameter) for parameter in parameters)  # no DTensor
    if not whole or any(weights.reads_elsewhere for weights in layer.weights):
        eager: list[Tensor] = _run_apart(layer, rows, chosen, num_tokens)
        return eager
    ids, weights = [ids for ids, _ in chosen], [weights for _, weights in chosen]
    trained = [p for p in parameters if p.requires_grad]
    frozen = [p for p in parameters if not p.requires_grad]
    device = rows[0].device.type
    # Compiled code runs with autocast off, so the op turns it on again.
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    outputs: list[Tensor] = run_layer(
        layer.handle, rows, ids, weights, trained, frozen, num_tokens, autocast, torch.is_grad_enabled()
    )
    return outputs[: len(rows)]


@between_graphs("expert Parameters of other modules: a Shard given as a function, DTensors")
def _run_apart(
    layer: MoE, rows: list[Tensor], chosen: Sequence[Choice], num_tokens: int | None
) -> list[Tensor]:
    """Run the layer between two graphs, because the op returns gradients only of Parameters that are its inputs."""
    return layer.run(rows, lambda: chosen, num_tokens)


class Recording(bytearray):
    """Inputs and outputs of one training call, for its backward; kept alive by the memory of its ticket."""

    # Backwards of recordings that run now; an outer backward adds their gradients to the Parameters
    computing = 0
    outputs: list[Tensor]
    inputs: list[Tensor]

    def ticket(self) -> Tensor:
        return torch.frombuffer(self, dtype=torch.uint8)


@torch.library.custom_op("isoload::run_layer", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def run_layer(
    handle: Tensor,
    rows: list[Tensor],
    topk_ids: list[Tensor],
    weights: list[Tensor],
    trained: list[Tensor],
    frozen: list[Tensor],
    num_tokens: int | None,
    autocast: torch.dtype | None,
    records: bool,
) -> list[Tensor]:
    """Return a layer's outputs [T, H] per owned rank, then the ticket of the recording (empty if none is made)."""
    layer = _layers[int(handle)]

    def choose() -> list[Choice]:
        parameters = sorted(layer.expert_parameters(), key=lambda parameter: not parameter.requires_grad)
        for mine, other in zip(parameters, [*trained, *frozen], strict=True):
            if (mine.data_ptr(), mine.shape) != (other.data_ptr(), other.shape):
                raise ValueError(
                    "expert Parameters in compiled code must be those of the layer, unchanged in that code, got "
                    "others (functional_call, or an in-place change)"
                )
        return list(zip(topk_ids, gates, strict=True))

    with _outside_of_ops(records):
        leaves, gates = ([v.detach().requires_grad_(records) for v in values] for values in (rows, weights))
        with torch.autocast(rows[0].device.type, autocast, enabled=autocast is not None):
            outputs = layer.run(leaves, choose, num_tokens)
    if not records:
        return [*outputs, torch.empty(0, dtype=torch.uint8)]
    number = next(_numbers)
    recording = _recordings[number] = Recording(number.to_bytes(8, "little"))
    recording.outputs = outputs
    recording.inputs = [*leaves, *gates, *(p for p in layer.expert_parameters() if p.requires_grad)]
    return [*(output.detach() for output in outputs), recording.ticket()]


@run_layer.register_fake
def _(_handle: Tensor, rows: list[Tensor], *others: Any) -> list[Tensor]:
    ticket = torch.empty(8 if others[-1] else 0, dtype=torch.uint8)  # records
    return [*(row.new_empty(row.shape) for row in rows), ticket]


@torch.library.custom_op("isoload::run_layer_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def run_layer_backward(ticket: Tensor, grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    recording = _recordings[int.from_bytes(bytes(ticket.tolist()), "little")]
    with _outside_of_ops(records=True):
        # Backward may run again until the ticket is freed. A rank without experts has Parameters with zero rows, which
        # no output depends on.
        Recording.computing += 1
        try:
            gradients = torch.autograd.grad(
                recording.outputs,
                recording.inputs,
                grads,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        finally:
            Recording.computing -= 1
    return [grad.clone() for grad in gradients]


@run_layer_backward.register_fake
def _(ticket: Tensor, grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    return [like.new_empty(like.shape) for like in inputs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, rows, _, weights, trained, frozen, *_ = inputs
    ctx.counts, ctx.num_frozen = (len(rows), len(weights), len(trained)), len(frozen)
    ctx.save_for_backward(output[-1], *rows, *weights, *trained)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    ticket, *inputs = ctx.saved_tensors
    gradients = iter(run_layer_backward(ticket, grads[:-1], inputs))
    to_rows, to_weights, to_trained = (list(itertools.islice(gradients, count)) for count in ctx.counts)
    nothing = [None] * ctx.num_frozen, None, None, None
    return None, to_rows, [None] * len(to_rows), to_weights, to_trained, *nothing


run_layer.register_autograd(_backward, setup_context=_save)


@contextmanager
def _outside_of_ops(records: bool) -> Iterator[None]:
    """Record gradients (if records) and count tensor versions inside an op, which torch turns off there."""
    key, guard = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    on = guard(key.AutogradFunctionality, False), guard(key.ADInplaceOrView, False)
    with on[0], on[1], torch.set_grad_enabled(records):
        yield
