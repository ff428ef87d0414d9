"""isoload place: the file, the table, the JSON; replay --placement; and one red line for what a user can mend."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import isoload
from isoload.analysis.judge import arrivals, even_imbalance, exact_imbalance
from isoload.cli.app import app
from isoload.cli.place import near_line
from isoload.placers import parse_placer
from isoload.traces import Identity, Trace, write_trace
from isoload.wording import saving
from support import measured_times
from support.documents import PLAIN
from support.sglang_recording import EXPERTS, MOE, Recording

SHIPPED = Path(__file__).parents[2] / "examples" / "traces" / "gptoss20b_decode.npz"


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
    in_order, eplb, ours = (line.split() for line in lines if line.startswith(("in order", "eplb", "scen")))
    assert " ".join(in_order[:4]) == "in order, no replicas" and in_order[-2:] == ["0", "0.0"]
    assert eplb[0] == "eplb" and eplb[3:] == ["8", "2.0"]
    assert ours[:2] == ["scenario", "(written)"] and ours[4] == "8"
    assert "(calibrate first-half)" in " ".join(result.stdout.split())
    assert max(len(line) for line in lines[2:] if not line.startswith("Start vLLM: ")) <= 80


def test_the_figures_are_of_placements_that_have_not_seen_the_judged_batches(trace, tmp_path):
    result = run(
        "place", trace, "-o", tmp_path / "p.json", "--ranks", 4, "--slots-per-rank", 3, "--json", "-"
    )
    (_, eplb, ours) = json.loads(result.stdout)["placers"]
    counts = isoload.read_trace(trace).counts
    for row, placer in ((eplb, "eplb"), (ours, "scenario")):
        slots = isoload.place(counts[:3], isoload.Topology(4), 3, placer).slot_to_expert.numpy()
        found = []
        for batch in counts[3:]:
            for layer, row_of in enumerate(slots.reshape(2, 4, 3)):
                copies = np.bincount(row_of.ravel(), minlength=8)
                load = [sum(batch[layer, e] / copies[e] for e in rank) for rank in row_of]
                found.append(max(load) / np.mean(load))
        assert row["even"] == pytest.approx(np.mean(found))
        assert 1 <= row["exact"] <= row["even"] + 1e-9


@pytest.mark.parametrize(("seed", "better"), [(0, "eplb"), (1, "scenario"), (2, "scenario"), (4, "eplb")])
def test_the_default_is_the_placer_with_the_lower_unseen_imbalance(tmp_path, seed, better):
    """Of equal ones (seed 1) scenario. The table, the JSON and the first line name the one that is written."""
    counts = np.floor(50 * 1.5 ** np.random.default_rng(seed).normal(size=(6, 2, 8))).astype(np.int64)
    write_trace(Trace("small", 8, 2, counts=counts), tmp_path / "t.npz")
    target = tmp_path / "p.json"
    base = ["place", tmp_path / "t.npz", "-o", target, "--ranks", 4, "--slots-per-rank", 3, "--force"]
    rows = json.loads(run(*base, "--json", "-").stdout)["placers"]
    assert [row["placer"] for row in rows] == ["in order, no replicas", "eplb", "scenario"]
    (written,) = [row for row in rows if row["written"]]
    assert written["placer"] == better and written["exact"] == min(row["exact"] for row in rows[1:])
    found = isoload.read_placement(target)
    assert found.provenance["placer"] == better
    assert found.slot_to_expert.equal(isoload.place(counts, 4, 3, better).slot_to_expert)
    shown = run(*base).stdout
    assert f"placer {better}" in " ".join(shown.split("\n\n")[0].split())
    assert f"\n{better} (written) " in shown and shown.count("(written)") == 1
    assert isoload.place(counts, 4, 3).provenance["placer"] == "eplb", "in Python the default stays"
    asked = json.loads(run(*base, "--placer", "eplb", "--json", "-").stdout)["placers"]
    assert [(row["placer"], row["written"]) for row in asked] == [
        ("in order, no replicas", False),
        ("eplb", True),
    ]


def test_in_order_has_no_replicas_where_ranks_do_not_divide_experts(tmp_path):
    write_trace(Trace("ten", 10, 2, counts=np.ones((2, 1, 10), int)), tmp_path / "t.npz")
    base = ["place", tmp_path / "t.npz", "-o", tmp_path / "p.json", "--ranks", 4, "--json", "-"]
    first = json.loads(run(*base).stdout)["placers"][0]
    assert (first["replicas"], first["even"], first["exact"]) == (0, 1.2, 1.2)


def test_only_scenario_starts_from_a_placement_or_keeps_to_a_budget(tmp_path):
    counts = np.floor(50 * 1.5 ** np.random.default_rng(0).normal(size=(6, 2, 8))).astype(np.int64)
    write_trace(Trace("small", 8, 2, counts=counts), tmp_path / "t.npz")
    base = ["place", tmp_path / "t.npz", "--ranks", 4]
    assert run(*base, "-o", tmp_path / "a.json").exit_code == 0
    assert isoload.read_placement(tmp_path / "a.json").provenance["placer"] == "eplb"
    for more in (["--before", tmp_path / "a.json"], ["--expert-bytes", 8, "--replica-memory", 16]):
        assert run(*base, "-o", tmp_path / "b.json", "--force", *more).exit_code == 0
        assert isoload.read_placement(tmp_path / "b.json").provenance["placer"] == "scenario"


def test_faster_ranks_get_more_load(trace, tmp_path):
    args = [
        "place",
        trace,
        "-o",
        tmp_path / "p.json",
        "--ranks",
        4,
        "--placer",
        "scenario",
        "--force",
        "--times",
    ]
    found = {}
    for name, speeds in (("even", [1.0, 1.009, 1.0, 1.0]), ("uneven", [1.0, 1.0, 1.0, 2.0])):
        result = run(*args, measured_times.written(tmp_path / f"{name}.json", speeds=speeds))
        assert result.exit_code == 0, result.output
        found[name] = isoload.read_placement(tmp_path / "p.json").topology.speeds
    assert found == {"even": None, "uneven": (1.0, 1.0, 1.0, 2.0)}
    args[args.index("--ranks") + 1] = 2
    message = error_of(*args, tmp_path / "uneven.json")
    assert message.endswith(
        "where 4 ranks have different speeds: run isoload measure on the ranks that will serve, or pass gpu"
    )


def test_a_file_of_several_traces_has_seen_each(trace, tmp_path):
    target = tmp_path / "both.json"
    again = tmp_path / "again.npz"
    write_trace(replace(isoload.read_trace(trace), name="again"), again)
    assert run("place", trace, again, "-o", target, "--ranks", 4).exit_code == 0
    isoload.write_placement(
        replace(isoload.read_placement(target), provenance={"traces": ["small", "other"]}), target
    )
    shown = run("replay", trace, "--placement", target, "--policies", "even", "--batch-tokens", 64).stdout
    assert "".join(f"seen: {target}, placed on 'small', 'other'".split()) in "".join(shown.split())


def test_before_against_and_several_traces(trace, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert (
        run("place", trace, "-o", first, "--ranks", 4, "--slots-per-rank", 3, "--placer", "eplb").exit_code
        == 0
    )
    again = tmp_path / "again.npz"
    isoload.traces.write_trace(replace(isoload.read_trace(trace), name="again"), again)
    args = ["place", trace, again, "-o", second, "--ranks", 4, "--placer", "scenario:moves=1:split=exact"]
    result = run(*args, "--before", first, "--against", first, "--calibrate", "first-half", "--json", "-")
    rows = json.loads(result.stdout)["placers"]
    assert [row["placer"] for row in rows] == [
        "in order, no replicas", "eplb", "scenario:moves=1:split=exact", str(first),
    ]  # fmt: skip
    old, new = (isoload.read_placement(path).slot_to_expert for path in (first, second))
    assert ((old != new).sum(1) <= 1).all() and rows[3]["changed"] == 0
    assert rows[2]["changed"] == pytest.approx((old != new).float().mean().item())


def test_before_and_against_are_of_the_layers_that_they_name(trace, tmp_path):
    plan, mixed = tmp_path / "plan.json", tmp_path / "mixed.json"
    args = ["place", trace, "--ranks", 4, "--placer", "scenario"]
    assert run(*args, "-o", plan, "--slots-per-rank", 3).exit_code == 0
    isoload.write_placement(isoload.read_placement(plan).with_layers((5, 3)), mixed)
    given = ["--before", mixed, "--against", mixed, "--calibrate", "all", "--json", "-"]
    args[-1] = "scenario:moves=0"
    rows = json.loads(run(*args, *given, "-o", tmp_path / "again.json").stdout)["placers"]
    same = [isoload.read_placement(path).slot_to_expert.tolist() for path in (plan, tmp_path / "again.json")]
    assert same[0] == same[1] and rows[2]["changed"] == rows[3]["changed"] == 0
    assert rows[2]["exact"] == rows[3]["exact"]
    foreign = tmp_path / "foreign.json"
    isoload.write_placement(replace(isoload.read_placement(plan), layer_ids=(50, 60)), foreign)
    for option in ("--before", "--against"):
        said = error_of(
            *args[:-1], "scenario", option, foreign, "-o", tmp_path / "x.json", "--slots-per-rank", 3
        )
        assert said.startswith(
            f"{option[2:]} has layers 50, 60 (the model's own layer numbers) and no layer 3"
        )
    fewer = isoload.place(np.ones((2, 6)), isoload.Topology(4), 3)
    isoload.write_placement(replace(fewer, layer_ids=(3, 5), identity=Identity("model")), foreign, "isoload")
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
            "--replica-memory must be at least 0 and come with --expert-bytes",
        ),
        (
            ["--replica-memory", 5, "--placer", "craft:replicas=1"],
            "--replica-memory 5 cannot be combined with the placer's option replicas: leave one of",
        ),
        (
            ["--replica-memory", 5, "--placer", "trivial"],
            "--replica-memory must be 0 for placer trivial, which has no budget",
        ),
    ):
        assert error_of(*base, *more).startswith(message)


def test_a_placement_is_replayed_by_layer_ids(trace, tmp_path):
    target = tmp_path / "plan.json"
    run("place", trace, "-o", target, "--ranks", 4, "--ranks-per-node", 2, "--slots-per-rank", 3)
    base = ["replay", trace, "--placement", target, "--policies", "even", "--batch-tokens", 64]
    base += ["--calibrate", "all", "--json", "-"]
    found = json.loads(run(*base).stdout)
    assert (
        found["batches"] == 6 and found["settings"]["num_ranks"] == 4 and found["settings"]["placer"] is None
    )
    assert found["settings"]["ranks_per_node"] == 2 and found["settings"]["slots_per_rank"] == 3
    second = json.loads(run(*base, "--layers", "1").stdout)
    assert second["settings"]["layer_ids"] == [5]
    seen = "".join(f"seen:{target},placedonthesebatches".split())
    assert seen in "".join(run(*base[:-2]).stdout.split())
    assert run(*base, "--ranks", 4).exit_code == 0
    assert error_of(*base, "--ranks", 8) == f"ranks must be 4 with placement {target}, got 8"
    assert (
        error_of(*base, "--placer", "eplb") == f"placer must be not given with placement {target}, got eplb"
    )
    swapped = isoload.traces.Trace("other", 8, 2, counts=np.ones((2, 1, 8), int), layer_ids=(4,))
    write_trace(swapped, tmp_path / "other.npz")
    missing = error_of("replay", tmp_path / "other.npz", "--placement", target)
    assert missing.startswith(
        "placement has layers 3, 5 (the model's own layer numbers) and no layer 4, which trace other"
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Six batches of 64 tokens, whose hot experts move."""
    rng = np.random.default_rng(1)
    keys = rng.gumbel(size=(384, 2, 8)) + np.linspace(0, 2, 384)[:, None, None] * np.arange(8)
    ids = np.argsort(-keys, axis=-1)[..., :2].astype(np.int32)
    path = tmp_path_factory.mktemp("traces") / "tokens.npz"
    write_trace(Trace("tokens", 8, topk_ids=ids, tokens_per_batch=np.full(6, 64)), path)
    return str(path)


