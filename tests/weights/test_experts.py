"""The experts of one rank equal a loop over copies, forward and backward, whatever the path and the routing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from isoload.weights.compute import run_experts
from isoload.weights.experts import ClampedGLU, ExpertWeights, SwiGLU
from reference import experts as reference

# Largest difference from the float64 loop, relative to its largest absolute value.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
GLUS = {"swiglu": SwiGLU(), "clamped": ClampedGLU()}


@dataclass(frozen=True)
class Case:
    """N rows of width H, K copies at most, resident and spare slots, and who is absent."""

    rows: int
    hidden: int
    inner: int
    top_k: int
    resident: int
    spare: int = 0
    absent: float = 0.5
    only: tuple[int, ...] | None = None  # the slots that are chosen at all

    @property
    def num_slots(self) -> int:
        return self.resident + self.spare

    def slots(self, seed: int) -> Tensor:
        """[N, K] different slots per row, some then -1."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.tensor(self.only if self.only is not None else range(self.num_slots)).long()
        draws = torch.rand(self.rows, max(len(chosen), 1), generator=generator).argsort(1)
        slots = torch.full((self.rows, self.top_k), -1)
        width = min(self.top_k, len(chosen))
        if width:
            slots[:, :width] = chosen[draws[:, :width]]
        slots[torch.rand(slots.shape, generator=generator) < self.absent] = -1
        return slots

    def weights(self, seed: int, dtype: torch.dtype, bias: bool) -> ExpertWeights:
        """One stack of all slots; biases as large as the products, so that losing them shows."""
        generator = torch.Generator().manual_seed(seed)
        return ExpertWeights.random(
            self.num_slots, self.hidden, self.inner, bias=bias, generator=generator, dtype=dtype
        )


CASES = {
    "aligned": Case(rows=37, hidden=16, inner=24, top_k=4, resident=5),
    "odd widths": Case(rows=13, hidden=7, inner=5, top_k=3, resident=4),
    "two groups": Case(rows=29, hidden=16, inner=8, top_k=5, resident=5, spare=2),
    "only spare chosen": Case(rows=11, hidden=8, inner=16, top_k=2, resident=3, spare=2, only=(3, 4)),
    "only resident": Case(rows=11, hidden=8, inner=16, top_k=2, resident=3, spare=2, only=(0, 2)),
    "empty groups": Case(rows=19, hidden=8, inner=8, top_k=2, resident=9, only=(1, 4, 8)),
    "one slot takes all": Case(rows=23, hidden=8, inner=8, top_k=1, resident=4, absent=0, only=(2,)),
    "all absent": Case(rows=6, hidden=8, inner=8, top_k=3, resident=2, spare=1, absent=1.1),
    "none absent": Case(rows=17, hidden=8, inner=8, top_k=8, resident=8, absent=0),
    "no rows": Case(rows=0, hidden=8, inner=8, top_k=4, resident=3, spare=1),
    "no resident slots": Case(rows=5, hidden=8, inner=8, top_k=2, resident=0, spare=3),
    "no spare slots": Case(rows=5, hidden=8, inner=8, top_k=2, resident=3, spare=0),
    "no slots": Case(rows=5, hidden=8, inner=8, top_k=2, resident=0),
    "one row": Case(rows=1, hidden=8, inner=8, top_k=1, resident=1, absent=0),
    "no copies per row": Case(rows=3, hidden=8, inner=8, top_k=0, resident=2),
}


