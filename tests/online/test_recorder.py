"""The recorder keeps every copy, in memory of one size, on every rank alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoload
from isoload.online import Recorder
from support.processes import run_ranks
from support.recorded_calls import recorded

LAYERS, EXPERTS = 3, 5


class Source:
    """Stands for a layer of a model."""


def record(recorder, steps, seed=0, sources=None):
    """[steps, L, E] what was added."""
    draw = torch.Generator().manual_seed(seed)
    sources = sources or [Source() for _ in range(LAYERS)]
    added = torch.randint(0, 9, (steps, LAYERS, EXPERTS), generator=draw, dtype=torch.int32)
    for batch in added:
        for layer, counts in enumerate(batch):
            halves = counts // 2, counts - counts // 2
            recorder.add(layer, [torch.cat([h, h.new_full((1,), 77)]) for h in halves], sources[layer])
        recorder.step()
    return added.long()


@pytest.mark.parametrize("steps", [0, 1, 7, 8, 9, 12, 31, 32, 33, 100])
def test_batches_are_sums_of_neighbours(steps):
    recorder = Recorder(LAYERS, EXPERTS, max_batches=8)
    addresses = recorder._now.data_ptr(), recorder._batches.data_ptr()
    added = record(recorder, steps)
    span = recorder.steps_per_batch
    assert recorder.num_batches == steps // span <= 8 and (span == 1 or recorder.num_batches >= 4)
    whole = added[: steps // span * span]
    assert torch.equal(recorder.counts(), whole.view(-1, span, LAYERS, EXPERTS).sum(1))
    assert addresses == (recorder._now.data_ptr(), recorder._batches.data_ptr())
    recorder.clear()
    assert not len(recorder.counts()) and recorder.steps_per_batch == 1


def test_a_file_is_a_trace_that_place_reads(tmp_path: Path):
    recorder = Recorder(LAYERS, EXPERTS, layer_ids=(4, 7, 9))
    added = record(recorder, 6)
    recorder.step()  # a batch without copies
    recorder.save(tmp_path / "run.npz")
    trace = isoload.read_trace(tmp_path / "run.npz")
    assert trace.layer_ids == (4, 7, 9) and trace.provenance["steps per batch"] == 1
    assert torch.equal(torch.from_numpy(trace.counts), added)
    placement = isoload.place(trace.counts, isoload.Topology(2), slots_per_rank=3)
    assert placement.num_layers == LAYERS


def test_experts_per_token_are_kept(tmp_path: Path):
    """Without shared columns, eager and compiled: a replay draws tokens of so many experts."""
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(LAYERS, EXPERTS), topology, slots_per_rank=5, num_shared=1)
    for compiled, shared in ((False, False), (False, True), (True, False)):
        balancer = isoload.Balancer(placement, 0, "joint", tokens="same", shared_columns=shared)
        balancer.recorder = recorder = Recorder(LAYERS, EXPERTS)
        call = torch.compile(balancer, backend="aot_eager", fullgraph=True) if compiled else balancer
        call(torch.tensor([[0, 1, 5], [1, 4, 5]])[:, : 3 if shared else 2])
        recorder.step()
        recorder.save(tmp_path / "run.npz")
        assert isoload.read_trace(tmp_path / "run.npz").top_k == 2, (compiled, shared)


def on_rank(rank, ranks, steps):
    group = isoload.CollectiveGroup(isoload.Topology(ranks))
    recorder = Recorder(LAYERS, EXPERTS, max_batches=4)
    added = record(recorder, steps[rank], seed=rank)
    try:
        return added, recorder.counts(group)
    except ValueError as error:
        return added, str(error)


def test_ranks_add_up():
    results = run_ranks(on_rank, 2, 2, (6, 6))
    total = sum(added for added, _ in results).view(3, 2, LAYERS, EXPERTS).sum(1)
    assert all(torch.equal(counts, total) for _, counts in results)
    for _, message in run_ranks(on_rank, 2, 2, (3, 2)):
        assert message == "batches recorded must be the same on all ranks, got 3 on rank 0 and 2 on rank 1"


def test_watches_a_model_as_it_is():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    sizes |= {"num_key_value_heads": 2, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=16, intermediate_size=16)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    blocks = [layer.mlp for layer in model.model.layers]
    recorder = Recorder(LAYERS, EXPERTS)
    handles = [recorder.watch(block, layer) for layer, block in enumerate(blocks)]
    ids = torch.randint(64, (2, 7))
    with torch.no_grad():
        routed = model(ids, output_router_logits=True).router_logits
        recorder.step()
        for handle in handles:
            handle.remove()
        model(ids)
        recorder.step()
    wanted = [torch.bincount(logits.topk(2).indices.flatten(), minlength=EXPERTS) for logits in routed]
    assert torch.equal(recorder.counts()[0], torch.stack(wanted)) and not recorder.counts()[1].any()
    assert recorder.trace().top_k == 2
    with pytest.raises(
        ValueError, match="block must have experts that transformers fuses, got Linear with NoneType"
    ):
        recorder.watch(torch.nn.Linear(2, 2), 0)
    topology, told = (
        isoload.Topology(2),
        "^experts must not be watched by a Recorder, which records nothing once isoload replaces them",
    )
    recorder = Recorder(LAYERS, EXPERTS)
    handle = recorder.watch(blocks[1], 1)
    with pytest.raises(ValueError, match=told):
        isoload.balance(model, topology)
    with pytest.raises(ValueError, match=told):
        isoload.LibraStack.from_decoder(model.model.layers, topology)
    handle.remove()
    in_order = isoload.place(torch.ones(LAYERS, EXPERTS), topology, placer="trivial")
    for made in isoload.balance(model, topology, placement=in_order):
        made.balancer.recorder = recorder
    with torch.no_grad():
        model(ids)
    recorder.step()
    assert torch.equal(recorder.counts()[0], torch.stack(wanted))
    with pytest.raises(
        ValueError, match="block must have experts that transformers fuses, got .*BlockExperts: set"
    ):
        recorder.watch(blocks[1], 1)


def test_refused(tmp_path: Path):
    for how, message in (
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"max_batches": 3}, "max_batches must be even and at least 2, got 3"),
        ({"max_batches": 0}, "max_batches must be even and at least 2, got 0"),
        ({"layer_ids": (1, 1, 2)}, r"layer_ids must be 3 distinct numbers, got \[1, 1, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            Recorder(**{"num_layers": LAYERS, "num_experts": EXPERTS, **how})
    recorder, source = Recorder(LAYERS, EXPERTS), Source()
    counts = torch.ones(EXPERTS, dtype=torch.int32)
    for layer, rows, message in (
        (3, counts, r"layer must be in 0..2, got 3"),
        (-1, counts, r"layer must be in 0..2, got -1"),
        (0, counts[1:], r"counts must be \[5\] on cpu, got \[4\] on cpu"),
        (0, counts.to("meta"), r"counts must be \[5\] on cpu, got \[5\] on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            recorder.add(layer, [rows], source)
    recorder.add(1, [counts], source)
    with pytest.raises(ValueError, match="layer 1 must be recorded by one layer of the model, got a second"):
        recorder.add(1, [counts], Source())
    with pytest.raises(ValueError, match="trace must have at least one batch with copies"):
        Recorder(LAYERS, EXPERTS).save(tmp_path / "none.npz")
    assert not list(tmp_path.iterdir())


def wrong_device(rank):
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(LAYERS, EXPERTS), topology, slots_per_rank=3)
    balancer = isoload.Balancer(placement, 1, group=isoload.CollectiveGroup(topology))
    balancer.recorder = Recorder(LAYERS, EXPERTS, device="meta" if rank == 1 else "cpu")
    try:
        balancer(torch.randint(EXPERTS, (6, 2)))
    except ValueError as error:
        return str(error)


def test_a_layer_records_what_it_routes():
    """Own and same tokens, with shared experts and padding, below min_tokens too; a recompute counts once."""
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(LAYERS, EXPERTS), topology, slots_per_rank=5, num_shared=1)
    ids = torch.tensor([[0, 1], [1, 4], [-1, 2]])
    recorder = Recorder(LAYERS, EXPERTS)
    for layer, how in enumerate(
        ({"tokens": "same"}, {"tokens": "same", "min_tokens": 9}, {"group": isoload.LocalGroup(topology)})
    ):
        balancer = isoload.Balancer(placement, layer, "joint", shared_columns=False, **how)
        balancer.recorder = recorder
        balancer([ids[:1], ids[1:]] if "group" in how else ids)
    recorder.step()
    assert recorder.counts().tolist() == [[[1, 2, 1, 0, 1]] * 3]
    assert run_ranks(wrong_device, 2) == [
        "rank 1 failed in stage count, so all ranks stop; see the error of that rank",
        "counts must be [5] on meta, got [5] on cpu",
    ]


def test_a_recompute_counts_once():
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(LAYERS, EXPERTS), topology, slots_per_rank=3)
    dense = isoload.ExpertWeights.random(EXPERTS, 8, 8)
    router = torch.randn(8, EXPERTS)

    def gate(rows):
        return (rows @ router).softmax(-1).topk(2)[::-1]

    layer = isoload.MoE(gate, dense, isoload.LocalTransport(topology), placement, layer=2)
    layer.balancer.recorder = recorder = Recorder(LAYERS, EXPERTS)
    rows = [torch.randn(n, 8, requires_grad=True) for n in (3, 4)]
    outputs = checkpoint(lambda *x: layer(list(x)), *rows, use_reentrant=False)
    sum(y.sum() for y in outputs).backward()
    recorder.step()
    assert recorder.counts()[0, 2].sum() == 2 * 7 and not recorder.counts()[0, :2].any()


def test_a_captured_step_adds_again():
    """The tables keep their place, and compiled code adds to them."""
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(LAYERS, EXPERTS), topology, slots_per_rank=3)
    balancer = isoload.Balancer(placement, 0, tokens="same")
    balancer.recorder = recorder = Recorder(LAYERS, EXPERTS)
    ids = torch.tensor([[0, 1], [1, 4]])
    compiled = torch.compile(balancer, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        compiled(ids)
    recorder.step()
    assert recorder.counts()[0, 0].tolist() == [3, 6, 0, 0, 3]


def test_counts_and_traces_are_copies() -> None:
    """A thread of the Rebalancer reads them while the next batches are added."""
    recorder = Recorder(1, 2, max_batches=2)
    recorder.add(0, [torch.tensor([3, 1])], recorder)
    recorder.step()
    counts, trace = recorder.counts(), recorder.trace()
    recorder.clear()
    recorder.add(0, [torch.tensor([0, 9])], recorder)
    recorder.step()
    assert counts.tolist() == [[[3, 1]]] and trace.counts is not None and trace.counts.tolist() == [[[3, 1]]]


def routed(tokens: int, seed: int, top_k: int = 2) -> torch.Tensor:
    """[L, T, K] choices, none twice."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(LAYERS, tokens, EXPERTS, generator=draw).argsort(-1)[..., :top_k]


