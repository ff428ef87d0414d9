"""EngineLayers between two forward passes: when targets are renewed, and of which layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import isoload
from isoload import Balancer, LocalGroup
from isoload.engines import layers as engine_layers
from isoload.engines.layers import EXCHANGE_EVERY, EngineLayer, EngineLayers
from isoload.engines.settings import Settings
from isoload.online.metrics import Meter, Metrics
from isoload.online.switch import AGREE_EVERY, Switch
from isoload.policies import make_policy
from support.small_batches import LAYERS, draw_ids, make_placement, make_topology
from support.told_metrics import Told


class Layers(EngineLayers[EngineLayer]):
    engine = "an engine"

    def engine_group(self) -> dist.ProcessGroup:
        raise NotImplementedError

    def engine_rank(self) -> int:
        return 0


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The layers of every exchange, in its order."""
    found: list[list[int]] = []
    stock = Balancer.exchange

    def exchange(self: Balancer, *others: Balancer) -> object:
        found.append([of.layer for of in (self, *others)])
        return stock(self, *others)

    monkeypatch.setattr(Balancer, "exchange", exchange)
    yield found


def layers_of(*loads: str, placement: isoload.Placement | None = None) -> Layers:
    """By number, put in backwards: the order of an exchange is not that in which layers were made."""
    made, group = Layers(), LocalGroup(make_topology())
    placement = make_placement() if placement is None else placement
    for i in reversed(range(len(loads))):
        made.by_id[i] = EngineLayer(Balancer(placement, i, group=group, loads=loads[i]), None)  # type: ignore[arg-type]
    return made


def test_one_exchange_of_all_layers_in_their_order_every_so_many_passes(exchanged: list[list[int]]) -> None:
    layers = layers_of(*["own"] * LAYERS)
    for passes in range(1, 2 * EXCHANGE_EVERY + 1):
        for layer in layers.by_id.values():
            layer.balancer(draw_ids(passes))
        layers.step_ended()
        assert exchanged == [[0, 1, 2]] * (passes // EXCHANGE_EVERY)
    for layer in layers.by_id.values():
        assert layer.balancer.own_counts is not None and layer.balancer.own_counts.offset.any()


def test_layers_that_gather_are_left_out(exchanged: list[list[int]]) -> None:
    for loads, want in (("own", "gathered", "own"), [[0, 2]]), (("gathered",) * 3, []):
        exchanged.clear()
        layers = layers_of(*loads)
        for _ in range(EXCHANGE_EVERY):
            layers.step_ended()
        assert exchanged == want


def test_without_redundant_experts_nothing_is_exchanged(exchanged: list[list[int]]) -> None:
    single = isoload.place(torch.ones(2, 32), make_topology())
    layers = layers_of("own", "own", placement=single)
    for _ in range(EXCHANGE_EVERY):
        layers.step_ended()
    assert not exchanged


def test_a_layer_that_loses_its_freedom_stays_in_the_exchange() -> None:
    """A rebalance may leave a layer no choice; the meter sums over exchanges of the same layers."""
    layers = layers_of("own", "own")
    layers.meter = Meter("an engine", 60)
    for passes in range(2 * EXCHANGE_EVERY):
        for layer in layers.by_id.values():
            layer.balancer(draw_ids(passes))
        layers.step_ended()
        layers.by_id[0].balancer.has_freedom = passes < EXCHANGE_EVERY
    assert [(report.layer, report.batches) for report in layers.meter.read_sent()] == [(0, 2), (1, 2)]


def test_a_model_made_anew_counts_anew(exchanged: list[list[int]]) -> None:
    layers = layers_of("own")
    for _ in range(EXCHANGE_EVERY - 1):
        layers.step_ended()
    layers.start(Settings.read({}))
    layers.step_ended()
    assert layers.passes == 1 and not exchanged


def test_what_persists_is_where_the_engine_routes_also_of_layers_that_never_run() -> None:
    """A model's dense layers have a Balancer, too, and one exchange takes all: on a GPU their counts must be there."""
    layers, placement = Layers(), make_placement()
    topology = placement.topology
    layers.place(placement.slot_to_expert, placement.num_experts, topology, torch.device("meta"))
    policy = make_policy("exact")
    assert layers.balancer(1, policy, LocalGroup(topology), "gathered").own_counts is None
    own = layers.balancer(0, policy, LocalGroup(topology), "own").own_counts
    assert own is not None and own.recent.is_meta and own.offset.is_meta


def test_exchanges_are_measured_where_reports_are_wanted() -> None:
    """By the last batch of each layer; of one in which no rank had a copy there is nothing to say."""
    layers = layers_of("own", "own", "gathered")
    layers.meter, layer = Meter("an engine", 60), layers.by_id[0].balancer
    slots = torch.cat(layer(draw_ids(0)))  # type: ignore[arg-type]
    for _ in range(EXCHANGE_EVERY):
        layers.step_ended()
    (report,) = layers.meter.read_sent()
    per_rank = (
        isoload.count(slots, layer.placement.num_slots).view(layer.placement.topology.num_ranks, -1).sum(1)
    )
    assert (report.layer, report.batches, report.before) == (0, 1, None)
    assert report.after == pytest.approx(float(per_rank.max() / per_rank.float().mean()))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], Told]:
    """By engine, model and rank."""
    found: dict[tuple[str, ...], Told] = {}

    def made(*labels: str, on: bool = False) -> Metrics:
        return found.setdefault(labels, Told()) if on else Metrics()

    monkeypatch.setattr(engine_layers, "Metrics", made)
    monkeypatch.setattr(logging.getLogger("isoload"), "filters", [])
    return found