def part(weights: ExpertWeights, start: int, end: int) -> ExpertWeights:
    """A view of some slots."""
    cut = [
        None if t is None else t[start:end]
        for t in (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    ]
    return ExpertWeights(*cut)  # type: ignore[arg-type]


def tensors(weights: ExpertWeights) -> list[Tensor]:
    stacks = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
    return [t for t in stacks if t is not None]


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    assert got.shape == expected.shape, what
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    difference = float((got.detach().double() - expected).abs().max()) if expected.numel() else 0.0
    assert difference <= TOLERANCES[dtype] * largest, f"{what}: {difference} against {largest}"


def check(case: Case, dtype: torch.dtype, glu: str, know_copies: bool, seed: int) -> None:
    """Forward and all gradients against the loop in float64, from the same rounded inputs."""
    print(f"seed {seed}")
    torch.manual_seed(seed)
    stack = case.weights(seed, dtype, bias=glu == "clamped")
    slots, rows = case.slots(seed), (torch.randn(case.rows, case.hidden) * 3).to(dtype)
    gates = torch.rand(slots.shape, dtype=torch.promote_types(dtype, torch.float32))
    leaves = [rows, gates, *tensors(stack)]
    exact = [leaf.double().clone().requires_grad_() for leaf in leaves]
    expected = reference.run_experts(
        exact[0], slots, *exact[1:4], *exact[4:], clamped=(1.702, 7.0) if glu == "clamped" else None
    )
    grad = torch.randn(expected.shape).to(dtype)
    for leaf in leaves:
        leaf.requires_grad_()
    groups = [part(stack, 0, case.resident)]
    if case.spare:
        groups.append(part(stack, case.resident, case.num_slots))
    spans = ((0, case.resident), (case.resident, case.num_slots))
    counted = [int(((slots >= first) & (slots < end)).sum()) for first, end in spans]
    got = run_experts(rows, slots, gates, groups, GLUS[glu], counted[: len(groups)] if know_copies else None)
    assert got.dtype == dtype
    assert_close(got, expected.detach(), dtype, "y")
    got_grads = torch.autograd.grad(got, leaves, grad, materialize_grads=True)
    grads: list[Tensor] = [torch.zeros_like(leaf) for leaf in exact]
    if expected.requires_grad:  # else the loop has computed nothing
        grads = list(torch.autograd.grad(expected, exact, grad.double(), materialize_grads=True))
    names = ["rows", "gate weights", "gate_up", "down", "gate_up_bias", "down_bias"]
    for name, leaf, got_grad, want in zip(names, leaves, got_grads, grads, strict=False):
        assert got_grad.dtype == leaf.dtype
        assert_close(got_grad, want, dtype, name)


@pytest.mark.parametrize("know_copies", [False, True], ids=["padded", "counted"])
@pytest.mark.parametrize("glu", list(GLUS))
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_loop(name, dtype, glu, know_copies):
    check(CASES[name], dtype, glu, know_copies, seed=7)


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_loop_on_fresh_shapes(seed):
    torch.manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, ()))

    case = Case(draw(1, 40), draw(1, 20), draw(1, 20), draw(1, 8), draw(1, 9), draw(0, 3), draw(0, 9) / 10)
    print(case)
    dtype = list(TOLERANCES)[seed % 4]
    check(case, dtype, "clamped" if seed % 3 == 0 else "swiglu", bool(seed % 2), seed)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", ["no rows", "no slots", "all absent", "no copies per row"])
def test_nothing_to_compute(name, dtype):
    """The result is 0 and still has a graph: another rank's collectives in backward wait for this one."""
    case = CASES[name]
    stack = case.weights(1, dtype, bias=True)
    rows = torch.full((case.rows, case.hidden), torch.nan if name != "all absent" else 1.0, dtype=dtype)
    rows.requires_grad_()
    gates = torch.full((case.rows, case.top_k), torch.nan, requires_grad=True)
    resident, spare = part(stack, 0, case.resident), part(stack, case.resident, case.num_slots)
    parameters = [t.requires_grad_() for t in tensors(resident)]
    y = run_experts(rows, case.slots(1), gates, [resident, spare], ClampedGLU(), (0, 0))
    assert torch.equal(y, torch.zeros_like(rows))
    y.sum().backward()
    assert torch.equal(rows.grad, torch.zeros_like(rows))
    assert torch.equal(gates.grad, torch.zeros_like(gates))
    for parameter in parameters:
        assert parameter.grad is None if not case.resident else not parameter.grad.any()


