"""A layer made of shards: experts stay in the memory of their owner, whose Parameters get the gradients."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Split

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from isoload.weights.experts import ExpertWeights
from isoload.weights.shard import Shard
from support.moved_layer import deal, eplb, make_setup
from support.processes import run_ranks
from support.small_layer import EXPERTS, STACKS, close, dense_layer, dense_stacks
from support.sweeps import slow

LLEP = {"policy": "llep", "min_chunk": 1, "threshold": 1.0}


def turned(parameter):
    """A view, as of a model that multiplies from the other side."""
    return parameter.mT if parameter.dim() == 3 else parameter.view_as(parameter)


class Model(nn.Module):
    """Owns every rank's home experts: row i of a stack belongs to the i-th smallest expert at home."""

    def __init__(self, setup, placement, how="parameters"):
        super().__init__()
        self.setup, self.placement, self.how = setup, placement, how
        self.ranks = nn.ModuleList()
        for rank in range(placement.topology.num_ranks):
            own, homes = nn.Module(), placement.home_experts(0, rank)
            for name in STACKS:
                rows = getattr(setup.dense, name)[homes].clone()
                own.register_parameter(
                    name, nn.Parameter(turned(rows).contiguous() if how == "function" else rows)
                )
            self.ranks.append(own)

    def shard(self, rank):
        own, experts = self.ranks[rank], self.placement.home_experts(0, rank)
        if self.how == "parameters":
            return Shard(experts, ExpertWeights(*(getattr(own, name) for name in STACKS)))
        return Shard(experts, lambda: ExpertWeights(*(turned(getattr(own, name)) for name in STACKS)))

    def layer(self, transport, **how):
        shards = [self.shard(rank) for rank in transport.group.ranks]
        return MoE(self.setup.gate, shards, transport, self.placement, **how)

    def rows(self, expert, grad=False):
        """[4] the rows, or gradients, of an expert as the dense layer has them."""
        rank = int(self.placement.home_slot[0, expert]) // self.placement.slots_per_rank
        row = self.placement.home_experts(0, rank).index(expert)
        found = []
        for name in STACKS:
            parameter = getattr(self.ranks[rank], name)
            value = (parameter.grad if grad else parameter.detach())[row]
            found.append(value.mT if self.how == "function" and value.dim() == 2 else value)
        return found


def check_dense(setup, model, layer):
    """Forward and all gradients, rows' and experts', are the dense layer's."""
    model.zero_grad()
    rows = [r.clone().requires_grad_() for r in setup.rows]
    ys = layer(rows)
    sum((y**2).sum() for y in ys).backward()
    now = zip(*(model.rows(e) for e in range(EXPERTS)), strict=True)
    stacks = [torch.stack(found).requires_grad_() for found in now]
    wanted_rows = [r.clone().requires_grad_() for r in setup.rows]
    wanted = [dense_layer(setup, r, stacks) for r in wanted_rows]
    sum((y**2).sum() for y in wanted).backward()
    for got, want in zip(
        [*ys, *(r.grad for r in rows)], [*wanted, *(r.grad for r in wanted_rows)], strict=True
    ):
        assert close(got, want, 1e-12)
    for stack, grads in zip(
        stacks, zip(*(model.rows(e, True) for e in range(EXPERTS)), strict=True), strict=True
    ):
        assert close(torch.stack(grads), stack.grad, 1e-12)