@pytest.mark.parametrize("placer", ["scenario", "scenario:split=exact", "eplb", "craft", "grace"])
def test_the_file_itself_is_replayed_and_judged_on_unseen_batches_by_calibrate(tokens, tmp_path, placer):
    """The file has seen all batches; --calibrate finds place's figures, of placements that have not."""
    target = tmp_path / "plan.json"
    placed = run("place", tokens, "-o", target, "--ranks", 4, "--placer", placer, "--json", "-")
    said = json.loads(placed.stdout)["placers"][-1]
    base = ["replay", tokens, "--placement", target, "--policies", "exact,even"]
    file = json.loads(run(*base, "--json", "-").stdout)
    counts, placement = isoload.read_trace(tokens).batch_counts(), isoload.read_placement(target)
    for row, judge in zip(file["policies"], (exact_imbalance, even_imbalance), strict=True):
        wanted = judge(placement, counts)
        assert row["imbalance"]["mean"] == pytest.approx(
            wanted.mean(), rel=0.02 if judge is even_imbalance else 1e-9
        )
    assert file["batches"] == 6 and file["settings"]["placement"]["placer"] == placer.partition(":")[0]
    line = (
        f"seen: {target}, placed on these batches; --calibrate first-half judges its placer on unseen batches"
    )
    assert "".join(line.split()) in "".join(run(*base).stdout.split())
    assert json.loads(run(*base, "--calibrate", "all", "--json", "-").stdout)["batches"] == 6
    base += ["--calibrate", "first-half"]
    unseen = json.loads(run(*base, "--json", "-").stdout)
    assert unseen["policies"][0]["imbalance"]["mean"] == pytest.approx(said["exact"])
    assert unseen["settings"]["placer"] == placer and unseen["batches"] == 3
    line = f"unseen: placed on the first 3 batches, as {target} was on all"
    assert "".join(line.split()) in "".join(run(*base).stdout.split())


