"""On which stream of a GPU a stack plans, and that nothing is used before it is there: on fake CUDA tensors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

import isoload
from isoload.layer import two_stage
from isoload.layer.stack import LibraStack
from isoload.transport import LocalTransport, Transport
from support.fake_ranks import CAPACITY, VIRTUAL, one_rank
from support.fake_stack import FakeStack, fake_stack
from support.host_waits import Stream, line_of_isoload
from support.stacks import Model, close, run
from support.stream_order import Kernel
from support.sweeps import slow


def last_layer(fake: FakeStack) -> list[Kernel]:
    """What another batch's last layer launches."""
    for layer in fake.layers:
        fake.order.kernels.clear()
        layer(fake.rows)
    assert fake.order.races == []
    return fake.order.kernels


def named(kernels: list[Kernel], *names: str) -> list[Kernel]:
    found = [kernel for kernel in kernels if kernel.name in names]
    assert found, names
    return found


def apart(some: list[Kernel], others: list[Kernel]) -> bool:
    """Whether no event orders any of these behind any of those, nor the other way round."""
    pairs = [(a, b) for a in some for b in others]
    return not any(a.comes_behind(b) or b.comes_behind(a) for a, b in pairs)


@pytest.mark.parametrize(
    ("local", "policy"), [("held", "hedge"), ("planned", "libra"), *slow(("held", "libra"))]
)
def test_the_plan_runs_beside_local_compute(local: str, policy: str) -> None:
    """From the gathered loads on; joined before what leaves is computed, the fill comes after what leaves."""
    with fake_stack(LocalTransport(VIRTUAL, CAPACITY), "lookahead", local, policy, "pull") as fake:
        kernels = last_layer(fake)
    gemms = named(kernels, "_grouped_mm")
    # two GEMMs of resident experts and two of borrowed ones, by rank; then those of what came
    ours, theirs = gemms[: len(gemms) // 2], gemms[len(gemms) // 2 :]
    planned = named(kernels, "plan_exact", "share", "route", "number_rows", "pack_rows")
    assert apart(planned, ours)
    assert all(gemm.comes_behind(kernel) for gemm in theirs for kernel in planned)
    fill = named(kernels, "plan_fill")
    assert apart(fill, gemms) and all(kernel.comes_behind(planned[-1]) for kernel in fill)
    assert {kernel.stream for kernel in planned + fill} == {planned[0].stream}
    borrowed = named(kernels, "borrow")
    assert apart(borrowed, gemms) and all(kernel.comes_behind(fill[-1]) for kernel in borrowed)


@pytest.mark.parametrize("local", ["held", "planned"])
def test_the_host_waits_for_a_plan_on_the_cpu_beside_local_compute(local: str) -> None:
    """Once for the split and once for the next layer's fill, when the GEMMs of local copies are enqueued."""
    with fake_stack(LocalTransport(VIRTUAL, CAPACITY), "lookahead", local, "libra_published", "pull") as fake:
        fake.host.waits.clear()
        kernels = last_layer(fake)
        waits = [wait.rsplit(":", 1)[0] for wait in fake.host.waits]
    assert waits == ["tolist in policies/published_borrowing.py"] * 2 * len(fake.layers)
    gemms = named(kernels, "_grouped_mm")
    ours, read = (
        gemms[: len(gemms) // 2],
        [k for k in named(kernels, "cat") if "/published_borrowing.py" in k.line],
    )
    split, fill = read
    assert apart([split], ours) and apart([fill], gemms)
    assert kernels.index(ours[-1]) < kernels.index(split) < kernels.index(fill)


@pytest.mark.parametrize(
    ("policy", "predict", "local", "borrow"),
    [
        ("libra_published", None, "planned", "pull"),
        ("libra_published", "lookahead", "planned", "copy"),
        ("llep_published", None, "planned", "pull"),
    ],
)
def test_a_plan_on_the_cpu_before_local_compute_is_refused(
    policy: str, predict: str | None, local: str, borrow: str
) -> None:
    message = (
        f"policy {policy} must plan during local compute, because the host waits for the loads: .* use libra"
    )
    stack = fake_stack(LocalTransport(VIRTUAL, CAPACITY), predict, local, policy, borrow)
    with pytest.raises(ValueError, match=message), stack:
        pass


def test_a_plan_that_moves_local_copies_comes_first() -> None:
    """hedge decides what stays: the fill for the next layer is what runs beside local compute then."""
    with fake_stack(LocalTransport(VIRTUAL), "lookahead", "planned", "hedge", "pull") as fake:
        kernels = last_layer(fake)
    gemms, planned = named(kernels, "_grouped_mm"), named(kernels, "plan_exact", "pack_rows")
    assert all(gemm.comes_behind(kernel) for gemm in gemms for kernel in planned)
    assert apart(named(kernels, "plan_fill"), gemms[: len(gemms) // 2])
    assert apart(named(kernels, "borrow"), gemms)


@pytest.mark.parametrize(
    ("borrow", "predict", "local", "policy"),
    [
        ("all_to_all", "last", "held", "libra"),
        ("copy", "lookahead", "planned", "hedge"),
        *slow(
            ("pull", "last", "held", "hedge"),
            ("pull", "last", "planned", "libra"),
            ("copy", "lookahead", "held", "hedge"),
            ("copy", "lookahead", "planned", "libra"),
            ("all_to_all", "lookahead", "planned", "hedge"),
        ),
    ],
)
def test_nothing_is_used_before_it_is_there(borrow: str, predict: str, local: str, policy: str) -> None:
    """Nor is memory given out again that another stream still reads."""
    for capacity in (CAPACITY,) if local == "held" else (None, CAPACITY):
        of_all = LocalTransport(VIRTUAL, capacity)
        transport: Transport = one_rank(0, capacity) if borrow == "all_to_all" else of_all
        with fake_stack(transport, predict, local, policy, borrow) as fake:
            fake.batch()
        assert fake.order.races == []


@pytest.mark.parametrize(
    ("missing", "local", "policy"),
    [
        ("join", "held", "hedge"),
        *slow(("fork", "held", "hedge"), ("join", "planned", "libra"), ("fork", "planned", "hedge")),
    ],
)
def test_a_missing_wait_is_seen(missing: str, local: str, policy: str) -> None:
    waits = Stream.wait_stream

    def wait_stream(stream: Stream, other: Stream) -> None:
        is_join = stream is stream.of.main
        if "layer/two_stage" not in line_of_isoload() or is_join != (missing == "join"):
            waits(stream, other)

    with (
        patch.object(Stream, "wait_stream", wait_stream),
        fake_stack(LocalTransport(VIRTUAL, CAPACITY), "lookahead", local, policy, "pull") as fake,
    ):
        fake.batch()
    assert fake.order.races


@pytest.mark.parametrize(("slots", "num_shared"), [(0, 0), (4, 1), *slow((0, 1), (4, 0))])
@pytest.mark.parametrize(
    ("local", "policy", "how"),
    [
        ("held", "hedge", {}),
        ("planned", "libra", {}),
        ("planned", "libra_published", {}),
        *slow(("planned", "hedge", {}), ("held", "libra", {})),
    ],
)
def test_in_that_order_results_are_the_dense_models(
    local: str, policy: str, how: dict[str, Any], num_shared: int, slots: int
) -> None:
    """In float64 on the CPU, which here takes itself for a device with streams."""
    model = Model(4, slots=slots, num_shared=num_shared)
    transport = LocalTransport(model.topology, max(model.tokens) if local == "held" else None)
    layers = model.layers(transport, policy=policy, **how)
    LibraStack(layers, "lookahead", local=local)
    streams = Mock()
    fakes = {"current_stream": lambda _device: streams, "Stream": lambda _device: streams}
    with (
        patch.multiple(torch.cuda, **fakes, stream=lambda _stream: nullcontext()),
        patch.object(two_stage, "runs_apart", lambda _device: True),
        torch.no_grad(),
    ):
        for batch in range(3):
            rows = model.rows(batch)
            wanted = model.wanted(rows)
            assert all(close(a, b, 1e-12) for a, b in zip(run(layers, rows), wanted, strict=True)), batch
    assert streams.wait_stream.called
    for layer in layers:
        assert layer.last_plan is not None and layer.balancer.last_loads is not None
        assert isoload.policies.plan.plan_errors(layer.last_plan, layer.balancer.last_loads) == []
