"""What DeepEP cannot carry is refused on all ranks, with its name, before DeepEP is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isoload import Topology
from isoload.transport import Call, CollectiveGroup, Received
from isoload.transport.deep_ep import (
    DeepEPTransport,
    transport,
)
from isoload.transport.deep_ep import (
    transport as dispatcher,
)
from isoload.transport.deep_ep import (
    transport as packages,
)
from isoload.transport.deep_ep.wires import LIMITS, Shape, wire_of
from support.deep_ep_transports import BUFFERS, make_dispatcher
from support.processes import die, rank_outcomes, run_ranks

FITS = {"num_ranks": 8, "slots_per_rank": 40, "top_k": 8, "hidden": 7168, "max_tokens_per_rank": 4096}


@pytest.mark.parametrize("kind", LIMITS)
def test_deepseek_v3_fits_every_buffer(kind: str) -> None:
    LIMITS[kind].check(kind, Shape(**FITS))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("EPBuffer", {"slots_per_rank": 513, "num_ranks": 2}, "slots_per_rank must be at most 512"),
        ("ElasticBuffer", {"slots_per_rank": 257, "num_ranks": 2}, "slots_per_rank must be at most 256"),
        ("Buffer", {"slots_per_rank": 129}, "slots_per_rank must be at most 128"),
        ("Buffer", {"slots_per_rank": 65, "num_ranks": 16}, "slots_per_rank must be at most 64"),
        ("Buffer", {"hidden": 8192}, "hidden must be at most 7936 for DeepEP's Buffer, got 8192"),
        ("EPBuffer", {"slots_per_rank": 257}, "ranks x slots_per_rank must be at most 2048"),
        ("EPBuffer", {"top_k": 33}, "top_k must be at most 32"),
        ("Buffer, low latency", {"top_k": 12}, "top_k must be at most 11"),
        ("Buffer, low latency", {"num_ranks": 64}, "ranks x slots_per_rank must be at most 1848"),
        ("EPBuffer", {"top_k": 0}, "top_k must be at least 1, got 0"),
        ("EPBuffer", {"hidden": 2880}, "hidden must be a multiple of 256 for DeepEP's EPBuffer, got 2880"),
        ("Buffer, low latency", {"hidden": 3584}, "hidden must be one of 2048, 2560, 3072, 4096,"),
        ("Buffer", {"num_ranks": 6}, "num_ranks must be one of 2, 4, 8, 16,"),
        (
            "Buffer, low latency",
            {"max_tokens_per_rank": 7, "num_ranks": 2},
            "ranks x max_tokens_per_rank must be a multiple of 4 for DeepEP's Buffer, low latency, got 14",
        ),
        ("EPBuffer", {"max_tokens_per_rank": 0}, "max_tokens_per_rank must be at least 1, got 0"),
    ],
)
def test_limits(kind: str, change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LIMITS[kind].check(kind, Shape(**FITS | change))


def test_buffer_waits_between_nodes() -> None:
    buffer = BUFFERS["Buffer"](None)
    assert not wire_of(buffer, Shape(**FITS), waits=False).waits
    with pytest.raises(
        ValueError, match="waits must be True for DeepEP's Buffer over more than 8 ranks, got False"
    ):
        wire_of(buffer, Shape(**FITS | {"num_ranks": 16}), waits=False)


class OldEPBuffer:
    def dispatch(self, x, topk_idx, topk_weights, num_experts, handle):
        """An EPBuffer that never waits and has no capacity."""


OldEPBuffer.__name__ = "EPBuffer"


def constructions(rank: int) -> None:
    group = CollectiveGroup(Topology(2))
    shape = Shape(2, slots_per_rank=2, top_k=2, hidden=256, max_tokens_per_rank=4)
    with pytest.raises(ValueError, match="buffer must be one of EPBuffer, ElasticBuffer, Buffer .* got dict"):
        dispatcher.DeepEPDispatcher(group, {}, shape)
    with pytest.raises(
        ValueError, match="dispatch must take num_max_tokens_per_rank, do_handle_copy, do_cpu_sync"
    ):
        dispatcher.DeepEPDispatcher(group, OldEPBuffer(), shape)
    with pytest.raises(ValueError, match="waits must be False for DeepEP's Buffer, low latency, got True"):
        make_dispatcher(group, BUFFERS["Buffer"], 2048, 2, 2, low_latency=True)
    one_differs = "shape of DeepEP must be the same on all ranks, got Shape.* on rank 0 and Shape.* on rank 1"
    with pytest.raises(ValueError, match=one_differs):
        make_dispatcher(group, BUFFERS["EPBuffer"], 256 * (1 + rank), 2, 2)
    message = "hidden must be a multiple of 256" if rank else "rank 1 failed in stage construction"
    with pytest.raises(ValueError, match=message):
        make_dispatcher(group, BUFFERS["EPBuffer"], 256 + rank, 2, 2)


def test_constructions_are_refused_on_all_ranks() -> None:
    run_ranks(constructions, 2)


GOOD = {"x": (3, 256), "slots": [[0, 3], [1, -1], [2, 0]]}


def send(made: Any, x: Tensor, slots: Tensor, call: Call | None = None) -> list[Received]:
    return made.dispatch([x], [slots], [torch.rand(slots.shape)], 2, call)


CHANGES: dict[str, tuple[Any, str]] = {
    "dtype": (lambda x, s: (x.float(), s), "x of rank 1 must be bfloat16 for DeepEP, got torch.float32"),
    "hidden": (
        lambda x, s: (x.repeat(1, 2), s),
        "hidden of rank 1 must be 256, as the dispatcher was made for",
    ),
    "top-k": (lambda x, s: (x, s[:, :1]), "top_k of rank 1 must be 2, as the dispatcher was made for, got 1"),
    "tokens": (
        lambda x, s: (x.repeat(6, 1), s.repeat(6, 1)),
        "x of rank 1 must have at most max_tokens_per_rank=13 tokens, got 18",
    ),
    "range": (lambda x, s: (x, s + 1), "slots of rank 1 must be in -1..3, got 4"),
    "repeated": (
        lambda x, s: (x, s.clamp(min=2)),
        "slots of rank 1 must differ within a token for DeepEP's EPBuffer, got 2 twice",
    ),
}


def arguments(rank: int, name: str) -> None:
    made = make_dispatcher(CollectiveGroup(Topology(2)), BUFFERS["EPBuffer"], 256, 2, 2)
    x, slots = torch.ones(*GOOD["x"], dtype=torch.bfloat16), torch.tensor(GOOD["slots"])
    send(made, x, slots)
    change, message = CHANGES[name]
    with pytest.raises(ValueError, match=message if rank else "rank 1 failed in stage dispatch"):
        send(made, *(change(x, slots) if rank else (x, slots)))
    (got,) = send(made, x, slots)  # nobody was left behind
    with pytest.raises(
        ValueError, match=r"y of rank . must be \[., 256\] torch.bfloat16 as the received rows"
    ):
        made.combine([got.rows.float()], [got])
    with pytest.raises(
        ValueError, match=r"own of rank . must be \[3, 256\] torch.bfloat16 as the rank's tokens"
    ):
        made.combine([got.rows], [got], [x[:1]])
    with pytest.raises(ValueError, match="received must come from this dispatcher's dispatch, got a str"):
        made.combine([got.rows], [Received(got.rows, got.slots, got.weights, "handle")])


@pytest.mark.parametrize("name", CHANGES)
def test_arguments_are_refused_on_all_ranks(name: str) -> None:
    run_ranks(arguments, 2, name)


def failing(rank: int, readable: bool) -> None:
    if not readable:  # as on a device: nothing is exchanged, the loads' gather has carried the failure
        dispatcher.values_readable = lambda tensor: False
    group = CollectiveGroup(Topology(2))
    made = make_dispatcher(group, BUFFERS["EPBuffer"], 256, 2, 2)
    call = Call(group, "count", torch.device("cpu"), {"layer": 3})
    if rank == 1:
        call.failure = OSError("disk full")
        made.carry_failure(call)
    if not readable:
        group._unread = torch.tensor([0, -1])
    send(made, torch.ones(3, 256, dtype=torch.bfloat16), torch.tensor(GOOD["slots"]), call)


@pytest.mark.parametrize("readable", [True, False])
def test_a_rank_that_failed_is_told(readable: bool) -> None:
    first, second = rank_outcomes(failing, 2, readable)
    assert "ValueError: rank 1 failed in stage count, so all ranks stop" in str(first.error)
    assert "OSError: disk full" in str(second.error)


def dying(rank: int, stage: str) -> None:
    made = make_dispatcher(CollectiveGroup(Topology(2)), BUFFERS["EPBuffer"], 256, 2, 2)
    x = torch.ones(3, 256, dtype=torch.bfloat16, requires_grad=True)

    def reach(name: str) -> None:
        if rank == 1 and name == stage:
            die()

    (got,) = send(made, x, torch.tensor(GOOD["slots"]))
    reach("combine")
    rows = got.rows * 2
    rows.register_hook(lambda grad: reach("dispatch backward"))
    (out,) = made.combine([rows], [got])
    reach("combine backward")
    out.sum().backward()


@pytest.mark.parametrize("stage", ["combine", "combine backward", "dispatch backward"])
def test_a_rank_that_is_gone_is_named_by_stage(stage: str) -> None:
    first, second = rank_outcomes(dying, 2, stage)
    assert f"RuntimeError: stage {stage} failed on rank 0" in str(first.error)
    assert second.error == "ended with exit code -9"


def test_a_route_may_be_written_again_before_backward() -> None:
    """EPBuffer keeps topk_idx by reference: it must not be the caller's."""

    def body(rank: int) -> None:
        made = make_dispatcher(CollectiveGroup(Topology(2)), BUFFERS["EPBuffer"], 256, 2, 2)
        slots = torch.tensor(GOOD["slots"])
        x = torch.ones(3, 256, dtype=torch.bfloat16, requires_grad=True)
        (got,) = send(made, x, slots)
        slots.fill_(-1)
        made.combine([got.rows], [got])[0].sum().backward()
        assert (x.grad == torch.tensor([[2.0], [1.0], [2.0]])).all()

    run_ranks(body, 2)