def test_of_totals_the_file_itself_is_replayed_and_called_seen(tmp_path):
    counts = np.random.default_rng(2).integers(1, 50, (1, 2, 8))
    write_trace(Trace("totals", 8, 2, counts=counts), tmp_path / "t.npz")
    target = tmp_path / "p.json"
    placed = run("place", tmp_path / "t.npz", "-o", target, "--ranks", 4)
    assert "Seen batches (calibrate all)" in placed.stdout
    shown = run("replay", tmp_path / "t.npz", "--placement", target, "--policies", "even").stdout
    assert "".join(f"seen:{target},placedonthesebatches".split()) in "".join(shown.split())


def test_a_placement_of_other_loads_is_replayed_as_it_is(trace, tmp_path):
    isoload.write_placement(isoload.place(np.ones((2, 8)), isoload.Topology(4), 3), tmp_path / "p.json")
    other = Trace("other", 8, 2, counts=np.random.default_rng(2).integers(1, 50, (3, 2, 8)))
    write_trace(other, tmp_path / "other.npz")
    base = ["replay", tmp_path / "other.npz", "--placement", tmp_path / "p.json", "--policies", "even"]
    shown = " ".join(run(*base).stdout.split())
    assert "in 3 batches" in shown and "placed on loads that it does not name" in shown
    assert error_of(*base, "--calibrate", "first-half") == (
        f"calibrate must be all with placement {tmp_path / 'p.json'}, which no placer makes of this trace alone, "
        "got first-half"
    )


