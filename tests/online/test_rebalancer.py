"""A layer that is moved while it runs stays the dense layer, and its ranks get more level."""

from __future__ import annotations

import threading

import pytest
import torch

import isoload
from isoload.online import Rebalancer, Recorder
from reference.experts import run_experts
from support.processes import run_ranks
from support.sweeps import slow

LAYERS, EXPERTS, HIDDEN, INNER = 3, 12, 8, 6
TOKENS = (9, 0, 14, 7)


class Stack:
    """L layers of virtual ranks, or of this process's rank, beside the dense ones; hot experts drift apart."""

    def __init__(self, ranks, group=None, seed=0, place=None, **how):
        draw = torch.Generator().manual_seed(seed)
        topology = isoload.Topology(ranks)
        counts = torch.rand(LAYERS, EXPERTS, generator=draw) ** 3
        self.placement = isoload.place(
            counts, topology, **(place or {"slots_per_rank": EXPERTS // ranks + 1})
        )
        self.dense = [
            isoload.ExpertWeights.random(EXPERTS, HIDDEN, INNER, generator=draw, dtype=torch.float64)
            for _ in range(LAYERS)
        ]
        self.routers = torch.randn(LAYERS, HIDDEN, EXPERTS, generator=draw, dtype=torch.float64)
        self.routers[:, :, :2] += 0.7  # two hot experts, which the placement does not replicate on purpose
        transport = (
            isoload.LocalTransport(topology) if group is None else isoload.CollectiveTransport(topology)
        )
        self.layers = [
            isoload.MoE(self.gate(i), dense, transport, self.placement, i, weight_rows=EXPERTS // ranks + 1)
            for i, dense in enumerate(self.dense)
        ]
        self.recorder = Recorder(LAYERS, EXPERTS, max_batches=4)
        self.rebalancer = Rebalancer(self.layers, self.recorder, **{"every": 6, "delay": 2, **how})

    def gate(self, layer):
        def gate(rows):
            weights, ids = (rows @ self.routers[layer]).softmax(-1).topk(2)
            return ids, weights

        return gate

    def rows(self, batch, ranks):
        draw = torch.Generator().manual_seed(1000 + batch)
        return [torch.randn(n, HIDDEN, generator=draw, dtype=torch.float64).abs() for n in TOKENS[:ranks]]

    def check(self, layer, rows, outputs):
        for row, output in zip(rows, outputs, strict=True):
            ids, weights = self.gate(layer)(row)
            wanted = run_experts(row, ids, weights, *self.dense[layer].stacks().values(), None, None)
            assert torch.allclose(output, wanted, rtol=1e-12, atol=1e-12)

    def run(self, batches, ranks, mine=None):
        """Layers moved after each batch, and the imbalance of each."""
        moved, imbalance = [], []
        for batch in range(batches):
            rows = self.rows(batch, ranks)
            rows = rows if mine is None else [rows[mine]]
            worst = []
            for i, layer in enumerate(self.layers):
                outputs = layer(rows)
                self.check(i, rows, outputs)
                worst.append(int(layer.last_plan.peak) * ranks / int(layer.last_plan.quota.sum()))
            moved.append(self.rebalancer.step())
            imbalance.append(worst)
        return moved, imbalance


def test_moves_a_few_experts_at_a_time_and_levels_the_ranks():
    stack = Stack(4, moves=2)
    moved, imbalance = stack.run(25, 4)
    assert moved[:7] == [0] * 7 and moved[7] == 1 and sum(moved[7:12]) <= LAYERS
    last = stack.rebalancer.last
    assert last.after <= last.before
    first, end = (sum(map(sum, part)) for part in (imbalance[:6], imbalance[-6:]))
    assert end < first
    slots = stack.rebalancer.placement.arrays[0]
    assert all((layer.placement.arrays[0][i] == slots[i]).all() for i, layer in enumerate(stack.layers))
    stack.rebalancer.close()
    assert stack.layers[0].balancer.recorder is None


@pytest.mark.slow
@pytest.mark.parametrize("moves", [2, *slow(None)])
def test_ragged_placements_stay_the_dense_layer_while_they_move(moves):
    """Layers and ranks of different numbers of slots, as a budget of replicas makes them."""
    stack = Stack(4, place={"placer": "scenario", "replicas": 1}, moves=moves)
    first = stack.placement.arrays[0]
    held = (first.reshape(LAYERS, 4, -1) >= 0).sum(2)
    assert (first < 0).any() and len(set(held.sum(1).tolist())) > 1
    moved, _ = stack.run(25, 4)
    last = stack.rebalancer.placement.arrays[0]
    assert sum(moved) and (last != first).any()
    stack.rebalancer.close()


@pytest.mark.parametrize(
    ("placer", "options"),
    [("scenario", {}), *slow(("craft", {"replicas": 2}), ("eplb", {}), ("trivial", {}))],
)
def test_every_placer_of_counts_stays_the_dense_layer_while_it_moves(placer, options):
    moves = 8 if placer == "scenario" else None
    stack = Stack(4, placer=placer, split="even", least_gain=0, moves=moves, **options)
    moved, _ = stack.run(16, 4)
    found = stack.rebalancer.last
    assert found is not None and found.placement is stack.layers[0].placement
    assert found.placement.layer_ids == stack.placement.layer_ids
    wanted = isoload.place(torch.ones(LAYERS, EXPERTS), isoload.Topology(4), 4, placer, **options)
    assert found.placement.slots_per_rank == wanted.slots_per_rank == 4
    if placer != "trivial":
        assert sum(moved) and found.after < found.before


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"placer": "grace"},
            "counts must be traces with per-token choices .* for placer grace, got counts alone",
        ),
        ({"placer": "eplb", "groups": 5}, "groups must divide the 12 experts, got 5"),
        ({"placer": "craft", "replicas": 100}, "replicas must be"),
    ],
)
def test_a_placer_that_cannot_place_here_is_refused_at_construction(how, message):
    """It failed every + delay batches later, in the running model."""
    with pytest.raises(ValueError, match=f"^placer {how['placer']} cannot replace this placement: {message}"):
        Stack(2, moves=None, **how)


