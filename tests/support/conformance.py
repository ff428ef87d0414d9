"""The conformance suite of a transport, written from DeepEP's contract and recounted in plain loops.

A case takes a transport over R ranks and checks what its own ranks got. Inputs of all ranks are drawn from a fixed
seed in every process, so a case knows what to expect without asking a peer, and the same case runs on R virtual ranks
of one process and on R processes. Every transport passes all CASES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isoload.transport import LocalTransport, Received, Transport
from support.batches import Batch, batches, draw
from support.hops import fixed_rows, in_order, sent_rows, summed

Make = Callable[[], Transport]
# largest error relative to the largest reference value
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def own(transport: Transport, values: list[Tensor]) -> list[Tensor]:
    return [values[rank] for rank in transport.group.ranks]


def given(transport: Transport, dtype: torch.dtype | None = None) -> Iterator[Batch]:
    """The named batches in a dtype (None: the first) and with the hidden sizes that a transport carries."""
    dispatcher = transport.dispatcher
    return batches(
        transport.group.topology.num_ranks, dtype or dispatcher.dtypes[0], dispatcher.hidden_multiple
    )


def one(transport: Transport, name: str, **how: Any) -> Batch:
    """One batch more, likewise."""
    dispatcher = transport.dispatcher
    how = {"dtype": dispatcher.dtypes[0], "width": dispatcher.hidden_multiple, **how}
    return draw(name, transport.group.topology.num_ranks, **how)


def send(transport: Transport, batch: Batch) -> list[Received]:
    inputs = (own(transport, values) for values in (batch.x, batch.slots, batch.weights))
    return transport.dispatcher.dispatch(*inputs, batch.slots_per_rank)


def check_rows(make: Make) -> None:
    """A token comes once per rank, in order, with its slots and weights; other rows are padding."""
    transport = make()
    num_ranks, capacity = transport.group.topology.num_ranks, transport.dispatcher.max_tokens_per_rank
    for dtype in transport.dispatcher.dtypes:
        for batch in given(transport, dtype):
            for rank, got in zip(transport.group.ranks, send(transport, batch), strict=True):
                expected = in_order(transport, batch.received_by(rank))
                real = (got.slots >= 0).any(1)
                label = f"{batch.name}, rank {rank}, {dtype}"
                assert int(real.sum()) == len(expected), label
                assert got.rows.dtype == dtype and got.weights.dtype == torch.float32, label
                assert got.slots.dtype in (torch.int32, torch.int64), label
                assert got.slots.shape == got.weights.shape, label
                assert not got.weights[got.slots < 0].any(), label
                if transport.dispatcher.host_waits:
                    assert real.all(), label
                else:
                    assert len(real) == num_ranks * capacity, label
                    assert not got.rows[~real].any(), label
                rows, slots, weights = got.rows[real], got.slots[real], got.weights[real]
                for i, (source, token, local, kept) in enumerate(expected):
                    assert torch.equal(rows[i], batch.x[source][token]), label
                    assert slots[i].tolist() == local and weights[i].tolist() == kept, label


def check_slot_counts(make: Make) -> None:
    """Copies per slot, counted from what arrived, are those that all ranks sent to it; int32 slots do as well."""
    transport = make()
    for batch in given(transport):
        narrow = Batch(
            batch.name, batch.x, [s.int() for s in batch.slots], batch.weights, batch.slots_per_rank
        )
        sent = torch.cat([slots.flatten() for slots in batch.slots]).numpy()
        for rank, got in zip(transport.group.ranks, send(transport, narrow), strict=True):
            first = rank * batch.slots_per_rank
            expected = [int((sent == first + s).sum()) for s in range(batch.slots_per_rank)]
            assert [int((got.slots == s).sum()) for s in range(batch.slots_per_rank)] == expected, batch.name


def check_sums(make: Make) -> None:
    """Combine adds a token's rows in its order in max(float32, dtype), exactly; without copies it gives 0."""
    transport = make()
    for dtype in transport.dispatcher.dtypes:
        for batch in given(transport, dtype):
            received = send(transport, batch)
            scales = [0.37 + rank for rank in range(len(batch.x))]
            y = [got.rows * scales[rank] for rank, got in zip(transport.group.ranks, received, strict=True)]
            for rank, out in zip(
                transport.group.ranks, transport.dispatcher.combine(y, received), strict=True
            ):
                assert out.dtype == dtype, batch.name
                assert torch.equal(out, summed(transport, batch, rank, scales)), f"{batch.name}, {dtype}"