def test_place_and_replay_give_a_rank_the_same_slots(trace, tmp_path):
    """And without a slot more than experts both say that nothing is left to choose."""
    target = tmp_path / "plan.json"
    run("place", trace, "-o", target, "--ranks", 4)
    replayed = json.loads(run("replay", trace, "--ranks", 4, "--json", "-").stdout)
    assert isoload.read_placement(target).slots_per_rank == replayed["settings"]["slots_per_rank"] == 3
    message = (
        "Every expert has one slot, so no policy has a choice: --slots-per-rank 3 gives each rank a replica."
    )
    base = ["--ranks", 4, "--slots-per-rank"]
    for command in (["place", trace, "-o", target, "--force"], ["replay", trace]):
        assert message in " ".join(run(*command, *base, 2).stdout.split())
        assert message not in " ".join(run(*command, *base, 3).stdout.split())


def test_an_engines_placement_takes_its_ranks_from_the_command(trace, tmp_path):
    target = tmp_path / "plan.json"
    assert run("place", trace, "-o", target, "--ranks", 4, "--format", "sglang").exit_code == 0
    for command in (["replay", trace, "--policies", "even"], ["inspect", trace]):
        base = [*command, "--placement", target]
        assert run(*base, "--ranks", 4).exit_code == 0
        assert error_of(*base) == (
            f"{target}: --ranks must be given: SGLang's file does not state the number of ranks"
        )
    nodes = ["replay", trace, "--placement", target, "--ranks", 4, "--ranks-per-node", 2, "--json", "-"]
    assert json.loads(run(*nodes).stdout)["settings"]["ranks_per_node"] == 2


