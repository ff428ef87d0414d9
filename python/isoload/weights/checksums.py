"""Checksums of the weights in every slot, and the slots that do not hold the expert that their map names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from isoload.weights.layout import as_bytes

CHUNK_BYTES = 1 << 25  # of all slots together; the peak is three times as much
WORD = 8  # bytes
# SplitMix64's step and mixer (Steele, Lea and Flood 2014, as in Vigna's splitmix64.c), as signed integers.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
LAST_SHIFT = 31


class WrongSlot(NamedTuple):
    """A slot whose weights are not those of its expert in the layer's map."""

    layer: int  # its number
    rank: int  # of the slot
    slot: int  # of 0..P-1
    expert: int  # that the slot should hold
    holds: int | None  # the expert whose weights the slot has; None: of no expert


def slot_checksums(weights: Sequence[Tensor]) -> Tensor:
    """Return [S] int64, a checksum of the bytes of every slot's weights, on their device without a host wait. Each word
    of 8 bytes is mixed with its position and added modulo 2^64: equal bytes have equal sums on every device, and a
    change of one word always changes the sum. Temporary memory is about 100 MB for contiguous tensors.
    """
    rows = [len(tensor) if tensor.dim() else 0 for tensor in weights]
    if not rows or min(rows) < 1 or len(set(rows)) > 1:
        raise ValueError(f"weights must have one row for each slot, the same number in all, got {rows}")
    sums = torch.zeros(rows[0], dtype=torch.int64, device=weights[0].device)
    position = 0
    for tensor in weights:
        parts = [tensor] if tensor.is_contiguous() else tensor.split(1)
        for first, part in enumerate(parts):
            slot_sums = sums[first : first + len(part)]
            words, width = 0, max(CHUNK_BYTES // len(part) // WORD, 1) * WORD
            for chunk in as_bytes(part.detach().contiguous()).split(width, dim=1):
                copy = pad(chunk, (0, -chunk.shape[1] % WORD)).view(torch.int64)  # zeros fill the last word
                slot_sums += _mixed(copy, position + words).sum(1)
                words += copy.shape[1]
        position += words
    return sums


def _mixed(words: Tensor, first: int) -> Tensor:
    """Mix in place, by a bijection of each word that depends on its position [first, first + n)."""
    words ^= torch.arange(first, first + words.shape[1], device=words.device) * STEP
    for shift, factor in ROUNDS:
        words ^= _shifted(words, shift)
        words *= factor
    words ^= _shifted(words, LAST_SHIFT)
    return words


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right as for unsigned numbers: an arithmetic shift would map two words to one."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def expert_checksums(sums: Tensor, slot_to_expert: Tensor, num_experts: int) -> Tensor:
    """Return [L, E] int64, each expert's sum in its lowest slot, from sums and experts [L, P] of slots; -1 = absent."""
    checksums = sums.new_zeros(len(sums), num_experts)
    for slot in reversed(range(sums.shape[1])):
        layers = (slot_to_expert[:, slot] >= 0).nonzero().flatten()
        checksums[layers, slot_to_expert[layers, slot].long()] = sums[layers, slot]
    return checksums


def wrong_slots(
    sums: Tensor, slot_to_expert: Tensor, expected: Tensor, layers: Sequence[int], num_ranks: int
) -> list[WrongSlot]:
    """Return the slots whose sum [L, P] differs from their expert's [L, E]; slot_to_expert -1: absent, or any."""
    per_rank = sums.shape[1] // num_ranks
    wrong = []
    present = slot_to_expert >= 0
    differs = sums != expected.gather(1, slot_to_expert.long().clamp(min=0))
    for i, slot in (differs & present).nonzero().tolist():
        holds = (expected[i] == sums[i, slot]).nonzero().flatten().tolist()
        expert = int(slot_to_expert[i, slot])
        wrong.append(WrongSlot(layers[i], slot // per_rank, slot, expert, holds[0] if holds else None))
    return wrong