def test_nothing_moves_for_little():
    stack = Stack(4, least_gain=10.0)
    moved, _ = stack.run(15, 4)
    assert not any(moved) and stack.rebalancer.last.layers == ()
    assert stack.rebalancer.placement is stack.placement


def test_ranks_and_virtual_ranks_move_alike():
    results = run_ranks(on_rank, 2)
    stack = Stack(2, layers_per_step=2)
    virtual = stack.run(14, 2)
    assert any(virtual[0]) and all(result == virtual for result in results)


def on_rank(rank):
    return Stack(2, "processes", layers_per_step=2).run(14, 2, rank)


def with_options_of_its_own(rank, name, values):
    try:
        Stack(2, "processes", **{name: values[rank]})
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("every", (6, 7), "every must be the same on all ranks, got 6 on rank 0 and 7 on rank 1"),
        ("delay", (2, 1), "delay must be the same on all ranks, got 2 on rank 0 and 1 on rank 1"),
        (
            "moves",
            (2, 3),
            "options must be the same on all ranks, got {'split': 'exact', 'moves': 2} on rank 0 and ",
        ),
        ("least_gain", (0.01, -1), "rank 1 failed in stage construction"),
    ],
)
def test_ranks_with_other_options_stop_all(name, values, message):
    first, second = run_ranks(with_options_of_its_own, 2, name, values)
    assert first.startswith(message)
    assert second == first or second == "least_gain must be at least 0, got -1"


def place_or_fail(rank, fail):
    """What each of two steps says, where rank 1's thread fails, and whether the slots stayed."""
    stack, said = Stack(2, "processes"), []
    if rank == 1:
        stack.rebalancer._plan = fail
    for batch in range(9):
        for layer in stack.layers:
            layer([stack.rows(batch, 2)[rank]])
        try:
            stack.rebalancer.step()
        except (ValueError, OSError) as error:
            said.append(f"{batch}: {type(error).__name__}: {error}")
    return said, all(layer.placement is stack.placement for layer in stack.layers)


def no_memory(*_args):
    raise OSError("no memory")


