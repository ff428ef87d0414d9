"""A step's timeline: the closed form where nothing overlaps, the longest path through what waits, and bounds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.metrics import count_routed
from isoload.analysis.timeline import Timeline, timeline
from isoload.times import AllToAllTime, ExpertTime, LayerTime
from isoload.times.exchanges import Curve
from isoload.transport import LocalTransport
from support.small_layer import make_setup

RANKS, LAYERS, SLOTS, TOKENS = 4, 3, 2, 64
TOPOLOGY = isoload.Topology(RANKS, 2)
EXPERTS = ExpertTime("mine", "k", "bf16", 8, 8, 5.0, 10.0, 0.5, 0.1, 2.0)
GIVEN: dict[str, Any] = {"dense_s": 70e-6, "gather_s": 9e-6, "plan_s": 4e-6}
STAGE, STREAM = Timeline.STAGES.index, Timeline.STREAMS.index


def layer_of(ranks: int = RANKS, us: float = 0.2, call_us: float = 20.0) -> LayerTime:
    def step(name: str) -> AllToAllTime:
        return AllToAllTime("mine", "k", name, ranks, 1, Curve(call_us, us, 3.0), Curve(call_us, 2 * us, 3.0))

    return LayerTime(step("dispatch"), EXPERTS, step("combine"))


LAYER = layer_of()


def skewed(seed: int = 0, ranks: int = RANKS) -> np.ndarray:
    """Every slot has copies of every source, so that a combine waits for all ranks."""
    draw = np.random.default_rng(seed)
    shares = draw.dirichlet(np.full(ranks * SLOTS, 0.7), size=LAYERS)[:, None]
    return 1 + draw.multinomial(4 * TOKENS, shares, size=(LAYERS, ranks)).astype(np.int32)


def sparse(seed: int) -> np.ndarray:
    """Few copies, so that most ranks do not visit each other."""
    draw = np.random.default_rng(seed)
    return draw.poisson(0.3, (LAYERS, RANKS, RANKS * SLOTS))


EVEN = np.full((LAYERS, RANKS, RANKS * SLOTS), 32)
WAYS = [
    {"two_batch": two, "beside": beside, "moves_s": moves, **given}
    for two, beside, moves, given in product(
        (False, True),
        (False, True),
        (0.0, np.random.default_rng(1).uniform(0, 3e-4, (LAYERS, RANKS))),
        ({}, GIVEN),
    )
]


@pytest.mark.parametrize(("end", "column"), [("low", 0), ("high", 1)])
def test_without_overlap_a_step_is_the_sum_of_its_layers(end: str, column: int) -> None:
    """Exactly, for even routing and for any other in which all ranks visit all."""
    for sent in (EVEN, skewed()):
        found = timeline(LAYER, sent, TOKENS, TOPOLOGY, end=end)
        copies = sent.sum(1).reshape(LAYERS, RANKS, SLOTS)
        layers = LAYER.seconds(copies, found.rows.sum(1), TOKENS)[:, column]
        assert found.seconds == pytest.approx(layers.sum(), rel=1e-12)
        more = timeline(LAYER, sent, TOKENS, TOPOLOGY, end=end, moves_s=11e-6, **GIVEN)
        assert more.seconds == pytest.approx(layers.sum() + LAYERS * (70 + 9 + 4 + 11) * 1e-6, rel=1e-12)


def test_without_exchanges_ranks_still_wait_for_each_other() -> None:
    sent = skewed()
    slowest = EXPERTS.seconds(
        sent.sum(1).reshape(LAYERS, RANKS, SLOTS), sent.sum(1).reshape(LAYERS, RANKS, -1).sum(-1)
    )
    rows = np.stack([sent.reshape(LAYERS, RANKS, RANKS, SLOTS).sum(-1)])[0]
    found = timeline(LayerTime(None, EXPERTS, None), sent, 10**6, TOPOLOGY, rows=rows)
    assert found.seconds == pytest.approx(slowest.max(-1).sum(), rel=1e-12)
    assert set(found.events["stage"]) == {STAGE("experts")}


def test_a_slow_rank_computes_longer() -> None:
    halved = replace(TOPOLOGY, speeds=(1.0, 1.0, 1.0, 0.5))
    plain, slow = (timeline(LAYER, EVEN, TOKENS, of) for of in (TOPOLOGY, halved))
    took = plain.events[plain.events["stage"] == STAGE("experts")]
    assert slow.seconds - plain.seconds == pytest.approx((took["end"] - took["start"])[:LAYERS].sum())


def durations(sent: np.ndarray, how: dict[str, Any]) -> dict[str, np.ndarray]:
    halves = 1 + how["two_batch"]
    copies = sent.sum(1).reshape(LAYERS, RANKS, SLOTS) / halves
    rows = timeline(LAYER, sent, TOKENS, TOPOLOGY).rows.sum(1) / halves
    busiest = np.maximum(rows.max(-1) / rows.mean(-1), 1)
    exchange = LAYER.dispatch.seconds(TOKENS / halves, busiest)[:, 1]  # type: ignore[union-attr]
    shape, found = (LAYERS, RANKS), {"experts": EXPERTS.seconds(copies, rows)}
    for name in ("dispatch", "combine"):
        found[name] = np.broadcast_to(exchange[:, None], shape)
    found["dense"] = np.broadcast_to(how.get("dense_s", 0.0) / halves, shape)
    found["gather"] = np.broadcast_to(how.get("gather_s", 0.0), shape)
    found["plan"] = np.broadcast_to(how.get("plan_s", 0.0), shape)
    found["move"] = np.broadcast_to(how["moves_s"], shape)
    return found


def longest_path(sent: np.ndarray, how: dict[str, Any]) -> float:
    """Of what waits for what, node by node: (layer, half, stage, rank)."""
    took, halves = durations(sent, how), 1 + how["two_batch"]
    visits = timeline(LAYER, sent, TOKENS, TOPOLOGY).rows > 0
    gathers = bool(np.any(how.get("gather_s", 0.0)))
    everyone = range(RANKS)
    order: dict[str, list[tuple[int, int, str]]] = {"compute": [], "exchange": [], "weights": []}
    for layer in range(LAYERS):
        for half in range(halves):
            order["compute"] += [(layer, half, "dense"), (layer, half, "plan")]
            order["exchange"] += [(layer, half, "gather")] * gathers + [(layer, half, "dispatch")]
        order["compute"] += [(layer, half, "experts") for half in range(halves)]
        order["exchange"] += [(layer, half, "combine") for half in range(halves)]
        order["weights"].append((layer, 0, "move"))
    previous = {one: before for of in order.values() for before, one in pairwise(of)}

    def needs(layer: int, half: int, stage: str, rank: int) -> list[tuple[int, int, str, int]]:
        """Beside what ran before on the same stream."""
        if stage == "dense":
            return [(layer - 1, half, "combine", rank)] if layer else []
        if stage == "gather":
            return [(layer, half, "dense", rank)]
        if stage == "plan":
            return [(layer, half, "gather" if gathers else "dense", rank)]
        if stage == "move" and how["beside"]:
            return [(layer - 1, 0, "plan", rank)] if layer else []
        if stage == "move":
            return [(layer, 0, "plan", rank)]
        if stage == "dispatch":
            own = [(layer, half, "plan", rank)]
            return own if how["beside"] or half else [*own, (layer, 0, "move", rank)]
        if stage == "experts":
            return [(layer, half, "dispatch", rank), (layer, 0, "move", rank)]
        return [(layer, half, "experts", rank)]

    def waits_for(layer: int, stage: str, rank: int) -> list[int]:
        if stage in ("gather", "dispatch"):
            return list(everyone)
        return [r for r in everyone if r == rank or (stage == "combine" and visits[layer, rank, r])]

    @cache
    def ends(layer: int, half: int, stage: str, rank: int) -> float:
        start = 0.0
        for other in waits_for(layer, stage, rank):
            before = needs(layer, half, stage, other)
            if (one := previous.get((layer, half, stage))) is not None:
                before = [*before, (*one, other)]
            start = max([start, *(ends(*node) for node in before)])
        return start + float(took[stage][layer, rank])

    return max(ends(LAYERS - 1, half, "combine", r) for half in range(halves) for r in everyone)


@pytest.mark.parametrize("how", WAYS, ids=range(len(WAYS)))
def test_a_step_is_the_longest_path_through_what_waits(how: dict[str, Any]) -> None:
    for sent in (skewed(1), sparse(2), sparse(3)):
        found = timeline(LAYER, sent, TOKENS, TOPOLOGY, **how)
        moves_end = found.events["end"][found.events["stage"] == STAGE("move")].max(initial=0.0)
        assert max(longest_path(sent, how), moves_end) == pytest.approx(found.seconds, rel=1e-12)


def check_streams(found: Timeline) -> None:
    """No stream of a rank overlaps itself, and no rank is busy for longer than the step."""
    events = found.events
    assert (events["end"] > events["start"]).all() and (events["start"] >= 0).all()
    for rank, stream in product(range(RANKS), range(len(Timeline.STREAMS))):
        mine = events[(events["rank"] == rank) & (events["stream"] == stream)]
        assert (np.diff(mine["start"]) >= 0).all()
        assert (mine["start"][1:] >= mine["end"][:-1] - 1e-15).all()
        assert (mine["end"] - mine["start"]).sum() <= found.seconds * (1 + 1e-12)


def of_stage(found: Timeline, stage: str, column: str) -> np.ndarray:
    """[LAYERS, RANKS, halves]."""
    mine = found.events[found.events["stage"] == STAGE(stage)]
    mine = mine[np.lexsort((mine["start"], mine["rank"], mine["layer"]))]
    return np.asarray(mine[column].reshape(LAYERS, RANKS, -1))


@pytest.mark.parametrize("how", WAYS, ids=range(len(WAYS)))
def test_streams_do_not_overlap_and_nothing_begins_early(how: dict[str, Any]) -> None:
    for sent in (skewed(4), sparse(5)):
        found = timeline(LAYER, sent, TOKENS, TOPOLOGY, **how)
        check_streams(found)
        dispatch, experts, combine = (
            of_stage(found, name, "start") for name in ("dispatch", "experts", "combine")
        )
        assert (dispatch == dispatch[:, :1]).all()  # of all ranks at once
        assert (experts >= of_stage(found, "dispatch", "end")).all()
        computed, visits = of_stage(found, "experts", "end"), found.rows > 0
        for layer, rank in product(range(LAYERS), range(RANKS)):
            assert (combine[layer, rank] >= computed[layer, visits[layer, rank]].max(0, initial=0.0)).all()
            assert (combine[layer, rank] >= computed[layer, rank]).all()
        if "dense_s" in how:
            assert (
                of_stage(found, "gather", "start") >= of_stage(found, "dense", "end").max(1)[:, None]
            ).all()
            assert (of_stage(found, "plan", "start") >= of_stage(found, "gather", "end")).all()
            assert (dispatch >= of_stage(found, "plan", "end").max(1)[:, None]).all()
            assert (of_stage(found, "dense", "start")[1:] >= of_stage(found, "combine", "end")[:-1]).all()


@pytest.mark.parametrize("how", WAYS, ids=range(len(WAYS)))
def test_imbalance_never_makes_a_step_shorter(how: dict[str, Any]) -> None:
    """Beside the same copies spread evenly, with weights that move as evenly."""
    for seed in range(5):
        sent = skewed(seed)
        even = np.broadcast_to(sent.mean((1, 2), keepdims=True), sent.shape)
        moves = np.broadcast_to(np.mean(how["moves_s"]), (LAYERS, RANKS))
        level = timeline(LAYER, even, 10 * TOKENS, TOPOLOGY, **{**how, "moves_s": moves})
        uneven = timeline(LAYER, sent, 10 * TOKENS, TOPOLOGY, **{**how, "moves_s": moves})
        assert level.seconds <= uneven.seconds * (1 + 1e-9)


@pytest.mark.parametrize("us", [0.01, 0.5, 5.0])
@pytest.mark.parametrize("dense_s", [0.0, 50e-6, 1e-3])
def test_two_halves_never_beat_the_longer_of_compute_and_exchange(us: float, dense_s: float) -> None:
    """Of all that every layer issues to a stream; for even layers that is layer by layer."""
    layer = layer_of(us=us)
    for sent in (EVEN, skewed(6)):
        found = timeline(layer, sent, TOKENS, TOPOLOGY, dense_s=dense_s, plan_s=4e-6, two_batch=True)
        spent = np.zeros((len(Timeline.STREAMS), RANKS))
        events = found.events
        np.add.at(spent, (events["stream"], events["rank"]), events["end"] - events["start"])
        assert found.seconds >= spent.max() * (1 - 1e-12)
        copies, rows = sent.sum(1).reshape(LAYERS, RANKS, SLOTS) / 2, found.rows.sum(1) / 2
        experts, dispatch, combine = layer.parts(copies, rows, TOKENS / 2)
        compute = 2 * (experts.max(-1) + dense_s / 2 + 4e-6)
        exchange = 2 * (dispatch + combine)[:, 1]
        if sent is EVEN:
            assert found.seconds >= np.maximum(compute, exchange).sum() * (1 - 1e-12)


def test_two_halves_pay_where_exchanges_are_long_and_cost_where_calls_are() -> None:
    large, small = layer_of(us=1.0, call_us=1.0), layer_of(us=1e-3, call_us=50.0)
    long, short = (
        [
            timeline(layer, EVEN, TOKENS, TOPOLOGY, dense_s=dense, two_batch=two).seconds
            for two in (False, True)
        ]
        for layer, dense in ((large, 300e-6), (small, 0.0))
    )
    assert long[1] < 0.8 * long[0] and short[1] > short[0]


def test_weights_beside_compute_cost_nothing_until_they_are_longer_than_it() -> None:
    plain = timeline(LAYER, EVEN, TOKENS, TOPOLOGY, **GIVEN)
    begins, planned = (of_stage(plain, *of)[:, 0, 0] for of in (("experts", "start"), ("plan", "end")))
    hidden = min(begins[0], *(begins[1:] - planned[:-1]))
    at, beyond, behind = (
        timeline(LAYER, EVEN, TOKENS, TOPOLOGY, moves_s=moves, beside=beside, **GIVEN).seconds
        for moves, beside in ((hidden, True), (hidden + 2e-6, True), (hidden, False))
    )
    assert at == pytest.approx(plain.seconds, rel=1e-12)
    assert plain.seconds + 1.9e-6 < beyond <= plain.seconds + LAYERS * 2.1e-6
    assert behind == pytest.approx(plain.seconds + LAYERS * hidden)


def test_stages_and_waiting_are_the_whole_step_where_nothing_overlaps() -> None:
    found = timeline(LAYER, skewed(7), TOKENS, TOPOLOGY, moves_s=5e-6, **GIVEN)
    stages = found.stages()
    assert list(stages) == [*Timeline.STAGES, "waiting"]
    for which in ("slowest", "mean"):
        assert sum(of[which] for of in stages.values()) == pytest.approx(found.seconds, rel=1e-12)
    assert stages["dense"]["mean"] == pytest.approx(LAYERS * 70e-6)
    assert 0 <= stages["waiting"]["slowest"] < stages["waiting"]["mean"]
    busy = timeline(LAYER, EVEN, TOKENS, TOPOLOGY, two_batch=True, **GIVEN).stages()
    assert (
        sum(of["mean"] for of in busy.values())
        > timeline(LAYER, EVEN, TOKENS, TOPOLOGY, two_batch=True, **GIVEN).seconds
    )
    assert timeline(LAYER, EVEN, TOKENS, TOPOLOGY, **GIVEN).stages()["waiting"]["mean"] == pytest.approx(
        0, abs=1e-15
    )


def test_waiting_is_what_no_event_covers() -> None:
    """Point by point: between two of any begins and ends a rank either does something or nothing."""
    how = {"moves_s": 150e-6, "beside": True, "two_batch": True, **GIVEN}  # moves outlast several stages
    found = timeline(LAYER, skewed(8), TOKENS, TOPOLOGY, **how)
    events, waiting = found.events, []
    for rank in range(RANKS):
        mine = events[events["rank"] == rank]
        points = np.unique([0.0, found.seconds, *mine["start"], *mine["end"]])
        middle = (points[1:] + points[:-1]) / 2
        covered = ((mine["start"] < middle[:, None]) & (middle[:, None] < mine["end"])).any(1)
        waiting.append(np.diff(points)[~covered].sum())
    assert found.stages()["waiting"]["mean"] == pytest.approx(np.mean(waiting)) and min(waiting) > 0


def test_borrowed_weights_take_what_they_are_given() -> None:
    """A tensor [L, R]; behind compute all wait for the rank to which most come."""
    moves = torch.zeros(LAYERS, RANKS, dtype=torch.float64)
    moves[:, 1], moves[:, 3] = 1e-5, 2e-5
    plain = timeline(LAYER, EVEN, TOKENS, TOPOLOGY)
    found = timeline(LAYER, EVEN, TOKENS, TOPOLOGY, moves_s=moves)
    assert found.seconds == pytest.approx(plain.seconds + float(moves.amax(-1).sum()), rel=1e-12)
    assert len(found.events) == len(plain.events) + int((moves > 0).sum())


def test_no_layers_take_no_time() -> None:
    found = timeline(LAYER, EVEN[:0], TOKENS, TOPOLOGY)
    assert found.seconds == 0 and found.rows.shape == (0, RANKS, RANKS)


def test_json_is_plain_and_whole() -> None:
    found = timeline(LAYER, skewed(), TOKENS, TOPOLOGY, **GIVEN)
    made = found.to_json()
    assert made["seconds"] == found.seconds and made["fields"] == [
        "rank",
        "stream",
        "layer",
        "stage",
        "start",
        "end",
    ]
    assert len(made["events"]) == len(found.events) and made["events"][0] == list(found.events[0].tolist())
    first = dict(zip(made["fields"], made["events"][0], strict=True))
    assert made["stages"][first["stage"]] == "dense" and made["streams"][first["stream"]] == "compute"
    empty = timeline(LayerTime(None, replace(EXPERTS, a_us=0.0), None), 0 * EVEN, TOKENS, TOPOLOGY)
    assert (
        empty.seconds == 0
        and len(empty.events) == 0
        and empty.stages()["waiting"] == {"slowest": 0, "mean": 0}
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_rows_are_those_that_a_transport_counts(ranks: int) -> None:
    """A layer of the same batch over virtual ranks; the exchange follows the busiest of them."""
    setup = make_setup(ranks)
    transport = LocalTransport(setup.topology)
    layer = isoload.MoE(setup.gate, setup.dense, transport, setup.placement)
    layer(setup.rows)
    loads = torch.stack(
        [isoload.count(setup.gate(rows)[0], setup.placement.num_experts) for rows in setup.rows]
    )
    made = isoload.plan(loads, setup.placement, 0)
    slots = [isoload.route(setup.gate(rows)[0], loads, made, rank) for rank, rows in enumerate(setup.rows)]
    sent = np.stack([np.bincount(of.ravel(), minlength=setup.placement.num_slots) for of in slots])
    sources = np.repeat(np.arange(ranks), [len(of) for of in slots])
    size = setup.placement.slots_per_rank
    routed = count_routed(torch.cat(slots)[None].numpy(), sources, setup.topology, size)
    found = timeline(layer_of(ranks), sent[None], 13, setup.topology, rows=routed.rank_rows)
    counted = transport.group.traffic.rows.numpy()
    assert np.array_equal(found.rows[0], counted)
    received = counted.sum(0)
    exchange = layer_of(ranks).dispatch
    assert exchange is not None
    took = found.stages()["dispatch"]["mean"]
    assert took == pytest.approx(exchange.seconds(13, max(received.max() / received.mean(), 1))[1])


def one_wrong(**changes: Any) -> Any:
    return lambda: timeline(
        **{"layer": LAYER, "sent": EVEN, "tokens": TOKENS, "topology": TOPOLOGY, **changes}
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (one_wrong(end="middle"), "end must be one of low, high, got 'middle'"),
        (one_wrong(tokens=0), "tokens must be at least 1, got 0"),
        (one_wrong(sent=EVEN[0]), r"sent must be \[layers, 4 ranks, slots of all\], got \[4, 8\]"),
        (one_wrong(sent=EVEN[:, :, :7]), r"sent must be \[layers, 4 ranks, slots of all\], got \[3, 4, 7\]"),
        (one_wrong(sent=EVEN - 33), "sent must be finite numbers from 0 on, got -1"),
        (one_wrong(layer=layer_of(8)), "layer must be of the topology's 4 ranks, got dispatch of 8"),
        (one_wrong(rows=EVEN), r"rows must be \[3, 4, 4\], got \[3, 4, 8\]"),
        (one_wrong(dense_s=-1.0), "dense_s must be finite numbers from 0 on, got -1"),
        (one_wrong(moves_s=np.zeros(3)), r"moves_s must broadcast to \[3, 4\], got \[3\]"),
    ],
)
def test_refuses(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        call()
