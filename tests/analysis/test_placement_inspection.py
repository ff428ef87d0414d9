"""What a placement's replicas bring: every figure by plain counting, and the views' tables."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import isoload
from isoload.analysis.inspection import inspect_placement
from isoload.cli.app import app
from isoload.placers.craft import assign
from isoload.placers.eplb import pack_into
from isoload.traces import Identity, Trace, write_trace
from support.documents import PLAIN
from support.placing import level_of

EXPERTS, RANKS, LAYER_IDS = 10, 4, (3, 5, 8)


@pytest.fixture(scope="module")
def trace():
    counts = np.floor(50 * 2.0 ** np.random.default_rng(1).normal(size=(6, 3, EXPERTS))).astype(np.int64)
    counts[2, 1] = 0  # a batch without copies in a layer
    return Trace("small", EXPERTS, 2, counts=counts, layer_ids=LAYER_IDS)


@pytest.fixture(scope="module")
def placement(trace):
    return isoload.place(trace, isoload.Topology(RANKS), 4, "scenario")


def balancedness(rows, loads):
    """Mean over batches with copies of mean/max load, for lists of each rank's experts."""
    copies = np.bincount([e for row in rows for e in row], minlength=EXPERTS)
    found = []
    for batch in loads:
        if batch.sum():
            load = [sum(batch[e] / copies[e] for e in row) for row in rows]
            found.append(np.mean(load) / max(load))
    return np.mean(found)


def rows_of(slots):
    return [[e for e in row if 0 <= e < EXPERTS] for row in slots.reshape(RANKS, -1).tolist()]


def test_figures_are_what_plain_counting_finds(trace, placement):
    view = inspect_placement(trace, placement)
    assert view["replicas"] == [0, 1, 2, 4]
    total = trace.counts.sum(0).astype(np.float32)
    for i, layer in enumerate(view["layers"]):
        loads = trace.counts[:, i]
        assert (layer["layer_id"], layer["replicas"]) == (LAYER_IDS[i], 6)
        assert layer["in_order"] == pytest.approx(balancedness([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]], loads))
        assert layer["replicated"] == pytest.approx(balancedness(rows_of(placement.arrays[0][i]), loads))
        for number, found in zip(view["replicas"], layer["by_replicas"], strict=True):
            slots = pack_into(total[i : i + 1], assign(np.array([EXPERTS + number]), RANKS))
            assert found == pytest.approx(balancedness(rows_of(slots), loads))
        assert layer["placed"] == layer["by_replicas"][0]
        assert layer["gain_of_placing"] == pytest.approx(layer["placed"] - layer["in_order"])
        assert layer["gain_of_replicas"] == pytest.approx(layer["replicated"] - layer["placed"])
        used = loads[loads.sum(1) > 0].astype(float)
        peaks = np.ceil(level_of(placement.arrays[0][i : i + 1], used[:, None], RANKS)[:, 0] - 1e-9)
        assert layer["exact"] == pytest.approx((used.sum(1) / RANKS / peaks).mean())
    assert view["balancedness_by_replicas"] == pytest.approx(
        np.mean([layer["by_replicas"] for layer in view["layers"]], axis=0)
    )


def test_shared_experts_and_dead_ranks_are_left_out(trace):
    topology = isoload.Topology(RANKS + 1, alive=[True, True, False, True, True])
    odd = isoload.place(trace, topology, 5, "scenario", num_shared=1)
    plain = isoload.place(trace, isoload.Topology(RANKS), 4, "scenario")
    view, other = inspect_placement(trace, odd), inspect_placement(trace, plain)
    for one, two in zip(view["layers"], other["layers"], strict=True):
        assert (one["in_order"], one["by_replicas"], one["replicas"]) == (
            two["in_order"],
            two["by_replicas"],
            two["replicas"],
        )
    held = odd.arrays[0].reshape(3, 5, 5)[:, [0, 1, 3, 4]]
    assert view["layers"][0]["replicated"] == pytest.approx(
        balancedness(rows_of(held[0]), trace.counts[:, 0])
    )


