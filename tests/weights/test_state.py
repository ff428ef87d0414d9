"""A saved state says which experts its rows hold: it loads into other placements and other numbers of ranks."""

from __future__ import annotations

import copy
import random
import tempfile

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import parametrize

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from support.moved_layer import deal, make_setup, pairs
from support.processes import rank_outcomes, run_ranks
from support.small_layer import EXPERTS, STACKS, close


def make_layer(placement, seed=0, transport=None):
    setup = make_setup(placement.topology.num_ranks, seed)
    gate = Gate(setup.gate)
    return MoE(gate, setup.dense, transport or LocalTransport(setup.topology), placement), setup


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


class Gate(torch.nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.gate, self.scale = gate, torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, rows):
        ids, weights = self.gate(rows)
        return ids, weights * self.scale


def assert_holds(layer, dense):
    """Every row of every rank is its expert's."""
    for weights in layer.weights:
        experts = list(weights.layout.experts)
        for name in STACKS:
            assert torch.equal(
                getattr(weights, f"stored_{name}")[: len(experts)], getattr(dense, name)[experts]
            )


def on_one_rank():
    """Two placements of one rank: the same experts in other rows."""
    draw = random.Random(7)
    return [deal(draw, isoload.Topology(1), EXPERTS) for _ in range(2)]


def test_rows_move_to_where_the_placement_has_them():
    before, after = on_one_rank()
    layer, setup = make_layer(before)
    moved, _ = make_layer(before)
    moved.load_placement(after)
    for saved in (layer.state_dict(), moved.state_dict()):
        for placement in (before, after):
            other, _ = make_layer(placement, seed=1)
            other.load_state_dict(saved)
            assert_holds(other, setup.dense)


def test_a_state_saved_after_load_placement_is_not_another_experts():
    """A rank that holds some of the experts of the file: these; where it lacks one, it says so."""
    _, before, after = list(pairs(4))[1]
    layer, setup = make_layer(before)
    layer.load_placement(after)
    state = layer.state_dict()
    same, _ = make_layer(after, seed=1)
    same.load_state_dict(state)
    same.refresh_replicas()
    fresh, _ = make_layer(before, seed=1)
    with pytest.raises(
        ValueError,
        match=r"home_experts must hold experts \[.*\], whose home is this rank, got .*isoload.save and isoload.load",
    ):
        fresh.load_state_dict(state)
    fresh.load_full_state_dict(layer.full_state_dict())
    for other in (same, fresh):
        assert_holds(other, setup.dense)


def test_replicas_must_be_refreshed_after_a_load():
    _, placement, _ = list(pairs(4))[1]
    layer, setup = make_layer(placement)
    layer.load_state_dict(make_layer(placement, seed=1)[0].state_dict())
    with pytest.raises(ValueError, match=r"call refresh_replicas\(\)"):
        layer(setup.rows)
    layer.refresh_replicas()
    layer(setup.rows)


def test_an_old_file_is_refused():
    before, _ = on_one_rank()
    layer, _ = make_layer(before)
    state = {name: value for name, value in layer.state_dict().items() if not name.endswith("home_experts")}
    with pytest.raises(
        ValueError, match="state_dict must have weights.0.home_experts, the experts of its rows"
    ):
        layer.load_state_dict(state)
    state["weights.0.home_experts"] = torch.tensor(layer.weights[0].layout.homes)
    layer.load_state_dict(state)
    layer.load_state_dict({"gate.scale": torch.ones(1)}, strict=False)


def test_states_that_do_not_fit_are_refused():
    before, after = on_one_rank()
    layer, _ = make_layer(before)
    other, _ = make_layer(after)
    state = layer.state_dict()
    short = {**state, "weights.0.down": state["weights.0.down"][1:]}
    with pytest.raises(
        ValueError, match=r"weights.0.down must have 11 rows as weights.0.home_experts, got 10"
    ):
        other.load_state_dict(short)
    full = layer.full_state_dict()
    with pytest.raises(ValueError, match=r"experts.down must be \[11, 8, 6\], got \[10, 8, 6\]"):
        other.load_full_state_dict({**full, "experts.down": full["experts.down"][1:]})
    with pytest.raises(ValueError, match=r"experts.down_bias must be \[11, 8\], got None"):
        other.load_full_state_dict({k: v for k, v in full.items() if k != "experts.down_bias"})
    with pytest.raises(ValueError, match=r"state must hold \['gate.scale'\] and experts, got \[\]"):
        other.load_full_state_dict({k: v for k, v in full.items() if k != "gate.scale"})
    parametrize.register_parametrization(other.weights[0], "down", Doubled())
    with pytest.raises(ValueError, match="down must be a Parameter to be loaded, got a parametrized one"):
        other.load_full_state_dict(full)
    parts = {
        **{k: v for k, v in state.items() if "down" not in k},
        "weights.0.parametrizations.down.original": 0,
    }
    with pytest.raises(ValueError, match=r"home_experts must be \[.*\] for parametrized experts, got \["):
        other.load_state_dict(parts)


def saved_on(rank, ranks):
    _, before, after = list(pairs(ranks))[1]
    setup = make_setup(ranks)
    layer, _ = make_layer(before, transport=CollectiveTransport(setup.topology))
    layer.load_placement(after)
    full = layer.full_state_dict()
    layer.load_full_state_dict({n: v + 1 if n.startswith("experts.") else v for n, v in full.items()})
    layer.load_full_state_dict(full)
    return full, layer(setup.rows[rank]).detach()


