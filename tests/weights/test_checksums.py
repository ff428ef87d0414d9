"""Checksums of slots: against whole numbers of Python, and what changes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isoload.weights import checksums
from isoload.weights.checksums import WrongSlot, expert_checksums, slot_checksums, wrong_slots
from support.host_waits import HostWaits

SLOTS = 5
ALL = (1 << 64) - 1


def layer(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Two weights and two scales of five slots; no slot's bytes are a multiple of eight in all of them."""
    generator = torch.Generator().manual_seed(0)
    shapes = (SLOTS, 6, 7), (SLOTS, 7, 3), (SLOTS, 3), (SLOTS,)
    drawn = [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes]
    wide = [tensor.repeat_interleave(dtype.itemsize, dim=-1) for tensor in drawn[:2]]
    return [wide[0].view(dtype), wide[1].view(dtype), drawn[2], drawn[3].float()]


def oracle(weights: list[Tensor], slot: int) -> int:
    """Word by word, in numbers of any size."""
    total = position = 0
    for tensor in weights:
        raw = bytes(tensor[slot].contiguous().reshape(-1).view(torch.uint8).tolist())
        for start in range(0, len(raw), 8):
            word = int.from_bytes(raw[start : start + 8].ljust(8, b"\0"), "little")
            word ^= position * 0x9E3779B97F4A7C15 & ALL
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & ALL
            word = (word ^ word >> 27) * 0x94D049BB133111EB & ALL
            total += word ^ word >> 31
            position += 1
    return total & ALL


@pytest.mark.parametrize("chunk", [1, 64, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8])
def test_sums_are_the_oracles_whatever_a_chunk_holds(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", chunk)
    weights = layer(dtype)
    assert [int(of) & ALL for of in slot_checksums(weights)] == [oracle(weights, s) for s in range(SLOTS)]


def test_where_a_tensor_lies_does_not_matter() -> None:
    weights, sums = layer(), slot_checksums(layer())
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 3 else t for t in weights]
    assert not turned[0].is_contiguous()
    aside = [torch.cat([torch.zeros(1, *t.shape[1:], dtype=t.dtype), t])[1:] for t in weights]
    assert torch.equal(slot_checksums(turned), sums) and torch.equal(slot_checksums(aside), sums)
    parameters = [torch.nn.Parameter(t, requires_grad=t.is_floating_point()) for t in weights]
    assert torch.equal(slot_checksums(parameters), sums) and not slot_checksums(parameters).requires_grad


def flip(weights: list[Tensor], of: int, bit: int) -> None:
    """One bit of slot 2."""
    raw = weights[of][2].view(-1).view(torch.uint8)
    raw[-1] ^= 1 << bit


def swap(tensor: Tensor, a: int, b: int) -> None:
    tensor[2, [a, b]] = tensor[2, [b, a]]


