"""Replay: every figure recomputed in NumPy, on placements that have not seen what they are judged on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis import simulate
from isoload.analysis.simulate import ReplaySettings, default_slots_per_rank
from isoload.cli.replay import replay_json
from isoload.policies import parse_policy
from isoload.traces import Trace
from support.measured_times import times
from support.oracles import cut_optimum

LAYERS, EXPERTS, TOP_K, RANKS, PER_NODE = 3, 10, 3, 4, 2
POLICIES = ("none", "static", "even", "dynamic", "exact")


def skewed_ids(rng, tokens, shift=0):
    """[tokens, LAYERS, TOP_K] distinct experts, hot ones from `shift` on, a tenth absent."""
    popularity = np.roll(1.0 / np.arange(1, EXPERTS + 1), shift)
    keys = rng.gumbel(size=(tokens, LAYERS, EXPERTS)) + np.log(popularity)
    ids = np.argsort(-keys, axis=-1)[..., :TOP_K].astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    return ids


def small_trace(seed=3):
    """Five batches of 8, 12, 0, 16 and 4 tokens; the fourth has no copy in layer 1. No sequences."""
    rng = np.random.default_rng(seed)
    sizes = np.array([8, 12, 0, 16, 4])
    ids = skewed_ids(rng, sizes.sum())
    ids[20:36, 1] = -1
    return Trace("small", EXPERTS, topk_ids=ids, tokens_per_batch=sizes)


def replay(trace, **settings):
    settings = {"num_ranks": RANKS, "ranks_per_node": PER_NODE, "policies": POLICIES, **settings}
    return simulate.replay(trace, ReplaySettings(**settings))


def figures(trace, **settings):
    return {row["policy"]: row for row in replay_json(replay(trace, **settings))["policies"]}


def recomputed(trace, policy, calibration, replayed, slots_per_rank, seed):
    """The figures of one policy, token by token; contiguous source ranks of batches that R divides."""
    ends = np.cumsum(trace.tokens_per_batch)
    batches = [trace.topk_ids[end - n : end] for n, end in zip(trace.tokens_per_batch, ends, strict=True)]
    counts = np.array(
        [[[(b[:, m] == e).sum() for e in range(EXPERTS)] for m in range(LAYERS)] for b in batches]
    )
    topology = isoload.Topology(RANKS, PER_NODE)
    placement = isoload.place(counts[calibration], topology, slots_per_rank)
    options = {"static": {"seed": seed}, "dynamic": {"seed": seed}}.get(policy, {})
    imbalance, std, idle, capacity, gap, ideal, active = [], [], 0, 0, [], [], []
    rows = rank_rows = node_rows = once = all_copies = rank_copies = node_copies = 0
    for index in replayed:
        tokens = len(batches[index])
        source = np.repeat(np.arange(RANKS), tokens // RANKS)
        for layer in range(LAYERS):
            ids = torch.from_numpy(batches[index][:, layer].copy())
            loads = torch.stack([isoload.count(ids[source == r], EXPERTS) for r in range(RANKS)])
            if policy == "dynamic":
                options["step"] = index
            plan = isoload.plan(loads, placement, layer, policy, **options)
            slots = [isoload.route(ids[source == r], loads, plan, r) for r in range(RANKS)]
            slots = torch.cat(slots).numpy()
            if policy == "none":
                homes = placement.home_slot[layer].numpy()
                np.testing.assert_array_equal(slots, np.where(ids >= 0, homes[ids], -1))
            copies = np.array([(slots == p).sum() for p in range(RANKS * slots_per_rank)])
            per_rank = copies.reshape(RANKS, slots_per_rank)
            load = per_rank.sum(1)
            for t in range(tokens):
                for destination in (s // slots_per_rank for s in slots[t] if s >= 0):
                    all_copies += 1
                    rank_copies += destination != source[t]
                    node_copies += destination // PER_NODE != source[t] // PER_NODE
                for destination in {s // slots_per_rank for s in slots[t] if s >= 0}:
                    rows += 1
                    rank_rows += destination != source[t]
                    node_rows += destination // PER_NODE != source[t] // PER_NODE
                reached = {s // slots_per_rank // PER_NODE for s in slots[t] if s >= 0}
                once += len(reached - {source[t] // PER_NODE})
            if load.sum() == 0:
                continue
            total = loads.sum(0).numpy()
            bound = cut_optimum(total, placement.slot_to_expert[layer].numpy(), RANKS)
            imbalance.append(load.max() / load.mean())
            std.append(np.sqrt(((load - load.mean()) ** 2).mean()) / load.mean())
            idle += (load.max() - load).sum()
            capacity += RANKS * load.max()
            gap.append(load.max() / bound - 1)
            ideal.append(load.max() / int(np.ceil(load.sum() / RANKS)) - 1)
            active.append((per_rank > 0).sum(1).max())
    return {
        "imbalance": {"mean": np.mean(imbalance), "p99": np.percentile(imbalance, 99), "max": max(imbalance)},
        "rank_load_std": np.mean(std),
        "idle_share": idle / capacity,
        "gap": {"mean": np.mean(gap), "max": max(gap)},
        "ideal_gap": np.mean(ideal),
        "remote_rank_rows": rank_rows,
        "remote_node_rows": node_rows,
        "remote_rank_share": rank_rows / rows,
        "remote_node_share": node_rows / rows,
        "node_dispatch_rows": once,
        "node_dispatch_share": once / rows,
        "remote_rank_copy_share": rank_copies / all_copies,
        "remote_node_copy_share": node_copies / all_copies,
        "active_experts": np.mean(active),
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots_per_rank", [4, 6])
def test_every_figure_is_that_of_the_trace(policy, slots_per_rank):
    found = figures(trace := small_trace(), slots_per_rank=slots_per_rank, seed=5)[policy]
    expected = recomputed(trace, policy, [0, 1], [2, 3, 4], slots_per_rank, seed=5)
    shared = {"shared_remote_share", "shared_unvisited_share"}
    assert set(found) == {"policy", "plan_us", "by_batch", *shared, *expected} and not any(
        found[key] for key in shared
    )
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    for key in ("remote_rank_rows", "remote_node_rows", "node_dispatch_rows"):
        assert type(found[key]) is int and found[key] == expected[key] > 0
    assert found["plan_us"]["median"] > 0 and found["plan_us"]["batched"] > 0


def test_policies_differ_and_exact_has_no_gap():
    found = figures(small_trace(), slots_per_rank=4)
    assert found["exact"]["gap"] == {"mean": 0.0, "max": 0.0}
    assert found["none"]["gap"]["max"] > 0.2
    assert len({found[policy]["idle_share"] for policy in POLICIES}) == len(POLICIES)
    assert min(found, key=lambda policy: found[policy]["idle_share"]) == "exact"


def test_speeds_leave_one_unit_in_every_figure():
    """Ticks are compared with ticks: equal speeds change nothing, unequal ones leave exact at its bound."""
    trace = small_trace()
    placement = isoload.place(trace, isoload.Topology(4), 4)
    topologies = [isoload.Topology(4, speeds=s) for s in (None, (2.0,) * 4, (1.0, 0.5, 2.0, 0.9))]
    settings = ReplaySettings(num_ranks=4, slots_per_rank=4, policies=("none", "even", "exact"))
    plain, equal, unequal = (
        replay_json(simulate.replay(trace, settings, None, replace(placement, topology=topology)))
        for topology in topologies
    )
    assert "speeds" not in plain["settings"] and unequal["settings"]["speeds"] == [1.0, 0.5, 2.0, 0.9]
    names = ("imbalance", "gap", "idle_share", "rank_load_std")
    for one, two in zip(plain["policies"], equal["policies"], strict=True):
        for name in names:
            assert two[name] == pytest.approx(one[name], abs=1e-12), name
    none, even, exact = unequal["policies"]
    assert exact["gap"] == {"mean": 0, "max": 0} and none["gap"]["mean"] > even["gap"]["mean"] > 0
    for row in (none, even, exact):
        assert 1 <= row["imbalance"]["mean"] < 4 and 0 < row["idle_share"] < 1 and row["ideal_gap"] > 0
    assert even["imbalance"]["mean"] / exact["imbalance"]["mean"] > 1.1


def test_totals_and_settings():
    found = replay_json(replay(small_trace(), slots_per_rank=4))
    assert list(found) == ["trace", "settings", "tokens", "layers", "batches", "policies"]
    assert (found["trace"], found["tokens"], found["layers"], found["batches"]) == ("small", 20, LAYERS, 3)
    assert [row["policy"] for row in found["policies"]] == list(POLICIES)
    assert found["settings"] == {
        "num_ranks": 4,
        "ranks_per_node": 2,
        "slots_per_rank": 4,
        "spare_slots": 0,
        "shared_experts": 0,
        "max_batches": 0,
        "placer": "eplb",
        "calibrate": "first-half",
        "batch_tokens": None,
        "assign": "contiguous",
        "seed": 0,
        "times": None,
        "policies": list(POLICIES),
        "model": None,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "layer_ids": [0, 1, 2],
        "drawn": False,
        "calibration_batches": [2],
        "layers_with_freedom": LAYERS,
    }


def test_copies_that_leave_are_counted_too():
    trace = small_trace()
    row = replay(trace, policies=("none",), calibrate="all").policies[0]
    # With a replica of every expert on every rank nothing would leave; with none nearly all copies do.
    assert row.remote_rank_share <= 1 and 0.5 < row.remote_node_copy_share / row.remote_rank_copy_share < 1
    everywhere = replay(trace, policies=("static",), slots_per_rank=EXPERTS, calibrate="all").policies[0]
    assert everywhere.remote_rank_copy_share == everywhere.remote_rank_share == 0
    assert everywhere.remote_rank_rows == everywhere.remote_node_rows == 0


def test_repeats_bit_by_bit_and_the_seed_matters():
    trace, without_times = small_trace(), {"plan_us_median": 0.0, "plan_us_batched": 0.0}

    def rows(seed):
        return [replace(row, **without_times) for row in replay(trace, seed=seed, slots_per_rank=4).policies]

    first = rows(1)
    assert first == rows(1)
    changed = {a.policy for a, b in zip(first, rows(2), strict=True) if a != b}
    assert "dynamic" in changed and not changed & {"none", "even", "exact"}


# Calibration


def spy_on_placements(monkeypatch):
    made = []

    def recording(*args, **kwargs):
        made.append(isoload.place(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(simulate, "place", recording)
    return made


def clustered_trace(shift):
    """Clusters a, b, c of two batches; `shift` moves the hot experts of cluster b."""
    rng = np.random.default_rng(8)
    parts = [skewed_ids(rng, 32, s) for s in (0, shift, 5)]
    labels = ("a", "a", "b", "b", "c", "c")
    sizes = np.full(6, 16)
    return Trace("clustered", EXPERTS, topk_ids=np.concatenate(parts), tokens_per_batch=sizes, cluster=labels)


def test_a_placement_never_sees_the_cluster_it_is_judged_on(monkeypatch):
    made = spy_on_placements(monkeypatch)
    for shift in (3, 7):
        replay(clustered_trace(shift), calibrate="leave-cluster-out")
    slots = [placement.slot_to_expert for placement in made]
    assert len(slots) == 6
    assert torch.equal(slots[1], slots[4])  # placed for cluster b
    assert not torch.equal(slots[0], slots[3]) and not torch.equal(slots[2], slots[5])


@pytest.mark.parametrize(
    ("calibrate", "placements", "tokens"),
    [("first-half", 1, 48), ("all", 1, 96), ("leave-one-out", 6, 96), ("leave-cluster-out", 3, 96)],
)
def test_every_calibration(monkeypatch, calibrate, placements, tokens):
    made, done = spy_on_placements(monkeypatch), []
    settings = ReplaySettings(RANKS, calibrate=calibrate, policies=("even", "exact"))
    found = simulate.replay(clustered_trace(3), settings, lambda *step: done.append(step))
    assert len(made) == placements and found.tokens == tokens and found.batches == tokens // 16
    assert done == [(i + 1, tokens // 16) for i in range(tokens // 16)]
    assert found.policies[1].gap_max == 0


def test_all_is_what_calibrate_on_everything_means(monkeypatch):
    made = spy_on_placements(monkeypatch)
    trace = clustered_trace(3)
    replay(trace, calibrate="all", slots_per_rank=4)
    expected = isoload.place(trace.batch_counts(), isoload.Topology(RANKS, PER_NODE), 4)
    assert torch.equal(made[0].slot_to_expert, expected.slot_to_expert)


# Other traces and settings


def test_a_trace_of_counts_is_drawn_from():
    counts = np.random.default_rng(4).integers(0, 60, (4, 2, 12))
    trace = Trace("counts", 12, 2, counts=counts, provenance={"model": "some model"})
    found = replay(trace, batch_tokens=50)
    assert found.tokens == 100 and found.settings["drawn"] and found.settings["model"] == "some model"
    rows = {row.policy: row for row in found.policies}
    assert rows["exact"].gap_max == 0 and rows["none"].gap_max > 0
    assert (
        replay(trace, batch_tokens=50, policies=("none",)).policies[0].idle_share == rows["none"].idle_share
    )


def test_without_k_what_tokens_count_is_left_out():
    counts = np.random.default_rng(4).integers(1, 60, (4, 2, 12))
    found = replay(Trace("counts", 12, counts=counts))
    assert found.tokens == counts[2:].sum(2).max(1).sum()
    rows = {row.policy: row for row in found.policies}
    assert rows["exact"].gap_max == 0 and rows["none"].gap_max > 0
    assert rows["exact"].remote_rank_copy_share > 0
    shares = (rows["exact"].remote_rank_rows, rows["exact"].remote_node_rows)
    assert shares == (rows["exact"].remote_rank_share, rows["exact"].remote_node_share) == (None, None)
    for settings in ({"shared_experts": 1}, {"times": times()}):
        with pytest.raises(
            ValueError, match="top_k must be known where times or shared_experts count tokens"
        ):
            replay(Trace("counts", 12, counts=counts), **settings)


def test_one_batch_is_judged_on_itself():
    found = replay(Trace("totals", 12, 2, counts=np.random.default_rng(4).integers(1, 60, (1, 2, 12))))
    assert found.settings["calibrate"] == "all" and found.batches == 1


def test_spare_slots_stay_empty(monkeypatch):
    made = spy_on_placements(monkeypatch)
    found = replay(small_trace(), spare_slots=1)
    assert found.settings["slots_per_rank"] == 5
    assert (made[0].slot_to_expert.reshape(LAYERS, RANKS, 5)[:, :, -1] == -1).all()
    assert max(row.active_experts for row in found.policies) <= 4


def test_selected_layers_are_replayed_alone():
    trace = small_trace()
    found = replay(trace.select_layers([0, 2]), policies=("exact",))
    assert found.layers == 2 and found.settings["layer_ids"] == [0, 2]


@pytest.mark.parametrize(
    ("experts", "ranks", "spare", "expected"),
    [(32, 8, 0, 5), (256, 16, 0, 18), (256, 32, 2, 11), (4, 8, 0, 2)],
)
def test_default_slots_per_rank(experts, ranks, spare, expected):
    assert default_slots_per_rank(experts, ranks, spare) == expected


def test_a_route_that_misses_its_plan_is_caught(monkeypatch):
    def wrong(topk_ids, loads, plan, rank):
        slots = isoload.route(topk_ids, loads, plan, rank)
        if rank == 2 and plan.policy.name == "exact":
            slots[slots >= 0] = 0
        return slots

    monkeypatch.setattr(simulate, "route", wrong)
    replay(small_trace(), policies=("even", "dynamic"))
    with pytest.raises(RuntimeError, match="routed slots do not meet the quota of policy exact in layer 0"):
        replay(small_trace(), policies=("exact",))


def test_threads_are_given_back():
    before = torch.get_num_threads()
    replay(small_trace(), policies=("exact",))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policies": ("exact", "best")},
            "policy must be one of none, static, even, dynamic, exact.*got 'best'",
        ),
        ({"policies": ()}, "policies must be distinct and at least one, got none at all"),
        ({"policies": ("even", "even")}, "policies must be distinct and at least one, got even, even"),
        ({"num_ranks": 0, "ranks_per_node": 0}, "num_ranks must be an integer in 1..1024, got 0"),
        ({"ranks_per_node": 3}, "ranks_per_node must divide num_ranks=4, got 3"),
        ({"slots_per_rank": 2}, "slots_per_rank must be at least 3 for 10 experts on 4 live ranks"),
        ({"placer": "best"}, "placer must be one of trivial, eplb.*got 'best'"),
        ({"assign": "best"}, "assign must be one of contiguous, round-robin, got 'best'"),
        ({"calibrate": "best"}, "calibrate must be one of first-half, .*got 'best'"),
        ({"calibrate": "leave-cluster-out"}, "needs batches of at least 2 clusters, got no labels"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
        ({"loads": "mine"}, "loads must be one of gathered, node, own, got 'mine'"),
        ({"loads": "last"}, "loads='last' was removed: use loads='own'"),
        ({"exchange_every": 0}, "exchange_every must be at least 1, got 0"),
        (
            {"loads": "own", "policies": ("even", "dynamic")},
            "policies must have exact for loads='own', got even, dynamic",
        ),
        ({"loads": "own", "times": times()}, "times must be none for loads='own'"),
        (
            {"loads": "own", "policies": ("exact:objective=local",)},
            "policy must be exact with objective spread",
        ),
    ],
)
def test_messages(settings, message):
    with pytest.raises(ValueError, match=message):
        replay(small_trace(), **settings)


def test_a_trace_without_copies_is_refused():
    ids = np.full((8, 1, 2), -1)
    trace = Trace("empty", 4, topk_ids=ids, tokens_per_batch=np.array([4, 4]))
    with pytest.raises(ValueError, match="trace must have copies in the batches to replay, got none"):
        replay(trace)


def test_policies_take_options():
    assert parse_policy("exact:tolerance=0.01:budget=3") == ("exact", {"tolerance": 0.01, "budget": 3})
    assert parse_policy("lp:tolerance=1e-3:precision=float64") == (
        "lp",
        {"tolerance": 1e-3, "precision": "float64"},
    )
    found = replay(small_trace(), policies=("dynamic", "dynamic:seed=7", "exact:objective=local"))
    assert [row.policy for row in found.policies] == ["dynamic", "dynamic:seed=7", "exact:objective=local"]
    assert found.policies[0].imbalance_mean != found.policies[1].imbalance_mean
    for text, message in (
        ("exact:budget", "policy must be written name:option=value, got 'exact:budget'"),
        ("exact:speed=1", "option must be one of tolerance, budget, objective for policy exact, got 'speed'"),
        ("exact:budget=many", "option budget must be of type int, None, got 'many'"),
        ("exact:tolerance=low", "option tolerance must be of type float, got 'low'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_policy(text)