def placements(ranks):
    size = min(-(-EXPERTS // ranks) + 2, EXPERTS)
    topology = isoload.Topology(ranks)
    yield isoload.place(torch.ones(1, EXPERTS), topology, placer="trivial")
    yield eplb(topology, size, 1)
    yield deal(random.Random(ranks), topology, size)


@pytest.mark.parametrize("how", ["parameters", "function"])
@pytest.mark.parametrize("ranks", [1, 3, *slow(2, 4)])
def test_is_the_dense_layer_and_trains_the_owner_s_parameters(ranks, how):
    setup = make_setup(ranks)
    for placement in placements(ranks):
        model = Model(setup, placement, how)
        before = [(p, p.data_ptr()) for p in model.parameters()]
        layer = model.layer(LocalTransport(setup.topology))
        check_dense(setup, model, layer)
        # aliased, not copied: the layer's own memory is that of replicas
        assert all(p.data_ptr() == pointer for p, pointer in before)
        assert len(list(layer.parameters())) == (len(before) if how == "parameters" else 0)
        for held in layer.weights:
            assert all(len(s) == held.num_rows - len(held.layout.homes) for s in held.stored_rows())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.step()
            layer.refresh_replicas()
            check_dense(setup, model, layer)


@pytest.mark.parametrize("how", ["parameters", "function"])
def test_borrows_and_forgotten_refreshes_raise(how):
    setup = make_setup(4)
    model = Model(setup, eplb(setup.topology, 6, 1, spare=2), how)
    layer = model.layer(LocalTransport(setup.topology), **LLEP)
    check_dense(setup, model, layer)
    assert layer.last_plan.placed.unfilled is not None  # borrowed
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    with pytest.raises(ValueError, match="replicas must be refreshed after the expert Parameters change"):
        layer(setup.rows)


def test_functions_that_return_new_memory_cannot_have_replicas():
    """Regression: the error asked for refresh_replicas() right after it was called."""
    for ranks in (1, 3):  # one rank has no replicas
        setup = make_setup(ranks)
        placement = eplb(setup.topology, 6, 1) if ranks > 1 else next(placements(1))
        model = Model(setup, placement, "function")
        shards = [
            Shard(s.experts, lambda s=s: ExpertWeights(*(t.clone() for t in s.weights().stacks().values())))
            for s in map(model.shard, range(ranks))
        ]
        layer = MoE(setup.gate, shards, LocalTransport(setup.topology), placement)
        layer.refresh_replicas()
        if ranks == 1:
            check_dense(setup, model, layer)
            continue
        with pytest.raises(
            ValueError, match="must return views of the same memory in each call if experts have"
        ):
            layer(setup.rows)


@pytest.mark.parametrize("how", ["parameters", "function"])
def test_load_placement_moves_replicas_only(how):
    setup = make_setup(4)
    before = eplb(setup.topology, 5, 1)
    slots, homes = before.slot_to_expert.clone(), before.home_slot.long()
    extra = [p for p in range(slots.shape[1]) if p not in homes[0] and slots[0, p] >= 0]
    assert len(extra) > 2
    for slot in extra:  # another expert, one that is not on the rank
        held = slots[0, slot // 5 * 5 : slot // 5 * 5 + 5].tolist()
        slots[0, slot] = next(e for e in range(EXPERTS) if e not in held)
    after = isoload.Placement(slots, setup.topology, EXPERTS, home_slot=homes)
    model = Model(setup, before, how)
    transport = LocalTransport(setup.topology)
    layer = model.layer(transport, weight_rows=6)
    pointers = [
        t.data_ptr() for t in [*model.parameters(), *(s for w in layer.weights for s in w.stored_rows())]
    ]
    check_dense(setup, model, layer)
    model.zero_grad()
    layer.load_placement(after, rows_per_chunk=2)
    assert transport.group.traffic.bytes["placement"] > 0
    check_dense(setup, model, layer)
    now = [t.data_ptr() for t in [*model.parameters(), *(s for w in layer.weights for s in w.stored_rows())]]
    assert now == pointers
    with pytest.raises(
        ValueError, match="placement must keep the homes of experts given as shards, on rank 0"
    ):
        layer.load_placement(eplb(setup.topology, 5, 2))
    check_dense(setup, model, layer)


def test_states():
    setup = make_setup(2)
    placement = eplb(setup.topology, 7, 1)
    models = [Model(setup, placement, how) for how in ("parameters", "function")]
    named, viewed = (m.layer(LocalTransport(setup.topology)) for m in models)
    assert [k for k in viewed.state_dict() if k.startswith("weights")] == []
    full = named.full_state_dict()
    for name in STACKS:
        assert torch.equal(full[f"experts.{name}"], getattr(setup.dense, name))
        assert torch.equal(viewed.full_state_dict()[f"experts.{name}"], getattr(setup.dense, name))
    changed = {key: value * 1.5 for key, value in full.items()}
    named.load_full_state_dict(changed)
    assert torch.equal(models[0].rows(3)[0], setup.dense.gate_up[3] * 1.5)
    check_dense(setup, models[0], named)
    with pytest.raises(ValueError, match="experts of a Shard given as a function must be loaded where"):
        viewed.load_full_state_dict(changed)
    state = {key: value.clone() for key, value in named.state_dict().items()}
    other = Model(setup, placement)
    another = other.layer(LocalTransport(setup.topology))
    another.load_state_dict(state)
    another.refresh_replicas()
    check_dense(setup, other, another)
    assert torch.equal(other.rows(3)[0], setup.dense.gate_up[3] * 1.5)
    copied = copy.deepcopy(named.weights)
    assert copied[0].gate_up.data_ptr() != named.weights[0].gate_up.data_ptr()
    with pytest.raises(TypeError, match="given as a function cannot be copied or pickled"):
        copy.deepcopy(viewed.weights)


def refused(setup, placement, shards, **how):
    return pytest.raises(ValueError, match=how.pop("match")), lambda: MoE(
        setup.gate, shards, LocalTransport(setup.topology), placement, **how
    )


def test_refused():
    setup = make_setup(2)
    placement = eplb(setup.topology, 7, 1)
    model = Model(setup, placement)
    first, second = model.shard(0), model.shard(1)
    swapped = [Shard(first.experts, second.weights), Shard(second.experts, first.weights)]
    turned = Shard(first.experts[::-1], first.weights)
    short = Shard(first.experts, lambda: ExpertWeights(*(p[1:] for p in first.weights.stacks().values())))
    scaled = Shard(first.experts, ExpertWeights(*(p * 2 for p in first.weights.stacks().values())))
    narrow = Shard(first.experts, ExpertWeights.random(len(first.experts), 4, 6, bias=True))
    cases = [
        ([first], "experts must be a Shard for each of the 2 ranks of this process, got 1"),
        (
            [second, first],
            r"experts of rank 0's shard must be its home experts in the placement, ascending, \[",
        ),
        (
            [turned, second],
            "experts of rank 0's shard must be its home experts in the placement, ascending",
        ),
        ([short, second], rf"rank 0's shard must hold the {len(first.experts)} experts \["),
        ([scaled, second], "gate_up of rank 0's shard must be a Parameter or have no gradient"),
        (
            [narrow, second],
            "experts must be equal on all ranks of this process, got shards with rows of gate_up",
        ),
    ]
    if len(first.experts) != len(second.experts):
        cases.append((swapped, "rank 0's shard must hold the"))
    for shards, message in cases:
        expect, make = refused(setup, placement, shards, match=message)
        with expect:
            make()


def test_stacks_that_change_raise():
    setup = make_setup(2)
    placement = isoload.place(torch.ones(1, EXPERTS), setup.topology, placer="trivial")
    model = Model(setup, placement)
    given = [SimpleNamespace(now=model.shard(r).weights) for r in range(2)]
    shards = [Shard(placement.home_experts(0, r), lambda r=r: given[r].now) for r in range(2)]
    layer = MoE(setup.gate, shards, LocalTransport(setup.topology), placement)
    given[1].now = ExpertWeights(given[1].now.gate_up, given[1].now.down)
    with pytest.raises(ValueError, match="experts must have the stacks"):
        layer(setup.rows)
    given[1].now = ExpertWeights(*(p[:-1] for p in model.shard(1).weights.stacks().values()))
    with pytest.raises(ValueError, match=r"gate_up must be \[5, 12, 8\]"):
        layer(setup.rows)


def on_rank(rank, ranks, spare):
    """Three steps on DTensors that are sharded by expert, as a model under expert parallelism holds them."""
    setup = make_setup(ranks)
    placement = sharded_placement(setup.topology, spare)
    mesh = DeviceMesh("cpu", list(range(ranks)))
    homes = placement.home_experts(0, rank)
    own = [getattr(setup.dense, name)[homes].clone() for name in STACKS]
    parameters = [nn.Parameter(DTensor.from_local(t, mesh, [Split(0)], run_check=False)) for t in own]
    shard = Shard(homes, ExpertWeights(*parameters))
    how = LLEP if spare else {}
    layer = MoE(setup.gate, shard, CollectiveTransport(setup.topology), placement, **how)
    assert spare == 0 or layer.borrowing.backend.name == "all_to_all"
    assert all(a is b for a, b in zip(layer.weights[0].parameters(), parameters, strict=True))
    optimizer, outputs = torch.optim.AdamW(parameters, lr=0.05), []
    for _ in range(3):
        optimizer.zero_grad()
        y = layer(setup.rows[rank])
        (y**2).sum().backward()
        assert all(isinstance(p.grad, DTensor) for p in parameters)
        optimizer.step()
        if placement.has_freedom[0] and layer.has_replicas:
            stale = "replicas must be refreshed" if rank == ranks - 1 else f"rank {ranks - 1} failed in stage"
            with pytest.raises(Exception, match=stale):
                layer(setup.rows[rank])
        layer.refresh_replicas()
        outputs.append(y.detach())
    return outputs, {e: [p.to_local().detach()[i] for p in parameters] for i, e in enumerate(homes)}


def sharded_placement(topology, spare):
    """Experts in order, and a replica of the last one on every rank."""
    ranks, part = topology.num_ranks, -(-EXPERTS // topology.num_ranks)
    size = part + 1 + spare
    slots = torch.full((1, ranks * size), -1)
    for expert in range(EXPERTS):
        slots[0, expert // part * size + expert % part] = expert
    for rank in range(ranks - 1):
        slots[0, rank * size + part] = EXPERTS - 1
    home = torch.tensor([[e // part * size + e % part for e in range(EXPERTS)]])
    return isoload.Placement(slots, topology, EXPERTS, home_slot=home, spare_slots=spare)


@pytest.mark.parametrize(("ranks", "spare"), [(4, 2), *slow((2, 0), (2, 2))])
def test_processes_train_sharded_dtensors(ranks, spare):
    results = run_ranks(on_rank, ranks, ranks, spare)
    setup = make_setup(ranks)
    stacks = dense_stacks(setup.dense, torch.float64)
    optimizer = torch.optim.AdamW(stacks, lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        ys = [dense_layer(setup, r, stacks) for r in setup.rows]
        sum((y**2).sum() for y in ys).backward()
        optimizer.step()
        for (outputs, _), y in zip(results, ys, strict=True):
            assert close(outputs[step], y, 1e-10)
    for _, held in results:
        for expert, parts in held.items():
            for part, stack in zip(parts, stacks, strict=True):
                assert close(part, stack[expert], 1e-9)