@pytest.mark.parametrize("glu", list(GLUS))
def test_gradcheck(glu):
    case = replace(CASES["two groups"], rows=3, hidden=4, inner=3, top_k=3, absent=0.2)
    stack, slots = case.weights(3, torch.float64, bias=True), case.slots(1)
    rows = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    gates = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    leaves = [t.requires_grad_() for t in (rows, gates, *tensors(stack))]

    def compute(rows: Tensor, gates: Tensor, *stacks: Tensor) -> Tensor:
        all_slots = ExpertWeights(*stacks)
        groups = [part(all_slots, 0, 5), part(all_slots, 5, 7)]
        return run_experts(rows, slots, gates, groups, GLUS[glu])

    assert (slots >= 5).any() and ((slots >= 0) & (slots < 5)).any() and (slots == -1).any()
    assert torch.autograd.gradcheck(compute, leaves)


def poisoned_grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """grouped_mm with nan where it leaves memory uninitialised."""
    return (
        PoisonTail.apply(GROUPED_MM(PoisonTail.apply(a, offs), b, offs=offs), offs)
        if b.dim() == 3
        else GROUPED_MM(a, b, offs=offs)
    )


GROUPED_MM = F.grouped_mm


class PoisonTail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offs):
        ctx.save_for_backward(offs)
        return x.clone().index_fill_(0, torch.arange(int(offs[-1]), len(x)), torch.nan)

    @staticmethod
    def backward(ctx, grad):
        (offs,) = ctx.saved_tensors
        return grad.clone().index_fill_(0, torch.arange(int(offs[-1]), len(grad)), torch.nan), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("glu", list(GLUS))
def test_the_tail_is_never_read(monkeypatch, glu, dtype):
    monkeypatch.setattr(F, "grouped_mm", poisoned_grouped_mm)
    check(CASES["aligned"], dtype, glu, know_copies=False, seed=5)
    check(CASES["two groups"], dtype, glu, know_copies=False, seed=6)


def test_a_broadcast_gradient_is_taken():
    """grouped_mm refuses gradients with stride 0, which sum() sends."""
    case = CASES["aligned"]
    weights = case.weights(2, torch.float32, bias=True)
    rows = torch.randn(case.rows, case.hidden, requires_grad=True)
    gates = torch.rand(case.rows, case.top_k)
    run_experts(rows, case.slots(2), gates, [weights], ClampedGLU()).sum().backward()
    assert rows.grad is not None and rows.grad.isfinite().all()


def test_sums_over_copies_are_fp32():
    """256 + 1 is 256 in bf16: eight copies of weight 1 after a 256 would vanish."""
    slots = torch.arange(9)[None]
    down = torch.zeros(9, 8, 8, dtype=torch.bfloat16)
    down[:, 0, 0] = 1
    gate_up_bias = torch.zeros(9, 16, dtype=torch.bfloat16)
    down_bias = torch.zeros(9, 8, dtype=torch.bfloat16)
    down_bias[:, 0] = 1
    down_bias[0, 0] = 256
    gate_up = torch.zeros(9, 16, 8, dtype=torch.bfloat16)
    weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
    y = run_experts(torch.ones(1, 8).bfloat16(), slots, torch.ones(1, 9), [weights], SwiGLU())
    assert float(y[0, 0]) == 264