@pytest.mark.parametrize("ranks", [2, 3])
def test_another_number_of_ranks(ranks):
    fulls, outputs = zip(*run_ranks(saved_on, ranks, ranks), strict=True)
    setup = make_setup(ranks)
    for full in fulls:
        assert full.keys() == {"gate.scale"} | {f"experts.{n}" for n in STACKS}
        assert all(torch.equal(full[f"experts.{n}"], getattr(setup.dense, n)) for n in STACKS)
    for other_ranks in (1, 4):
        placement = list(pairs(other_ranks))[1][1]
        layer, _ = make_layer(placement, seed=3)
        layer.load_full_state_dict(fulls[0])
        assert_holds(layer, setup.dense)
        rows = [*setup.rows, *setup.rows, *setup.rows][:other_ranks]
        for a, b in zip(layer(rows), outputs, strict=False):
            assert close(a, b, 1e-12)


def part_of_rank(rank, ranks):
    """What a rank's own state says and where it loads; what writers of one process's state do with it."""
    placement = list(pairs(ranks))[1][1]
    layer, setup = make_layer(placement, transport=CollectiveTransport(make_setup(ranks).topology))
    state = layer.state_dict()
    own = f"weights.rank_{rank}_of_{ranks}."
    assert state.keys() == {"gate.scale", f"{own}home_experts"} | {own + name for name in STACKS}
    states = [None] * ranks
    dist.all_gather_object(states, state)
    assert type(states[rank][f"{own}home_experts"]) is torch.Tensor
    again = copy.deepcopy(state)
    assert torch.equal(again[f"{own}home_experts"], state[f"{own}home_experts"])
    with tempfile.TemporaryFile() as file:
        torch.save(state, file)
        file.seek(0)
        layer.load_state_dict(torch.load(file, weights_only=True))
    with pytest.raises(ValueError, match="as another rank's state has: load the state that this rank saved"):
        layer.load_state_dict(states[(rank + 1) % ranks])
    for save in (
        safetensors.torch.save_model,
        lambda model, path: model.state_dict()[f"{own}home_experts"].contiguous(),
    ):
        with pytest.raises(ValueError, match="of only one rank: on all ranks call isoload.save"):
            save(layer, "unused.safetensors")
    return state


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_s_state_says_that_it_is_a_part(ranks):
    """Regression: all ranks had the same keys, so that any one's file looked like the layer's."""
    states = run_ranks(part_of_rank, ranks, ranks)
    experts = sorted(
        e for r, s in enumerate(states) for e in s[f"weights.rank_{r}_of_{ranks}.home_experts"].tolist()
    )
    assert experts == list(range(EXPERTS))


def distributed_checkpoint(rank, how, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    placement = list(pairs(2))[1][1]
    layer, _ = make_layer(placement, transport=CollectiveTransport(make_setup(2).topology))
    halves = [{"params": [p for p in layer.parameters() if p.ndim == n]} for n in (2, 3)]
    optimizer = torch.optim.AdamW([half for half in halves if half["params"]])
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if how == "save":
        dcp.save({"model": layer.state_dict()}, checkpoint_id=folder)
    elif how == "optimizer":
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    elif how == "optimizer, loaded":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert {type(v) for s in optimizer.state.values() for v in s.values()} == {torch.Tensor}
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
    elif how == "read":
        plain = {k: torch.zeros_like(v) for k, v in optimizer.state_dict()["state"][0].items()}
        dcp.save({"state": {0: plain}}, checkpoint_id=folder)
        dcp.load({"state": optimizer.state_dict()["state"]}, checkpoint_id=folder)
    elif how == "copy":
        other = torch.optim.SGD(copy.deepcopy(layer).parameters(), momentum=0.9)
        for parameter in other.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        other.step()
        dcp.save({"optimizer": other.state_dict()}, checkpoint_id=folder)
    elif how == "module":
        dcp.save({"model": layer}, checkpoint_id=folder)
    else:
        {
            "get_model_state_dict": lambda: state_dict.get_model_state_dict(layer),
            "get_optimizer_state_dict": lambda: state_dict.get_optimizer_state_dict(layer, optimizer),
            "get_state_dict": lambda: state_dict.get_state_dict(layer, optimizer),
            "set_model_state_dict": lambda: state_dict.set_model_state_dict(layer, layer.state_dict()),
            "set_optimizer_state_dict": lambda: state_dict.set_optimizer_state_dict(
                layer, optimizer, optimizer.state_dict()
            ),
        }[how]()


def zero_redundancy(rank):
    placement = list(pairs(2))[1][1]
    layer, _ = make_layer(placement, transport=CollectiveTransport(make_setup(2).topology))
    ZeroRedundancyOptimizer(layer.parameters(), torch.optim.AdamW)


def test_an_optimizer_that_broadcasts_parameters_is_refused():
    """Regression: after a step every rank had one rank's experts."""
    for outcome in rank_outcomes(zero_redundancy, 2, group_timeout=10.0):
        assert "experts must not be in a ZeroRedundancyOptimizer" in str(outcome.error)


@pytest.mark.parametrize(
    "how",
    [
        "save",
        "optimizer",
        "optimizer, loaded",
        "read",
        "copy",
        "module",
        "get_model_state_dict",
        "get_optimizer_state_dict",
        "get_state_dict",
        "set_model_state_dict",
        "set_optimizer_state_dict",
    ],
)
def test_distributed_checkpoints_are_refused(how, tmp_path):
    """Regression: one rank's experts, or its optimizer state, were kept in silence."""
    for outcome in rank_outcomes(distributed_checkpoint, 2, how, str(tmp_path), group_timeout=10.0):
        assert "torch.distributed.checkpoint would keep one rank's experts" in str(outcome.error)
        assert "save and load isoload.layer.ProgramState(model, optimizer)" in str(outcome.error)
