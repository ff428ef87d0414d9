"""isoload replay --loads: what exact gives where not all ranks' loads are gathered, against the ops."""

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis import simulate
from isoload.analysis.simulate import ReplaySettings
from isoload.balancing.targets import offsets
from isoload.cli.replay import replay_header, replay_warnings
from isoload.ops.tables import ReplicaTables
from isoload.traces import Trace

LAYERS, EXPERTS, TOP_K, RANKS, PER_NODE = 3, 10, 3, 4, 2


def replay(trace, **settings):
    return simulate.replay(trace, ReplaySettings(num_ranks=RANKS, ranks_per_node=PER_NODE, **settings))


def long_trace():
    """Twelve batches of 64 tokens."""
    rng = np.random.default_rng(5)
    keys = rng.gumbel(size=(768, LAYERS, EXPERTS)) - np.log(np.arange(1, EXPERTS + 1))
    ids = np.argsort(-keys, axis=-1)[..., :TOP_K].astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    return Trace("long", EXPERTS, topk_ids=ids, tokens_per_batch=np.full(12, 64))


def test_loads_are_those_that_a_rank_has_and_exchanges_in_time():
    """Peaks against the ops, batch by batch: what an exchange brings counts from the next batch on."""
    trace, every = long_trace(), 4
    found = replay(trace, calibrate="all", loads="own", exchange_every=every, policies=("dynamic", "exact"))
    topology = isoload.Topology(RANKS, PER_NODE)
    counts = trace.batch_counts()
    placement = isoload.place(counts, topology, found.settings["slots_per_rank"])
    peaks, bounds = [], []
    for layer in range(LAYERS):
        tables = placement.layer(layer, "cpu").tables
        slots = placement.layers("cpu").slot_to_expert[layer : layer + 1]
        recent = torch.zeros(1, RANKS, EXPERTS, dtype=torch.int64)
        offset = torch.zeros(RANKS, RANKS, dtype=torch.int32)
        for batch, ids in enumerate(np.split(trace.topk_ids, 12)):
            by_rank = torch.from_numpy(ids[:, layer].reshape(RANKS, -1))
            given = torch.stack([isoload.count(row[:, None].int(), EXPERTS) for row in by_rank])
            sent = 0
            for s in range(RANKS):
                how = {"layer": layer, "recent": recent[0, s]}
                sent = sent + isoload.ops.plan_own(given[s], tables, offset[s], s, **how)
            peaks.append(int(sent.view(RANKS, -1).sum(1).max()))
            bounds.append(int(isoload.ops.plan_exact(given, tables).bound))
            if batch % every == every - 1:
                at = (ReplicaTables(tables.data[None], RANKS, EXPERTS, tables.num_slots), slots, topology)
                offset = torch.cat([offsets(recent, given.sum(1)[None], s, *at) for s in range(RANKS)])
    assert found.policies[1].gap_mean == pytest.approx(np.mean(np.array(peaks) / bounds) - 1)
    assert found.settings["exchanges"] == 2 and found.settings["loads"] == "own"
    plain = replay(trace, calibrate="all", policies=("dynamic", "exact"))
    assert plain.policies[1].gap_mean == 0 < found.policies[1].gap_mean < found.policies[0].gap_mean
    assert not {"loads", "exchange_every"} & set(plain.settings)


def test_a_replay_says_by_which_loads_and_when_nothing_was_exchanged():
    found = replay(long_trace(), calibrate="all", loads="node", policies=("exact",))
    assert replay_header(found)[-1] == "exact by loads node, exchanged every 16 batches"
    assert "Nothing was exchanged" in replay_warnings(found)[0]
    again = replay(long_trace(), calibrate="all", loads="node", exchange_every=3, policies=("exact",))
    assert not replay_warnings(again) and again.policies[0].gap_mean < 0.2