def recorded(folder, kind):
    """What an engine records, and isoload."""
    recording = Recording(1, folder)
    if kind.startswith("per_"):
        return (
            recording.save() and folder
            if kind == "per_token"
            else recording.save(recording.own_slots) and folder
        )
    counts = recording.true_counts()
    if kind == "isoload":
        recorder = isoload.Recorder(*counts.shape[1:], layer_ids=MOE)
        sources = [torch.nn.Module() for _ in MOE]
        for batch in counts:
            for layer, row in enumerate(batch):
                recorder.add(layer, [torch.from_numpy(row)], sources[layer], top_k=2)
            recorder.step()
        recorder.save(folder / "run.npz")
        return folder / "run.npz"
    step = {"record_type": "eplb_load_stats", "version": 1, "p2l_map": [list(range(EXPERTS))] * len(MOE)}
    lines = [json.dumps(step | {"step": i, "expert_load": batch.tolist()}) for i, batch in enumerate(counts)]
    (folder / "run.jsonl").write_text("\n".join(lines))
    return folder / "run.jsonl"


@pytest.mark.parametrize("kind", ["per_token", "per_pass", "vllm", "isoload"])
def test_from_a_record_to_an_engines_file(tmp_path, kind):
    """README's path. per_pass and vLLM's lines do not say K: without --top-k all but rows is judged."""
    (tmp_path / "run").mkdir()
    record, says_k = recorded(tmp_path / "run", kind), kind in ("per_token", "isoload")
    engine = "vllm" if kind == "vllm" else "sglang"
    target, own = tmp_path / "engine.json", tmp_path / "own.json"
    base = ["--ranks", 3, "--policies", "none,exact", "--json", "-"]
    for given in [[]] if says_k else [[], ["--top-k", 2]]:
        rows = json.loads(run("replay", record, *base, *given).stdout)["policies"]
        assert (rows[0]["remote_rank_rows"] is None) == (not says_k and not given)
        assert rows[1]["gap"]["max"] == 0 and rows[0]["gap"]["max"] > 0
    placed = run("place", record, "-o", target, "--ranks", 3, "--format", engine, "--json", "-")
    in_order, _, ours = json.loads(placed.stdout)["placers"]
    assert ours["replicas"] == 3 * len(MOE) and ours["exact"] < in_order["exact"]
    judged = json.loads(run("replay", record, "--placement", target, *base).stdout)
    assert judged["batches"] == 3 and judged["policies"][1]["gap"]["max"] == 0
    assert run("inspect", record, "--placement", target, "--ranks", 3).exit_code == 0
    assert run("convert", target, "-o", own, "--format", "isoload", "--ranks", 3).exit_code == 0
    assert isoload.read_placement(own).slots_per_rank == 3