def check_own_contributions(make: Make) -> None:
    """What a rank adds to its own tokens without dispatch takes the place, and the gradient, of rows that travel."""
    transport = make()
    ranks, dispatcher = transport.group.ranks, transport.dispatcher
    for dtype in {transport.dispatcher.dtypes[0], torch.bfloat16}:
        for batch in given(transport, dtype):
            parts = [0.37 + rank for rank in range(len(batch.x))]
            received = send(transport, batch)
            whole = dispatcher.combine(
                [got.rows * parts[r] for r, got in zip(ranks, received, strict=True)], received
            )
            mine = []
            for rank, x, slots in zip(
                ranks, own(transport, batch.x), own(transport, batch.slots), strict=True
            ):
                here = slots.div(batch.slots_per_rank, rounding_mode="floor") == rank
                mine.append(leaf((x * parts[rank]).masked_fill(~here.any(1, keepdim=True), 0)))
            received = send(transport, batch.without_own_copies())
            y = [leaf(got.rows.detach() * parts[r]) for r, got in zip(ranks, received, strict=True)]
            out = dispatcher.combine(y, received, mine)
            for a, b in zip(out, whole, strict=True):
                if dispatcher.adds_by_rank and not dispatcher.adds_in_nodes:
                    assert torch.equal(a, b), f"{batch.name}, {dtype}"
                else:  # own contributions come first, or last of their node
                    torch.testing.assert_close(a, b, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
            scale = own(transport, loss_weights(batch))
            torch.stack([(o * g).sum() for o, g in zip(out, scale, strict=True)]).sum().backward()
            assert all(torch.equal(m.grad, g) for m, g in zip(mine, scale, strict=True)), batch.name


def check_started_dispatch(make: Make) -> None:
    """A dispatch that is begun brings what one at once brings, with other exchanges in between; forward only."""
    transport = make()
    for batch in given(transport, torch.bfloat16):
        inputs = [own(transport, values) for values in (batch.x, batch.slots, batch.weights)]
        with torch.no_grad():
            wanted = send(transport, batch)
            sent = transport.group.traffic.bytes["dispatch"]
            started = transport.dispatcher.start_dispatch(*inputs, batch.slots_per_rank)
            out = transport.dispatcher.combine([got.rows for got in wanted], wanted)
            received = started()
            assert transport.group.traffic.bytes["dispatch"] == 2 * sent, batch.name
            transport.group.reset_traffic()
            for got, want in zip(received, wanted, strict=True):
                for name in ("rows", "slots", "weights"):
                    assert torch.equal(getattr(got, name), getattr(want, name)), batch.name
            again = transport.dispatcher.combine([got.rows for got in received], received)
            assert all(torch.equal(a, b) for a, b in zip(out, again, strict=True)), batch.name


def check_padding_is_ignored(make: Make) -> None:
    """What stands in rows without copies never reaches a token, nan and inf included."""
    transport = make()
    for batch in given(transport):
        received = send(transport, batch)
        y = [got.rows.masked_fill((got.slots < 0).all(1, keepdim=True), torch.nan) for got in received]
        for out in transport.dispatcher.combine(y, received):
            assert out.isfinite().all(), batch.name


def check_padding_gives_no_gradient(make: Make) -> None:
    """Experts that compute padding as well: what comes back for it is not nan, which 0 rows would not undo."""
    transport = make()
    for batch in given(transport):
        received = send(transport, batch)
        matrix = leaf(torch.eye(batch.x[0].shape[1], 3, dtype=batch.x[0].dtype))
        y = [(got.rows @ matrix).sum(1, keepdim=True).expand_as(got.rows) for got in received]
        torch.stack([out.sum() for out in transport.dispatcher.combine(y, received)]).sum().backward()
        assert matrix.grad is not None and matrix.grad.isfinite().all(), batch.name


def check_traffic(make: Make) -> None:
    """Rows per (source, destination) and host syncs, recounted."""
    for batch in given(first := make(), torch.bfloat16):
        num_ranks, transport = first.group.topology.num_ranks, make()
        received = send(transport, batch)
        transport.dispatcher.combine([got.rows for got in received], received)
        expected = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        _, rows = sent_rows(transport, batch)
        expected[list(transport.group.ranks)] = rows[list(transport.group.ranks)]
        assert np.array_equal(transport.group.traffic.rows.cpu().numpy(), expected), batch.name
        assert transport.group.traffic.host_syncs == transport.dispatcher.host_waits, batch.name


def check_bytes(make: Make) -> None:
    """Bytes of every exchange, recounted."""
    for batch in given(make(), torch.bfloat16):
        transport = make()
        hidden, top_k = batch.x[0].shape[1], batch.slots[0].shape[1]
        received = send(transport, batch)
        transport.dispatcher.combine([got.rows for got in received], received)
        capacity, own_ranks = transport.dispatcher.max_tokens_per_rank, list(transport.group.ranks)
        sent = got = len(own_ranks) * fixed_rows(transport) * (capacity or 0)
        if capacity is None:
            rows = sum(sent_rows(transport, batch)[0])
            sent, got = rows[own_ranks].sum(), rows[:, own_ranks].sum()
        row = 4 * -(-hidden // 2) + 8 * top_k  # slots start at a multiple of 4
        assert transport.group.traffic.bytes["dispatch"] == sent * 64 * -(-row // 64), batch.name
        assert transport.group.traffic.bytes["combine"] == got * 2 * hidden, batch.name


def check_loads(make: Make) -> None:
    """The gather returns every rank's counts to every rank; it is repeatable and waits for nothing."""
    transport = make()
    num_ranks = transport.group.topology.num_ranks
    for num_experts in (1, 5, 64):
        for seed in range(2):
            drawn = np.random.default_rng([seed, num_ranks]).integers(0, 2**31 - 1, (num_ranks, num_experts))
            counts = list(torch.from_numpy(drawn).int())
            loads = transport.group.gather_loads(own(transport, counts), [0] * len(transport.group.ranks))
            assert torch.equal(loads, torch.stack(counts)) and loads.dtype == torch.int32
    assert transport.group.traffic.host_syncs == 0


def experts(rows: Tensor, slots: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    """sum_k weights[:, k] * tanh(scale[slots[:, k]] * rows), absent copies aside; scale [S, H]."""
    exact = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros_like(rows, dtype=exact)
    for slot, weight in zip(slots.unbind(1), weights.unbind(1), strict=True):
        value = torch.tanh(rows * scale[slot.clamp(min=0)]).to(exact) * weight.unsqueeze(1)
        total = total + value.masked_fill((slot < 0).unsqueeze(1), 0)
    return total.to(rows.dtype)


def layer(transport: Transport, batch: Batch) -> dict[str, list[Tensor | None]]:
    """Output and gradients of dispatch, experts, combine under a fixed loss, for the transport's own ranks."""
    x = [leaf(value) for value in own(transport, batch.x)]
    weights = [leaf(value) for value in own(transport, batch.weights)]
    scale = [leaf(value) for value in own(transport, expert_scales(batch))]
    received = transport.dispatcher.dispatch(x, own(transport, batch.slots), weights, batch.slots_per_rank)
    y = [experts(got.rows, got.slots, got.weights, s) for got, s in zip(received, scale, strict=True)]
    out = transport.dispatcher.combine(y, received)
    losses = [(o * g).sum() for o, g in zip(out, own(transport, loss_weights(batch)), strict=True)]
    torch.stack(losses).sum().backward()
    grads = {"x": x, "weights": weights, "scale": scale}
    return {"out": [o.detach() for o in out]} | {k: [t.grad for t in v] for k, v in grads.items()}


def dense(batch: Batch) -> dict[str, list[Tensor | None]]:
    """The same without any exchange, token by token in float64, for all ranks."""
    x, weights, scale = (
        [leaf(v.double()) for v in values] for values in (batch.x, batch.weights, expert_scales(batch))
    )
    out = [experts(*args, torch.cat(scale)) for args in zip(x, batch.slots, weights, strict=True)]
    losses = [(o * g.double()).sum() for o, g in zip(out, loss_weights(batch), strict=True)]
    torch.stack(losses).sum().backward()
    grads = {"x": x, "weights": weights, "scale": scale}
    return {"out": [o.detach() for o in out]} | {k: [t.grad for t in v] for k, v in grads.items()}


def leaf(value: Tensor) -> Tensor:
    return value.clone().requires_grad_()


def expert_scales(batch: Batch) -> list[Tensor]:
    """[R][S, H] parameters of the made-up experts."""
    rng, shape = np.random.default_rng(11), (len(batch.x), batch.slots_per_rank, batch.x[0].shape[1])
    return list(torch.from_numpy(rng.standard_normal(shape)).to(batch.x[0].dtype))


def loss_weights(batch: Batch) -> list[Tensor]:
    rng = np.random.default_rng(12)
    return [torch.from_numpy(rng.standard_normal(x.shape)).to(x.dtype) for x in batch.x]


def check_gradients(make: Make) -> None:
    """Output and all gradients equal the dense formula, for every dtype."""
    transport = make()
    for dtype in transport.dispatcher.dtypes:
        tolerance = TOLERANCES[dtype]
        for batch in given(transport, dtype):
            if dtype == torch.float64:
                batch.weights[:] = [w.double() for w in batch.weights]
            reference = dense(batch)
            for name, values in layer(transport, batch).items():
                for rank, value in zip(transport.group.ranks, values, strict=True):
                    expected = reference[name][rank]
                    # absent copies of x in no loss: dense autograd has no gradient, the exchange has zeros
                    expected = torch.zeros_like(value) if expected is None else expected
                    limit = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
                    error = (value.double() - expected).abs().max().item() if value.numel() else 0.0
                    assert error <= limit, f"{batch.name}, {dtype}, {name} of rank {rank}: {error} > {limit}"


def check_equals_local(make: Make) -> None:
    """Outputs and gradients are those of R virtual ranks in one process, bit for bit."""
    transport = make()
    for dtype in transport.dispatcher.dtypes:
        for batch in given(transport, dtype):
            capacity = transport.dispatcher.max_tokens_per_rank
            dispatch = "node" if transport.dispatcher.adds_in_nodes else "rank"
            local = layer(LocalTransport(transport.group.topology, capacity, dispatch=dispatch), batch)
            for name, values in layer(transport, batch).items():
                for rank, value in zip(transport.group.ranks, values, strict=True):
                    assert torch.equal(value, local[name][rank]), (
                        f"{batch.name}, {dtype}, {name} of rank {rank}"
                    )


def check_backward_everywhere(make: Make) -> None:
    """A rank where nothing requires a gradient, or whose experts are cut off, takes part in the others' backward."""
    transport = make()
    num_ranks = transport.group.topology.num_ranks
    batch = one(transport, "frozen ranks", absent=0.0)
    for frozen in range(num_ranks):
        for cut in (False, True):
            x = [value.clone().requires_grad_(rank != frozen) for rank, value in enumerate(batch.x)]
            mine = own(transport, x)
            received = transport.dispatcher.dispatch(
                mine, own(transport, batch.slots), own(transport, batch.weights), batch.slots_per_rank
            )
            y = [
                got.rows.detach() if cut and rank == frozen else got.rows * 2
                for rank, got in zip(transport.group.ranks, received, strict=True)
            ]
            torch.stack([out.sum() for out in transport.dispatcher.combine(y, received)]).sum().backward()
            for rank, value in zip(transport.group.ranks, mine, strict=True):
                if rank == frozen:
                    assert value.grad is None
                    continue
                for token, chosen in enumerate(batch.slots[rank].tolist()):
                    ranks = {slot // batch.slots_per_rank for slot in chosen}
                    expected = 2.0 * len(ranks - {frozen} if cut else ranks)
                    assert (value.grad[token] == expected).all(), f"rank {rank}, frozen {frozen}, cut {cut}"


def check_absent_weights(make: Make) -> None:
    """The weight of a copy gets the gradient of the one row that carries it; the zeros elsewhere give none."""
    transport = make()
    for batch in given(transport):
        weights = [leaf(w) for w in own(transport, batch.weights)]
        x, slots = own(transport, batch.x), own(transport, batch.slots)
        received = transport.dispatcher.dispatch(x, slots, weights, batch.slots_per_rank)
        torch.stack([got.weights.sum() for got in received]).sum().backward()
        for weight, chosen in zip(weights, slots, strict=True):
            assert torch.equal(weight.grad, (chosen >= 0).float()), batch.name


def check_checkpointing(make: Make) -> None:
    """Recomputing the exchanges in backward changes nothing, in both modes of torch.utils.checkpoint."""
    transport = make()
    batch = one(transport, "checkpointed")
    owned = len(transport.group.ranks)

    def forward(*values: Tensor) -> tuple[Tensor, ...]:
        x, weights = list(values[:owned]), list(values[owned:])
        received = transport.dispatcher.dispatch(
            x, own(transport, batch.slots), weights, batch.slots_per_rank
        )
        y = [(torch.tanh(got.rows) * got.weights.sum(1, keepdim=True)).to(got.rows.dtype) for got in received]
        return tuple(transport.dispatcher.combine(y, received))

    grads = []
    for mode in (None, True, False):
        values = [leaf(v) for v in own(transport, batch.x) + own(transport, batch.weights)]
        out = forward(*values) if mode is None else checkpoint(forward, *values, use_reentrant=mode)
        torch.stack([o.sum() for o in out]).sum().backward()
        grads.append([value.grad for value in values])
    for plain, reentrant, hooked in zip(*grads, strict=True):
        assert torch.equal(plain, reentrant) and torch.equal(plain, hooked)


def check_without_gradients(make: Make) -> None:
    """Under no_grad and inference_mode nothing is recorded, and the sums are the same."""
    transport = make()
    batch = one(transport, "no gradients")
    outs = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            received = send(transport, batch)
            outs.append(transport.dispatcher.combine([got.rows for got in received], received))
        assert all(o.requires_grad == (mode is torch.enable_grad) for o in outs[-1])
    for a, b, c in zip(*outs, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


CASES: dict[str, Callable[[Make], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