CHANGES: dict[str, Callable[[list[Tensor]], None]] = {
    **{f"bit {bit} of {of}": lambda w, of=of, bit=bit: flip(w, of, bit) for of in range(4) for bit in (0, 7)},
    "two rows": lambda w: swap(w[0], 1, 4),
    "two scales": lambda w: swap(w[2], 0, 2),
    "a row of another slot": lambda w: w[1][2, 3].copy_(w[1][3, 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_changes_the_sum_of_its_slot_alone(name: str) -> None:
    weights, before = layer(), slot_checksums(layer())
    CHANGES[name](weights)
    assert (slot_checksums(weights) != before).tolist() == [slot == 2 for slot in range(SLOTS)]


def test_words_that_differ_in_their_highest_bit_cannot_change_places_unseen() -> None:
    """A sum of words times odd numbers would be blind to it."""
    words = torch.tensor([[1, 1 - (1 << 63)], [1 - (1 << 63), 1]])
    first, second = slot_checksums([words]).tolist()
    assert first != second


def test_order_and_place_of_tensors_matter() -> None:
    weights = layer()
    assert not torch.equal(slot_checksums(weights), slot_checksums(weights[::-1]))
    zeros = torch.zeros(2, 16)
    assert slot_checksums([zeros, zeros]).tolist() != slot_checksums([zeros]).tolist()
    assert len(slot_checksums([torch.zeros(2, 16)]).unique()) == 1, "the same bytes, the same sum"


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an op makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.data_ptr() not in {
            a.data_ptr() for a in args if isinstance(a, Tensor)
        }:
            self.most = max(self.most, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("turned", [False, True])
def test_memory_beside_the_weights_is_bounded(monkeypatch: pytest.MonkeyPatch, turned: bool) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 4096)
    weights = torch.zeros(4, 64, 256)
    weights = weights.transpose(1, 2) if turned else weights
    with Largest() as seen:
        slot_checksums([weights])
    assert seen.most <= (weights[0].nbytes if turned else 4096)


def test_the_host_waits_for_nothing() -> None:
    with HostWaits(lambda _: []) as host:
        weights = [torch.empty(4, 64, 32, device="cuda"), torch.empty(4, 3, dtype=torch.uint8, device="cuda")]
        sums = slot_checksums(weights)
    assert sums.shape == (4,) and not host.waits


BAD = {
    "none": ([], "got []"),
    "others": ([torch.zeros(3, 2), torch.zeros(4, 2)], "got [3, 4]"),
    "no slots": ([torch.zeros(0, 2)], "got [0]"),
    "one number": ([torch.zeros(3, 2), torch.tensor(1.0)], "got [3, 0]"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name: str) -> None:
    given, got = BAD[name]
    with pytest.raises(
        ValueError, match=re.escape(f"weights must have one row for each slot, the same number in all, {got}")
    ):
        slot_checksums(given)


def test_an_experts_sum_is_that_of_its_lowest_slot() -> None:
    table, sums = (
        torch.tensor([[2, 0, 1, 0], [0, 1, 2, 2]]),
        torch.tensor([[12, 10, 11, 99], [20, 21, 22, 98]]),
    )
    assert expert_checksums(sums, table, 3).tolist() == [[10, 11, 12], [20, 21, 22]]


def test_wrong_slots_say_whose_weights_they_have() -> None:
    own = torch.tensor([[10, 11, 12], [20, 21, 22]])
    table = torch.tensor([[2, 0, 1, 0], [0, 1, 2, 2]])
    right = own.gather(1, table)
    assert wrong_slots(right, table, own, [3, 7], 2) == []
    sums = right.clone()
    sums[0, 2], sums[1, 0] = 12, 5
    assert wrong_slots(sums, table, own, [3, 7], 2) == [WrongSlot(3, 1, 2, 1, 2), WrongSlot(7, 0, 0, 0, None)]


@pytest.mark.parametrize("size", [8, 13, 64])
def test_weights_stay_as_they_are(size: int) -> None:
    """Words are mixed in place, in copies: also where nothing has to be filled up."""
    weights = [torch.arange(3 * size, dtype=torch.uint8).view(3, size), torch.randn(3, 2, size)]
    before = [tensor.clone() for tensor in weights]
    slot_checksums(weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


def test_absent_slots_have_no_expert_and_are_never_wrong() -> None:
    """Without the test for -1 the last expert's checksum would be that of an absent slot."""
    sums = torch.tensor([[10, 11, 0, 12, 11, 0]])
    table = torch.tensor([[0, 1, -1, 2, 1, -1]])
    expected = expert_checksums(sums, table, 3)
    assert expected.tolist() == [[10, 11, 12]]
    assert wrong_slots(sums, table, expected, [7], 2) == []
    moved = sums.clone()
    moved[0, 4] = 12
    assert wrong_slots(moved, table, expected, [7], 2) == [WrongSlot(7, 1, 4, 1, 2)]