def add_choices(recorder: Recorder, ids: torch.Tensor, sources: list[Source]) -> None:
    for layer, rows in enumerate(ids):
        counts = torch.bincount(rows[rows >= 0].flatten(), minlength=EXPERTS)
        recorder.add(layer, [counts], sources[layer], rows.shape[1], [rows])
    recorder.step()


@pytest.mark.parametrize(
    "batches", [(), (0,), (3,), (3, 4), (3, 4, 1, 5, 2), (7,), (8,), (9,), (30,), (5, 23, 3)]
)
def test_choices_are_those_of_the_latest_tokens(batches: tuple[int, ...]) -> None:
    recorder, sources = Recorder(LAYERS, EXPERTS, tokens=7, top_k=2), [Source() for _ in range(LAYERS)]
    parts = [routed(tokens, seed) for seed, tokens in enumerate(batches)]
    for part in parts:
        add_choices(recorder, part, sources)
    whole = torch.cat([torch.empty(LAYERS, 0, 2, dtype=torch.long), *parts], dim=1).transpose(0, 1)
    assert torch.equal(recorder.choices(), whole[-7:].int())
    recorder.clear()
    assert recorder.choices().shape == (0, LAYERS, 2)


def test_tokens_that_are_masked_everywhere_are_left_out() -> None:
    recorder, ids = Recorder(LAYERS, EXPERTS, tokens=9, top_k=2), routed(4, 0)
    ids[:, 1] = -1  # padding
    ids[0, 2] = -1  # masked in one layer alone
    add_choices(recorder, ids, [Source() for _ in range(LAYERS)])
    assert torch.equal(recorder.choices(), ids[:, [0, 2, 3]].transpose(0, 1).int())