def make_package(folder: Any, module: str, text: str) -> None:
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(text)


def test_which_package_is_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(packages, "MODULES", ("deep_ep_first", "deep_ep_second"))
    with pytest.raises(
        ValueError, match="DeepEP must be installed with EPBuffer or ElasticBuffer or Buffer, got none"
    ):
        packages.load_buffer()
    make_package(
        tmp_path, "deep_ep_first", "__version__ = '2.1'\nclass ElasticBuffer: ...\nclass Buffer: ...\n"
    )
    make_package(tmp_path, "deep_ep_second", "raise AssertionError('Duplicate NCCL')\nclass EPBuffer: ...\n")
    second, first = packages.installed()
    assert (second.buffers, str(first)) == (("EPBuffer",), "deep_ep_first 2.1")
    with pytest.raises(
        RuntimeError, match="deep_ep_second .* does not start here: AssertionError: Duplicate NCCL"
    ):
        packages.load_buffer()
    assert packages.load_buffer("Buffer").__name__ == "Buffer"
    with pytest.raises(ValueError, match="kind must be one of EPBuffer, ElasticBuffer, Buffer, got 'Hybrid'"):
        packages.load_buffer("Hybrid")


def test_another_width_of_ids_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(packages, "MODULES", ("deep_ep_narrow",))
    make_package(tmp_path, "deep_ep_narrow", "import torch\ntopk_idx_t = torch.int32\nclass EPBuffer: ...\n")
    with pytest.raises(ValueError, match="must be built with topk_idx_t of torch.int64, got torch.int32"):
        packages.load_buffer()