def test_with_speeds_every_figure_is_of_costs(trace, placement):
    """Equal ones change none; a slow rank holds back what lies in order as it does the placement."""
    plain, equal, slow = (
        inspect_placement(trace, replace(placement, topology=isoload.Topology(RANKS, speeds=speeds)))
        for speeds in (None, (0.5,) * RANKS, (1.0, 1.0, 1.0, 0.25))
    )
    assert equal["balancedness_by_replicas"] == pytest.approx(plain["balancedness_by_replicas"])
    for one, two, three in zip(plain["layers"], equal["layers"], slow["layers"], strict=True):
        assert (two["in_order"], two["replicated"], two["exact"]) == pytest.approx(
            (one["in_order"], one["replicated"], one["exact"])
        )
        assert three["replicated"] < 0.7 * one["replicated"] and three["placed"] < 0.7 * one["placed"]
        assert 0 < three["replicated"] <= three["exact"] <= 1


@pytest.fixture
def files(trace, placement, tmp_path):
    write_trace(trace, tmp_path / "small.npz")
    isoload.write_placement(placement, tmp_path / "plan.json")
    return [str(tmp_path / "small.npz"), "--placement", str(tmp_path / "plan.json")]


def run(*args):
    return CliRunner().invoke(app, ["inspect", *map(str, args)], env=PLAIN)


def test_the_command_prints_layers_in_order_and_as_json(trace, placement, files):
    view = inspect_placement(trace, placement)
    lines = run(*files).stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("layer"))
    cells = [line.split() for line in lines[first + 1 : first + 5]]
    assert [row[0] for row in cells] == ["3", "5", "8", "all"]
    for row, layer in zip(cells, view["layers"], strict=False):
        wanted = [layer["in_order"], layer["placed"], layer["replicated"], layer["exact"]]
        assert row[1:5] == [f"{value:.3f}" for value in wanted] and row[7] == "6"
    assert cells[3][7] == "18"
    last = next(line for line in reversed(lines) if line.startswith("all"))
    assert last.split()[1:] == [f"{value:.3f}" for value in view["balancedness_by_replicas"]]
    found = json.loads(run(*files, "--json", "-", "--layers", "1-2").stdout)
    assert [layer["layer_id"] for layer in found["layers"]] == [5, 8] and found["replicas"] == [0, 1, 2, 4]
    assert found["layers"][0]["by_replicas"] == view["layers"][1]["by_replicas"]
    assert found["num_ranks"] == RANKS and len(found["balancedness_by_replicas"]) == 4


def test_refused(files, placement, tmp_path):
    def error(*args):
        result = run(*args)
        assert result.exit_code == 2 and result.stdout == ""
        return result.stderr.strip()

    trace, _, path = files
    assert error(*files, "--ranks", 8) == f"error: ranks must be 4 with placement {path}, got 8"
    assert run(*files, "--ranks", 4).exit_code == 0
    missing = tmp_path / "no.json"
    assert error(trace, "--placement", missing) == f"error: {missing}: No such file or directory"
    isoload.write_placement(placement.with_layers((3, 5)), path)
    assert error(*files).startswith(
        "error: placement has layers 3, 5 (the model's own layer numbers) and no layer 8"
    )
    other = isoload.place(torch.ones(3, 9), isoload.Topology(RANKS), 4)
    isoload.write_placement(replace(other, layer_ids=LAYER_IDS, identity=Identity("model")), path)
    assert error(*files) == "error: num_experts must be the placement's 9, got 10"
    wide = isoload.place(torch.ones(3, EXPERTS), isoload.Topology(11), 2)
    isoload.write_placement(replace(wide, layer_ids=LAYER_IDS, identity=Identity("model")), path)
    assert error(*files) == "error: num_experts must be at least the placement's 11 live ranks, got 10"
