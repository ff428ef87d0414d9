"""A kernel is compiled once for a layer: what changes from batch to batch is no part of what Triton keeps it by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from isoload.kernels import activation, permutation

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
SIZES = (0, 1, 2, 15, 16, 17, 32, 1000)
KERNELS = {
    permutation: ("_spread_kernel", "_sum_kernel", "_sum_backward_kernel"),
    activation: ("_forward_kernel", "_backward_kernel", "_add_kernel"),
}


class Keys:
    """Stands in for a kernel: notes by what Triton would keep the compiled one."""

    def __init__(self, kernel: Any) -> None:
        compiled = JITFunction(
            kernel.fn, **kernel.kwargs
        )  # as the decorator makes it outside of the interpreter
        self.bind = create_function_from_signature(compiled.signature, compiled.params, BACKEND)
        self.seen: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            _, specialization, options = self.bind(*args, **options)
            self.seen.add(f"{specialization} {options}")

        return launch


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> dict[str, Keys]:
    found = {name: Keys(getattr(module, name)) for module, names in KERNELS.items() for name in names}
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, found[name])
    return found


def behind(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros of a shape, `count` values behind an aligned address."""
    values = torch.zeros(torch.Size(shape).numel() + count, dtype=dtype)
    return values[count:].view(shape)


def launch_all(num_rows: int, num_places: int, num_slots: int, width: int, offset: int = 0) -> None:
    """Every launcher, with what it reads single values of `offset` values behind an aligned address."""
    rows, copies = torch.zeros(num_rows, width), torch.zeros(num_places, width)
    position, weights = behind(offset, num_rows, 8, dtype=torch.int64), behind(offset, num_rows, 8)
    permutation.spread_rows(rows, position, num_places, False)
    for parts in (1, 3):
        permutation.sum_rows([(copies, position)] * parts, weights, torch.float32)
    permutation.sum_rows_backward(rows, copies, weights, position)
    ends, gate_up = behind(offset, num_slots, dtype=torch.int32), torch.zeros(num_places, 2 * width)
    activation.activate(gate_up, ends, None)
    activation.activate_backward(copies, gate_up, ends, None)
    slot = behind(offset, num_places, dtype=torch.int64)
    activation.add_bias(copies, torch.zeros(num_slots, width), slot, ends)


def of_each(kernels: int) -> dict[str, int]:
    """How often each is compiled: the sum once for copies in one place, once for those in three."""
    return {name: kernels * (1 + (name == "_sum_kernel")) for _, names in KERNELS.items() for name in names}


@pytest.mark.parametrize("changes", range(3))
def test_one_kernel_for_all_sizes(changes: int, keys: dict[str, Keys]) -> None:
    for size in SIZES:
        sizes = [24, 48, 8]
        sizes[changes] = size
        launch_all(*sizes, width=64)
    assert {name: len(key.seen) for name, key in keys.items()} == of_each(1)


def test_one_kernel_for_all_addresses_of_single_values(keys: dict[str, Keys]) -> None:
    for offset in (0, 1, 2, 3):
        launch_all(24, 48, 8, 64, offset)
    assert {name: len(key.seen) for name, key in keys.items()} == of_each(1)


def test_a_width_is_compiled_for(keys: dict[str, Keys]) -> None:
    """Rows of whole 16 bytes are moved as such, which those of odd width cannot be."""
    for width in (64, 63):
        launch_all(24, 48, 8, width)
    assert {name: len(key.seen) for name, key in keys.items()} == of_each(2)