def test_a_trace_with_choices_is_placed_near(tmp_path: Path) -> None:
    recorder, sources = Recorder(LAYERS, EXPERTS, tokens=50, top_k=2), [Source() for _ in range(LAYERS)]
    for seed in range(4):
        add_choices(recorder, routed(10, seed), sources)
    recorder.save(tmp_path / "run.npz")
    trace = isoload.read_trace(tmp_path / "run.npz")
    assert trace.topk_ids.shape == (40, LAYERS, 2) and len(trace.counts) == 4
    placement = isoload.place(trace, isoload.Topology(4, ranks_per_node=2), 3, "scenario")
    assert "rows_to_other_nodes" in placement.provenance


def captured(balancer: isoload.Balancer) -> isoload.CapturedBalancer:
    return isoload.CapturedBalancer(balancer, 6, 2, device="cpu", capture=recorded)


@pytest.mark.parametrize("how", ["eager", "captured", "one layer captured again"])
def test_balancers_record_the_choices_of_all_owned_ranks(how: str) -> None:
    placement = isoload.place(torch.ones(LAYERS, EXPERTS), isoload.Topology(2), 3)
    group = isoload.LocalGroup(placement.topology)
    recorder, taken = Recorder(LAYERS, EXPERTS, tokens=60, top_k=2), []
    balancers = [isoload.Balancer(placement, i, group=group) for i in range(LAYERS)]
    calls: list[Any] = balancers if how == "eager" else [captured(balancer) for balancer in balancers]
    for balancer in balancers:
        balancer.recorder = recorder
    for step in range(8):
        ids = routed(7, step)
        parts = [ids[:, : 3 + step % 2], ids[:, 3 + step % 2 :]]
        if step == 4 and how == "one layer captured again":  # runs eagerly while others replay
            balancers[1].policy = isoload.POLICIES["even"]()
        for layer, call in enumerate(calls):
            call([part[layer] for part in parts])
        recorder.step()
        taken.append(ids)
    assert torch.equal(recorder.choices(), torch.cat(taken, dim=1).transpose(0, 1).int())