def test_replay_takes_a_placer_with_options(trace):
    base = ["replay", trace, "--ranks", 4, "--policies", "even", "--batch-tokens", 64, "--json", "-"]
    found = [
        json.loads(run(*base, "--placer", p).stdout)["policies"][0]
        for p in ("scenario", "scenario:search=False")
    ]
    assert found[0]["imbalance"] != found[1]["imbalance"]
    assert error_of(*base, "--placer", "eplb:x=1").startswith(
        "option must be one of dedup, groups, replicas for placer eplb"
    )


def test_what_place_refuses(trace, tmp_path):
    base = ["place", trace, "-o", tmp_path / "p.json", "--ranks", 4]
    assert (
        error_of(*base, "--format", "yaml")
        == "format must be one of isoload, tensorrt-llm, sglang, vllm, vllm-list, vllm-ascend, got 'yaml'"
    )
    named = str(tmp_path / "p.yaml")
    assert error_of("place", trace, "-o", named, "--ranks", 4, "--format", "sglang") == (
        f"output must end in .json for format sglang, got {named!r}"
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


def test_with_nodes_and_per_token_choices_place_prints_the_rows_that_near_saves(tmp_path):
    draw = np.random.default_rng(0)
    group = draw.integers(4, size=(400, 1))
    ids = (4 * group + np.argsort(draw.random((400, 4)), axis=1)[:, :2]).astype(np.int32)[:, None]
    path, target = tmp_path / "tokens.npz", tmp_path / "p.json"
    write_trace(Trace("tokens", 16, topk_ids=ids, tokens_per_batch=np.full(4, 100)), path)
    asked = ["place", path, "-o", target, "--ranks", 8, "--slots-per-rank", 3, "--placer"]
    result = run(*asked, "scenario", "--ranks-per-node", 2)
    before, after = isoload.read_placement(target).provenance["rows_to_other_nodes"]
    said = f"a seen token sends about {after:.2f} rows to other nodes (with near=False {before:.2f})"
    text = " ".join(result.stdout.split())
    assert after < before and said in text, result.output
    assert "scenario, near=False" in result.stdout and "times the mean load (with near=False 1." in text
    config = {"hidden_size": 7168, "moe_intermediate_size": 2048, "num_experts": 16, "num_experts_per_tok": 2}
    config |= {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "quantization_config": {"quant_method": "fp8"},
    }
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    timed = ["--model", tmp_path / "tiny.json", "--gpu", "h100", "--tokens-per-rank", 512, "--force"]
    figures = tmp_path / "figures.json"
    priced = run(*asked, "scenario", "--ranks-per-node", 2, *timed, "--json", figures)
    low, high = json.loads(figures.read_text())["near_saved_ms"]
    assert (
        low <= high
        and high > 0
        and f"; near {saving(low, high, 'ms')} a step" in " ".join(priced.stdout.split())
    )
    alone = run(*asked, "scenario", "--gpu", "h100", "--force")
    assert "error: model must be given with gpu," in alone.output.replace("--", "")
    for placer, nodes in (("scenario:near=False", 2), ("scenario", 8)):
        plain = run(*asked, placer, "--ranks-per-node", nodes, "--force")
        assert plain.exit_code == 0 and "other nodes" not in plain.stdout


def test_place_says_that_no_exchange_keeps_the_caps():
    assert near_line((0.5, 0.5), (1.0, 1.0)).endswith("no exchange of slots sends fewer under the load caps")


def test_place_warns_that_other_choices_than_those_of_the_batches_were_not_judged(tmp_path):
    """Counts of eight batches with the choices of some tokens alone, as engines that sample tokens record them."""
    draw = np.random.default_rng(0)
    ids = (4 * draw.integers(4, size=(400, 1)) + np.argsort(draw.random((400, 4)), axis=1)[:, :2])[:, None]
    counts = draw.integers(1, 100, size=(8, 1, 16))
    counts[..., 0] += counts.sum(-1) % 2
    path, target = tmp_path / "part.npz", tmp_path / "p.json"
    write_trace(Trace("part", 16, topk_ids=ids.astype(np.int32), counts=counts), path)
    asked = [
        "place",
        path,
        "-o",
        target,
        "--ranks",
        8,
        "--slots-per-rank",
        3,
        "--placer",
        "scenario",
        "--force",
    ]
    said = " ".join(run(*asked, "--ranks-per-node", 2).stdout.split())
    assert "judged as made from counts alone, and the written one is made from the choices, too." in said, (
        said
    )
    for more in (["--ranks-per-node", 8], ["--ranks-per-node", 2, "--calibrate", "all"]):
        assert "counts alone" not in run(*asked, *more).stdout


def test_place_for_another_number_of_ranks_keeps_what_lies_there(tmp_path):
    """Eight ranks become six, then eight with one lost: the line says what must be loaded, and where."""
    old, new, lost = (tmp_path / f"{name}.json" for name in ("old", "new", "lost"))
    assert (
        run(
            "place", SHIPPED, "-o", old, "--ranks", 8, "--slots-per-rank", 5, "--placer", "scenario"
        ).exit_code
        == 0
    )
    base = ["place", SHIPPED, "--placer", "scenario:moves=2", "--before", old, "--expert-bytes", 2**20]
    done = run(*base, "-o", new, "--ranks", 6, "--json", tmp_path / "figures.json")
    assert done.exit_code == 0, done.output
    before, after = isoload.read_placement(old), isoload.read_placement(new)
    assert (after.topology.num_ranks, after.slots_per_rank) == (6, 7)
    wanted = arrivals(before, after)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["arrivals"] == wanted.sum(0).tolist()
    busiest = wanted.sum(0).max()
    said = (
        f"; {wanted.sum(1).mean():.1f} experts of a layer arrive, on the busiest rank {busiest} of all layers"
    )
    assert said in " ".join(done.stdout.split())
    done = run(
        *base[:-4], "--before", old, "-o", lost, "--ranks", 8, "--lost-rank", 3, "--placer", "scenario"
    )
    assert done.exit_code == 0, done.output
    slots = isoload.read_placement(lost).slot_to_expert.view(24, 8, 5)
    assert (slots[:, 3] == -1).all() and all(set(row.flatten().tolist()) >= set(range(32)) for row in slots)
    wrong = run(*base, "-o", tmp_path / "no.json", "--ranks", 8, "--lost-rank", 8)
    assert wrong.exit_code == 2 and wrong.stderr == "error: --lost-rank must be in 0..7, got 8\n"


def test_an_engines_file_of_another_group_states_its_ranks_by_an_option(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    base = ["place", SHIPPED, "--slots-per-rank", 6, "--placer", "scenario"]
    assert run(*base, "-o", old, "--ranks", 8, "--format", "sglang").exit_code == 0
    more = [*base[:2], "--placer", "scenario:moves=0", "-o", new, "--before", old, "--ranks", 6, "--force"]
    assert run(*more, "--before-ranks", 8).exit_code == 0
    assert isoload.read_placement(new).slots_per_rank == 8