def test_a_thread_that_fails_on_one_rank_is_told_to_all():
    """Regression: the others went on, and waited in an exchange."""
    told = "7: ValueError: rank 1 failed in stage placing, so all ranks stop; see the error of that rank: "
    first, second = run_ranks(place_or_fail, 2, no_memory, group_timeout=5)
    assert first == ([f"{told}OSError: no memory"], True) and second == (["7: OSError: no memory"], True)


def test_a_layer_that_could_not_move_is_tried_again():
    stack = Stack(4)
    stack.run(7, 4)
    gather = stack.layers[0].group.gather
    with pytest.raises(OSError, match="no memory"):
        stack.layers[0].group.gather = no_memory
        stack.run(1, 4)
    stack.layers[0].group.gather = gather
    waiting = len(stack.rebalancer._waiting)
    assert waiting == len(stack.rebalancer.last.layers) > 0
    assert sum(stack.run(waiting, 4)[0]) == waiting
    slots = stack.rebalancer.placement.arrays[0]
    assert all((layer.placement.arrays[0][i] == slots[i]).all() for i, layer in enumerate(stack.layers))


@pytest.mark.parametrize("mode", ["recorder", "batches", "steps"])
def test_in_and_out_of_inference_mode(mode):
    """Regression: what was made in inference mode could be written nowhere else."""
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(1, EXPERTS), topology, slots_per_rank=7)
    balancer = isoload.Balancer(placement, 0, "static", tokens="same")
    with torch.inference_mode(mode == "recorder"):
        recorder = Recorder(1, EXPERTS, max_batches=2)
    rebalancer = Rebalancer([balancer], recorder, every=3, delay=1, moves=None, split="even")
    ids = torch.tensor([[5, 7], [5, 7], [5, 8], [5, 9]])
    for _ in range(6):
        with torch.inference_mode(mode == "batches"):
            balancer(ids)
        with torch.inference_mode(mode == "steps"):
            rebalancer.step()
    assert balancer.placement is rebalancer.placement is not placement


def test_a_balancer_takes_the_slots():
    """As an engine's: the same tokens on all ranks, weights moved by the engine."""
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(1, EXPERTS), topology, slots_per_rank=7)
    balancer = isoload.Balancer(placement, 0, tokens="same")
    rebalancer = Rebalancer([balancer], Recorder(1, EXPERTS), every=3, delay=1, moves=None)
    ids = torch.tensor([[5, 7], [5, 7], [5, 8], [5, 9]])
    peaks = []
    for _ in range(6):
        balancer(ids)
        peaks.append(int(balancer.last_plan.peak))
        rebalancer.step()
    assert balancer.placement is rebalancer.placement is not placement
    assert peaks[-1] < peaks[0]


