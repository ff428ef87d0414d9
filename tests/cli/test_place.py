"""isoload place: the file, the table, the JSON; replay --placement; and one red line for what a user can mend."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.placers import parse_placer
from isoload.trace import Trace, write_trace
from support.documents import PLAIN


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    counts = np.floor(50 * 1.5 ** np.random.default_rng(1).normal(size=(6, 2, 8))).astype(np.int64)
    path = tmp_path_factory.mktemp("traces") / "small.npz"
    write_trace(Trace("small", 8, 2, counts=counts, layer_ids=(3, 5)), path)
    return str(path)


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env=PLAIN)


def error_of(*args):
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr.removeprefix("error: ").rstrip("\n")


def test_a_trace_becomes_a_placement_and_a_table(trace, tmp_path):
    target = tmp_path / "plan.json"
    result = run("place", trace, "-o", target, "--ranks", 4, "--slots-per-rank", 3, "--expert-bytes", 2**20)
    assert result.exit_code == 0, result.output
    found = isoload.read_placement(target)
    assert found.layer_ids == (3, 5) and found.slots_per_rank == 3
    assert found.provenance["placer"] == "scenario" and found.provenance["traces"] == ["small"]
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[5:7]] == ["eplb", "scenario"]
    eplb, ours = (line.split() for line in lines[5:7])
    assert eplb[3:] == ["8", "2.0", "-"] and ours[3] == "8"
    assert "(calibrate interleaved)" in " ".join(result.stdout.split())


def test_the_figures_are_of_placements_that_have_not_seen_the_judged_batches(trace, tmp_path):
    result = run(
        "place", trace, "-o", tmp_path / "p.json", "--ranks", 4, "--slots-per-rank", 3, "--json", "-"
    )
    (eplb, ours) = json.loads(result.stdout)["placers"]
    counts = isoload.read_trace(trace).counts
    for row, placer in ((eplb, "eplb"), (ours, "scenario")):
        slots = isoload.place(counts[::2], isoload.Topology(4), 3, placer).slot_to_expert.numpy()
        found = []
        for batch in counts[1::2]:
            for layer, row_of in enumerate(slots.reshape(2, 4, 3)):
                copies = np.bincount(row_of.ravel(), minlength=8)
                load = [sum(batch[layer, e] / copies[e] for e in rank) for rank in row_of]
                found.append(max(load) / np.mean(load))
        assert row["even"] == pytest.approx(np.mean(found))
        assert 1 <= row["exact"] <= row["even"] + 1e-9


def test_before_against_and_several_traces(trace, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert (
        run("place", trace, "-o", first, "--ranks", 4, "--slots-per-rank", 3, "--placer", "eplb").exit_code
        == 0
    )
    args = ["place", trace, trace, "-o", second, "--ranks", 4, "--placer", "scenario:moves=1:split=exact"]
    result = run(*args, "--before", first, "--against", first, "--calibrate", "first-half", "--json", "-")
    rows = json.loads(result.stdout)["placers"]
    assert [row["placer"] for row in rows] == ["eplb", "scenario:moves=1:split=exact", str(first)]
    old, new = (isoload.read_placement(path).slot_to_expert for path in (first, second))
    assert ((old != new).sum(1) <= 1).all() and rows[2]["changed"] == 0
    assert rows[1]["changed"] == pytest.approx((old != new).float().mean().item())


def test_before_and_against_are_of_the_layers_that_they_name(trace, tmp_path):
    plan, mixed = tmp_path / "plan.json", tmp_path / "mixed.json"
    args = ["place", trace, "--ranks", 4, "--placer", "scenario"]
    assert run(*args, "-o", plan, "--slots-per-rank", 3).exit_code == 0
    isoload.write_placement(isoload.read_placement(plan).with_layers((5, 3)), mixed)
    given = ["--before", mixed, "--against", mixed, "--calibrate", "all", "--json", "-"]
    args[-1] = "scenario:moves=0"
    rows = json.loads(run(*args, *given, "-o", tmp_path / "again.json").stdout)["placers"]
    same = [isoload.read_placement(path).slot_to_expert.tolist() for path in (plan, tmp_path / "again.json")]
    assert same[0] == same[1] and rows[1]["changed"] == rows[2]["changed"] == 0
    assert rows[1]["exact"] == rows[2]["exact"]
    foreign = tmp_path / "foreign.json"
    isoload.write_placement(replace(isoload.read_placement(plan), layer_ids=(50, 60)), foreign)
    for option in ("--before", "--against"):
        said = error_of(
            *args[:-1], "scenario", option, foreign, "-o", tmp_path / "x.json", "--slots-per-rank", 3
        )
        assert said == f"{option[2:]} must have all layers of the trace, it has no layer 3"
    fewer = isoload.place(np.ones((2, 6)), isoload.Topology(4), 3)
    isoload.write_placement(replace(fewer, layer_ids=(3, 5)), foreign, "isoload")
    said = error_of(*args[:-1], "eplb", "--against", foreign, "-o", tmp_path / "x.json")
    assert said == "against must have 8 routed experts, got 6"


def test_memory_for_replicas_becomes_a_budget(trace, tmp_path):
    base = ["place", trace, "-o", tmp_path / "p.json", "--ranks", 4, "--expert-bytes", 1000, "--force"]
    assert run(*base, "--replica-memory", 1999).exit_code == 0
    slots = isoload.read_placement(tmp_path / "p.json").slot_to_expert
    assert (slots >= 0).sum() == 2 * 8 + 4, "one replica of each of 4 ranks"
    for more, message in (
        (
            ["--expert-bytes", 0, "--replica-memory", 5],
            "replica_memory must be at least 0 and come with expert_bytes",
        ),
        (
            ["--replica-memory", 5, "--placer", "craft:replicas=1"],
            "replica_memory must be 0 where the placer has rep",
        ),
        (
            ["--replica-memory", 5, "--placer", "eplb"],
            "replica_memory must be 0 for placer eplb, which has no budget",
        ),
    ):
        assert error_of(*base, *more).startswith(message)


def test_a_placement_is_replayed_by_layer_ids(trace, tmp_path):
    target = tmp_path / "plan.json"
    run("place", trace, "-o", target, "--ranks", 4, "--ranks-per-node", 2, "--slots-per-rank", 3)
    base = ["replay", trace, "--placement", target, "--policies", "even", "--batch-tokens", 64, "--json", "-"]
    found = json.loads(run(*base).stdout)
    assert (
        found["batches"] == 6 and found["settings"]["num_ranks"] == 4 and found["settings"]["placer"] is None
    )
    assert found["settings"]["ranks_per_node"] == 2 and found["settings"]["slots_per_rank"] == 3
    second = json.loads(run(*base, "--layers", "1").stdout)
    assert second["settings"]["layer_ids"] == [5]
    assert "a given placement" in run(*base[:-2]).stdout
    assert run(*base, "--ranks", 4).exit_code == 0
    assert error_of(*base, "--ranks", 8) == f"ranks must be 4 with placement {target}, got 8"
    assert (
        error_of(*base, "--placer", "eplb") == f"placer must be not given with placement {target}, got eplb"
    )
    swapped = isoload.Trace("other", 8, 2, counts=np.ones((2, 1, 8), int), layer_ids=(4,))
    write_trace(swapped, tmp_path / "other.npz")
    missing = error_of("replay", tmp_path / "other.npz", "--placement", target)
    assert missing == "layer_ids must be of the placement's layers, it has no layer 4"


def test_replay_takes_a_placer_with_options(trace):
    base = ["replay", trace, "--ranks", 4, "--policies", "even", "--batch-tokens", 64, "--json", "-"]
    found = [
        json.loads(run(*base, "--placer", p).stdout)["policies"][0]
        for p in ("scenario", "scenario:search=False")
    ]
    assert found[0]["imbalance"] != found[1]["imbalance"]
    assert error_of(*base, "--placer", "eplb:x=1").startswith(
        "option must be one of dedup, groups for placer eplb"
    )


def test_what_place_refuses(trace, tmp_path):
    base = ["place", trace, "-o", tmp_path / "p.json", "--ranks", 4]
    assert (
        error_of(*base, "--format", "yaml")
        == "format must be one of isoload, tensorrt-llm, sglang, vllm, vllm-list, vllm-ascend, got 'yaml'"
    )
    assert error_of(*base, "--placer", "best").startswith("placer must be one of trivial, eplb, ")
    assert error_of(*base, "--placer", "scenario:shrink") == (
        "placer must be written name:option=value, got 'scenario:shrink'"
    )
    assert (
        error_of(*base, "--placer", "scenario:moves=x") == "option moves must be of type int, None, got 'x'"
    )
    assert error_of(*base, "--calibrate", "leave-cluster-out").startswith("calibrate=leave-cluster-out needs")
    assert (
        error_of(*base, "--before", tmp_path / "no.json") == f"{tmp_path}/no.json: No such file or directory"
    )
    nowhere = str(tmp_path / "no" / "p.json")
    assert error_of("place", trace, "-o", nowhere, "--ranks", 4) == (
        f"output must be a file in an existing folder or -, got {nowhere!r}"
    )
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_placer_are_read_in_their_types():
    name, options = parse_placer(
        "scenario:split=exact:search=False:shrink=0.5:replicas=knee:moves=None:groups=8"
    )
    assert name == "scenario" and options == {
        "split": "exact", "search": False, "shrink": 0.5, "replicas": "knee", "moves": None, "groups": 8,
    }  # fmt: skip
    assert parse_placer("craft:replicas=4") == ("craft", {"replicas": 4})
    with pytest.raises(ValueError, match="^option search must be of type bool, got 'yes'$"):
        parse_placer("scenario:search=yes")