def test_masked_wrong_and_repeated_experts_are_no_choices() -> None:
    recorder, source = Recorder(1, EXPERTS, tokens=9, top_k=3), Source()
    ids = torch.tensor([[0, 1, 0], [70_000, -7, 2], [-1, -1, -1], [4, 4, 4]])
    recorder.add(0, [torch.zeros(EXPERTS, dtype=torch.int64)], source, 3, [ids])
    assert recorder.choices()[:, 0].tolist() == [[0, 1, -1], [-1, -1, 2], [4, -1, -1]]


def test_padding_alone_leaves_a_trace_of_counts() -> None:
    recorder, source = Recorder(1, EXPERTS, tokens=4, top_k=2), Source()
    ids = torch.cat([routed(3, 0)[0], torch.full((4, 2), -1)])
    recorder.add(0, [torch.ones(EXPERTS, dtype=torch.int64)], source, 2, [ids])
    recorder.step()
    assert recorder.trace().topk_ids is None


def test_a_batch_that_is_rejected_counts_nothing() -> None:
    recorder, source = Recorder(1, EXPERTS, tokens=4, top_k=2), Source()
    with pytest.raises(ValueError, match="ids must be"):
        recorder.add(0, [torch.ones(EXPERTS, dtype=torch.int64)], source, 3, [routed(3, 0, 3)[0]])
    recorder.step()
    assert not recorder.counts().any()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda r: r.add(0, [torch.zeros(EXPERTS, dtype=torch.int64)], r, 2),
            "ids must be given to a recorder with tokens, got none",
        ),
        (
            lambda r: r.add(0, [torch.zeros(EXPERTS, dtype=torch.int64)], r, 1, [torch.zeros(4, 1)]),
            r"ids must be \[T, 2\], the recorder's top_k, got \[4, 1\], 1 of them routed",
        ),
        (lambda r: r.skip(), "skip must come without tokens, whose choices are kept already, got 7"),
        (
            lambda r: (
                r.add(0, [torch.zeros(EXPERTS, dtype=torch.int64)], r, 2, [torch.zeros(4, 2)]),
                r.choices(),
            ),
            "tokens must be the same in all layers, got 4 of layer 0, 0 of layer 1, 0 of layer 2: record with tokens=0",
        ),
        (
            lambda r: Recorder(1, 40_000, tokens=5, top_k=2),
            "tokens must be 0 with more than 32767 experts, got 40000 experts",
        ),
        (
            lambda r: Recorder(LAYERS, EXPERTS, tokens=5),
            "tokens and top_k must both be positive or both 0, got 5 and 0",
        ),
    ],
)
def test_choices_that_cannot_be_recorded(act: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act(Recorder(LAYERS, EXPERTS, tokens=7, top_k=2))


def choices_of_ranks(rank: int) -> list[Any]:
    group = isoload.CollectiveGroup.own(isoload.Topology(2))
    recorder, sources = Recorder(LAYERS, EXPERTS, tokens=7, top_k=2), [Source() for _ in range(LAYERS)]
    add_choices(recorder, routed(3 + rank, rank), sources)
    both: list[Any] = recorder.trace(group).topk_ids.tolist()
    if rank == 1:
        recorder.add(0, [torch.zeros(EXPERTS, dtype=torch.int64)], sources[0], 2, [torch.zeros(1, 2)])
    with pytest.raises(ValueError, match="tokens must be the same in all layers, got 5 of layer 0"):
        recorder.choices(group)
    return both


def test_choices_of_all_processes() -> None:
    whole = torch.cat([routed(3, 0), routed(4, 1)], dim=1).transpose(0, 1).tolist()
    assert run_ranks(choices_of_ranks, 2) == [whole, whole]


def trace_of_unlike_recorders(rank: int) -> None:
    group = isoload.CollectiveGroup.own(isoload.Topology(2))
    tokens = {"tokens": 4, "top_k": 2} if rank == 0 else {}
    recorder = Recorder(LAYERS, EXPERTS, **tokens)
    add_choices(recorder, routed(3, 0), [Source() for _ in range(LAYERS)])
    with pytest.raises(ValueError, match="top_k of recorded tokens"):
        recorder.trace(group)


def test_recorders_with_and_without_tokens_raise_on_all_ranks() -> None:
    run_ranks(trace_of_unlike_recorders, 2)