def test_refused():
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(2, EXPERTS), topology, slots_per_rank=7)
    other = isoload.place(torch.ones(2, EXPERTS), topology, slots_per_rank=7)
    layers = [isoload.Balancer(placement, i, tokens="same") for i in range(2)]
    recorder = Recorder(2, EXPERTS)
    for given, how, message in (
        (layers, {"every": 0}, "every must be at least 1, got 0"),
        (layers, {"delay": 0}, "delay must be at least 1, got 0"),
        (layers, {"layers_per_step": 0}, "layers_per_step must be at least 1, got 0"),
        (layers, {"least_gain": -1}, "least_gain must be at least 0, got -1"),
        (layers, {"every": 9}, r"every must be at least delay \+ L / layers_per_step = 10, .* got 9"),
        (layers, {"placer": "eplb", "pinned": True}, "option must be one of "),
        (layers, {"split": "odd"}, "split must be exact or even, got 'odd'"),
        (layers, {"placer": "eplb"}, "moves must be None for placer eplb, which places from scratch, got 8"),
        (layers, {"split": "odd", "placer": "eplb", "moves": None}, "split must be exact or even, got 'odd'"),
        ([], {}, "layers must be at least one, got none"),
        (layers[:1], {}, r"layers must be all 2 of their Placement, each once, got positions \[0\]"),
        (
            [layers[0], isoload.Balancer(other, 1, tokens="same")],
            {},
            "layers must share one Placement, got several",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Rebalancer(given, recorder, **how)
    with pytest.raises(ValueError, match="recorder must be of 2 layers and 12 experts, got 3 and 12"):
        Rebalancer(layers, Recorder(3, EXPERTS))
    dense = isoload.ExpertWeights.random(EXPERTS, HIDDEN, INNER)
    one = isoload.place(torch.ones(1, EXPERTS), topology, placer="trivial")
    shards = [
        isoload.weights.shard.Shard(
            range(6 * r, 6 * r + 6),
            isoload.ExpertWeights(dense.gate_up[6 * r : 6 * r + 6], dense.down[6 * r : 6 * r + 6]),
        )
        for r in range(2)
    ]
    layer = isoload.MoE(lambda rows: None, shards, isoload.LocalTransport(topology), one)
    with pytest.raises(
        ValueError, match="pinned must be True if a layer is made of Shards, whose homes stay"
    ):
        Rebalancer([layer], Recorder(1, EXPERTS))


def test_no_step_after_the_end():
    placement = isoload.place(torch.ones(1, EXPERTS), isoload.Topology(2), slots_per_rank=7)
    balancer = isoload.Balancer(placement, 0, tokens="same")
    rebalancer = Rebalancer([balancer], Recorder(1, EXPERTS), every=3, delay=1)
    rebalancer.step()
    rebalancer.close()
    rebalancer.close()
    with pytest.raises(ValueError, match=r"step\(\) must come before close\(\)"):
        rebalancer.step()


def test_a_plan_is_made_from_the_batches_before_it(monkeypatch):
    """However late its thread starts: the next batches are recorded meanwhile."""
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(1, 6), topology, 4, "eplb")
    begin, plan = threading.Event(), Rebalancer._plan
    planned = []

    def plan_late(self, counts, choices, now):
        assert begin.wait(10)
        planned.extend(counts[:, 0].tolist())
        return plan(self, counts, choices, now)

    monkeypatch.setattr(Rebalancer, "_plan", plan_late)
    balancer = isoload.Balancer(placement, 0, tokens="same")
    rebalancer = Rebalancer(
        [balancer], Recorder(1, 6), every=2, moves=None, placer="eplb", delay=1, least_gain=0.0
    )
    end_batch = rebalancer.recorder.step
    for counts in ([90, 9, 1, 1, 1, 1], [90, 9, 1, 1, 1, 1], [1, 1, 1, 1, 9, 900]):
        rebalancer.recorder.add(0, [torch.tensor(counts)], balancer)
        if counts[5] == 900:  # the thread begins after this batch is recorded
            rebalancer.recorder.step = lambda: (end_batch(), begin.set())
        rebalancer.step()
    rebalancer.close()
    assert planned == [[90, 9, 1, 1, 1, 1]] * 2


def rows_to_other_nodes(placement: isoload.Placement, ids: torch.Tensor) -> int:
    """Of tokens [T, K] of one layer without replicas, from all nodes alike: nodes that they visit beyond one."""
    node = placement.slot_to_expert[0].argsort() // placement.slots_per_rank // 2
    return sum(len(set(row)) - 1 for row in node[ids].tolist())


def test_recorded_choices_put_experts_of_one_token_on_one_node() -> None:
    topology = isoload.Topology(4, ranks_per_node=2)
    found = []
    for tokens in (0, 400):
        placement = isoload.place(torch.ones(1, 8), topology, 2, "trivial")  # experts in order
        balancer = isoload.Balancer(placement, 0, group=isoload.LocalGroup(topology))
        recorder = Recorder(1, 8, tokens=tokens, top_k=2 if tokens else 0)
        every = {"every": 10, "delay": 1, "moves": None, "least_gain": 0.0}
        rebalancer = Rebalancer([balancer], recorder, **every)
        draw = torch.Generator().manual_seed(0)
        for _ in range(12):
            first = torch.randint(4, (40,), generator=draw)
            ids = torch.stack([first, first + 4], dim=1)  # experts e and e + 4, on two nodes at the start
            balancer(list(ids.chunk(4)))
            rebalancer.step()
        rebalancer.close()
        found.append(rows_to_other_nodes(balancer.placement, ids))
    assert found[0] > 0 and found[1] == 0