def made_buffers(rank: int) -> None:
    how: Any = {"hidden": 2048, "top_k": 2, "slots_per_rank": 3, "max_tokens_per_rank": 4}
    transport.load_buffer = lambda kind: BUFFERS[kind or "EPBuffer"]
    made = DeepEPTransport(Topology(2), **how, borrow_bytes=5, deterministic=True)
    buffer = transport.shared_buffer(made.group)
    assert len(buffer.runtime.lb_storage) == 2**21 and buffer.deterministic
    assert buffer.num_max_tokens_per_rank == 4 and made.dispatcher.max_tokens_per_rank == 4
    assert DeepEPTransport(Topology(2), **how, kind="ElasticBuffer").dispatcher.wire.kind == "ElasticBuffer"
    assert DeepEPTransport(Topology(2), **how, kind="Buffer").dispatcher.adds_by_rank
    quick = DeepEPTransport(Topology(2), **how, low_latency=True, waits=False).dispatcher
    assert quick.wire.buffer.low_latency_mode and quick.weights_at_source
    with pytest.raises(ValueError, match="borrow_bytes must be 0 for DeepEP's ElasticBuffer, got 7"):
        DeepEPTransport(Topology(2), **how, kind="ElasticBuffer", borrow_bytes=7)
    with pytest.raises(ValueError, match="top_k must be at most 32 for DeepEP's EPBuffer, got 40"):
        DeepEPTransport(Topology(2), **how | {"top_k": 40})


def test_buffers_are_made_by_their_own_hints() -> None:
    run_ranks(made_buffers, 2)