def same_layers(number: int) -> Layers:
    """Of tokens that all ranks hold."""
    made = Layers()
    made.by_id = {i: EngineLayer(Balancer(make_placement(), i, tokens="same"), None) for i in range(number)}
    return made


def test_each_model_counts_its_passes_as_planned_or_left(told: dict[tuple[str, ...], Told]) -> None:
    """Layers that the engine has called; of 3 it has called 2. One more is the engine's own."""
    models = [same_layers(3) for _ in "ab"]
    for name, layers in zip("ab", models, strict=True):
        layers.settings = Settings.read({"ISOLOAD_REPORT_SECONDS": "3600"})
        layers.meter = Meter("an engine", 3600) if name == "b" else None  # a draft's plans are not measured
        layers.measure(name, "eplb", {}, num_left=1)
        for i in (0, 2):
            layers.by_id[i].slots(draw_ids(0)[0], None)
        layers.step_ended()
    models[1].detach()
    models[1].step_ended()
    values = {labels: of.values for labels, of in told.items()}
    assert list(values) == [("an engine", name, "0") for name in "ab"]
    first, second = values.values()
    assert (first["attached"], first["batches_total"], first["fallbacks_total"]) == (1, 2, 1)
    assert (second["attached"], second["batches_total"], second["fallbacks_total"]) == (0, 2, 4)
    assert len(first["plan_seconds"]) == 2 and first["info", "0.1.0", "unknown", "exact", "eplb"] == 1
    assert models[0].watch.metrics is told["an engine", "a", "0"]


def test_a_record_is_attached_where_reports_are_asked_for(told: dict[tuple[str, ...], Told]) -> None:
    """In shadow mode, where no layer is isoload's."""
    for given in ({"ISOLOAD_RECORD": "."}, {"ISOLOAD_REPORT_SECONDS": "3600"}):
        assert not told
        layers = Layers()
        layers.start(Settings.read({"ISOLOAD_MODE": "shadow"} | given))
        layers.measure("m", "engine", {})
    (values,) = (of.values for of in told.values())
    assert values["attached"] == 1 and values["info", "0.1.0", "unknown", "engine", "engine"] == 1


def test_the_bytes_of_replicas_are_those_of_the_slots_with_memory(told: dict[tuple[str, ...], Told]) -> None:
    """Of this rank, in layers whose sizes are known, at the start and after a rebalance."""
    tables = torch.tensor([[0, 1, 2, 3, 0, -1], [0, 1, -1, 2, 3, 0]])
    layers = Layers()
    layers.start(Settings.read({"ISOLOAD_REPORT_SECONDS": "1"}))
    layers.place(tables, 4, isoload.Topology(2), torch.device("cpu"))
    for i in range(2):
        layers.add(EngineLayer(layers.balancer(i, make_policy("exact"), None, "gathered"), None))
    layers.measure("a model", "eplb", {i: [torch.zeros(3, 5), torch.zeros(3)] for i in range(2)})
    (values,) = (of.values for of in told.values())
    assert values["replica_bytes"] == (3 - 2 + 2 - 2) * 4 * 6
    layers.refresh(torch.tensor([[0, 1, 2, 3, 0, -1], [0, 1, 3, 2, 3, 0]]))
    assert values["replica_bytes"] == 2 * 4 * 6
    bare = Layers()
    bare.start(Settings.read({"ISOLOAD_REPORT_SECONDS": "1"}))
    bare.measure("no balancer", "eplb", {0: [torch.zeros(3, 5)]})


def test_what_the_switch_leaves_falls_back(told: dict[tuple[str, ...], Told], tmp_path: Path) -> None:
    layers, said = same_layers(2), tmp_path / "said"
    layers.settings = Settings.read({"ISOLOAD_REPORT_SECONDS": "3600", "ISOLOAD_SWITCH": str(said)})
    layers.switch = Switch(str(said), torch.device("cpu"), None, "an engine")
    layers.measure("m", "engine", {})
    for i in (0, 1):
        layers.by_id[i].slots(draw_ids(0)[0], None)
    (values,) = (of.values for of in told.values())
    for word, attached, batches, fallbacks in (("on", 1, 32, 0), ("off", 0, 62, 2)):
        said.write_text(word)
        layers.switch._next = 0.0
        for _ in range(AGREE_EVERY):
            layers.step_ended()
        found = values["attached"], values["batches_total"], values["fallbacks_total"]
        assert found == (attached, batches, fallbacks)