@pytest.mark.parametrize("glu", list(GLUS))
def test_no_value_is_read(glu):
    """Under FakeTensorMode reading a value raises; so no device would make the host wait, backward included."""
    with FakeTensorMode():
        weights = ExpertWeights.random(4, 16, 8, bias=True, dtype=torch.bfloat16)
        groups = [part(weights, 0, 3), part(weights, 3, 4)]
        for stack in tensors(groups[0]):
            stack.requires_grad_()
        rows = torch.randn(9, 16, dtype=torch.bfloat16, requires_grad=True)
        gates = torch.rand(9, 3, requires_grad=True)
        y = run_experts(rows, torch.zeros(9, 3, dtype=torch.int64), gates, groups, GLUS[glu])
        y.sum().backward()
        assert y.shape == rows.grad.shape == (9, 16) and y.dtype == torch.bfloat16
        with pytest.raises(DataDependentOutputException):
            y.sum().item()


@pytest.mark.slow
def test_compiles_without_graph_breaks():
    case = CASES["two groups"]
    # bf16: torch's shape rule for grouped_mm refuses other dtypes while tracing.
    stack, slots = case.weights(9, torch.bfloat16, bias=True), case.slots(9)
    parameters = [t.clone().requires_grad_() for t in tensors(part(stack, 0, 5))]
    spare = part(stack, 5, 7)

    def compute(rows: Tensor, gates: Tensor) -> Tensor:
        return run_experts(rows, slots, gates, [ExpertWeights(*parameters), spare], ClampedGLU())

    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    results = []
    for run in (compute, compiled):
        torch.manual_seed(9)
        rows = torch.randn(case.rows, case.hidden, dtype=torch.bfloat16, requires_grad=True)
        y = run(rows, torch.rand(slots.shape))
        results.append((y, *torch.autograd.grad(y.square().sum(), [rows, *parameters])))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def arguments(**changes):
    case = CASES["two groups"]
    stack = case.weights(1, torch.float32, bias=False)
    given = {
        "rows": torch.zeros(29, 16),
        "slots": case.slots(1),
        "weights": torch.zeros(29, 5),
        "groups": [part(stack, 0, 5), part(stack, 5, 7)],
        "activation": SwiGLU(),
    }
    return given | changes


REFUSED = {
    "no groups": ({"groups": []}, "groups must hold at least one stack of weights, got none"),
    "mixed groups": (
        {"groups": [ExpertWeights.random(1, 16, 8), ExpertWeights.random(1, 8, 8)]},
        r"groups\[1\] must have the width and dtype of groups\[0\] \(16, torch.float32\), got 8, torch.float32",
    ),
    "rows shape": ({"rows": torch.zeros(29, 8)}, r"rows must be \[N, 16\] torch.float32, got \[29, 8\]"),
    "rows dtype": ({"rows": torch.zeros(29, 16).half()}, r"rows must be .* got \[29, 16\] torch.float16"),
    "slots shape": (
        {"slots": torch.zeros(28, 5).long()},
        r"slots must be \[29, K\] int32 or int64, got \[28, 5\] torch.int64",
    ),
    "slots dtype": ({"slots": torch.zeros(29, 5).float()}, r"slots must be .* got \[29, 5\] torch.float32"),
    "weights shape": ({"weights": torch.zeros(29, 4)}, r"weights must be \[29, 5\] .* got \[29, 4\]"),
    "weights dtype": (
        {"weights": torch.zeros(29, 5).double()},
        r"weights must be \[29, 5\] torch.float32 \(torch.float64 only with float64 rows\), "
        r"got \[29, 5\] torch.float64",
    ),
    "device": ({"rows": torch.zeros(29, 16, device="meta")}, "rows must be on cpu, got meta"),
    "slot too high": ({"slots": torch.full((29, 5), 7)}, r"slots must be in -1..6, got 7"),
    "slot too low": ({"slots": torch.full((29, 5), -2)}, r"slots must be in -1..6, got -2"),
    "copies per group": (
        {"max_copies": [3]},
        r"max_copies must have one entry per group \(2\), got 1",
    ),
    "wrong copies": (
        {"slots": torch.full((29, 5), 6), "max_copies": [0, 9]},
        r"max_copies\[1\] must be at least the number of copies present \(145\), got 9",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        run_experts(**arguments(**changes))
