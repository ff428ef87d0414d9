"""What a dispatcher's way of sending makes of a batch: by ranks in one hop, or by nodes in two; in plain loops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload.transport import Transport
from support.batches import Batch


def per_node(transport: Transport) -> int:
    """Ranks whose rows a token's sum is made of first."""
    return transport.group.topology.ranks_per_node if transport.dispatcher.adds_in_nodes else 1


def in_order(transport: Transport, rows: list[Any]) -> list[Any]:
    """Rows by source and token, as they arrive: over leaders by their place in the node first."""
    places = per_node(transport)
    return sorted(rows, key=lambda row: row[0] % places)


def last_place(ranks: list[int]) -> Callable[[int], int]:
    return lambda rank: max(place for place, other in enumerate(ranks) if other == rank)


def summed(transport: Transport, batch: Batch, source: int, scales: list[float]) -> Tensor:
    """[T, H] what combine makes of rows that every rank multiplies by its scale, in the dispatcher's order."""
    dtype = batch.x[source].dtype
    exact, size = torch.promote_types(dtype, torch.float32), per_node(transport)
    expected = torch.zeros(batch.x[source].shape, dtype=exact)
    for token, chosen in enumerate(batch.slots[source].tolist()):
        ranks = [slot // batch.slots_per_rank for slot in chosen if slot >= 0]
        order = None if transport.dispatcher.adds_by_rank else last_place(ranks)
        for _, of_node in groupby(sorted(set(ranks), key=order), lambda rank: rank // size):
            total = torch.zeros_like(expected[token])
            for rank in of_node:  # rounded to dtype, as the wire carries it
                total += (batch.x[source][token] * scales[rank]).to(exact)
            expected[token] += total.to(dtype).to(exact)
    return expected.to(dtype)


def sent_rows(transport: Transport, batch: Batch) -> tuple[list[np.ndarray], np.ndarray]:
    """[R, R] rows by source and destination of every hop, and what traffic counts of them."""
    if not transport.dispatcher.adds_in_nodes:
        return [batch.num_rows()], batch.num_rows()
    across, inside = batch.hop_rows(per_node(transport))
    return [across, inside], across - np.diag(np.diag(across)) + inside


def fixed_rows(transport: Transport) -> int:
    """Rows that a rank sends in all hops with max_tokens_per_rank = 1."""
    num_ranks = transport.group.topology.num_ranks
    return num_ranks + (num_ranks // per_node(transport) if transport.dispatcher.adds_in_nodes else 0)
