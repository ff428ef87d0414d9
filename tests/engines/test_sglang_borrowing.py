"""Experts that travel inside of SGLang's prefill, without SGLang: four processes on two nodes that hold tokens of their
own. Each stack's rows name their expert, so that the weights of every slot can be compared with the fill."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import isoload
from isoload.engines.settings import Settings
from isoload.engines.sglang import LAYERS, borrowing
from isoload.engines.sglang.layers import Layer
from isoload.engines.tables import fill_spare_slots, lay_out
from isoload.online.weight_check import WeightCheck
from support.documents import launch_words, launches
from support.processes import run_ranks

SGLANG_PAGE = Path(__file__).parents[2] / "docs" / "sglang-policies.md"
RANKS, PER_NODE, EXPERTS, K, NUM_LAYERS, SPARE, REDUNDANT = 4, 2, 16, 3, 2, 2, 12
SIZE = (EXPERTS + REDUNDANT) // RANKS
TOPOLOGY = isoload.Topology(RANKS, PER_NODE)
POLICY = "llep:within=node:threshold=1:min_chunk=1:refill_above=1.05"
VARIABLES = {
    "ISOLOAD_SPARE_SLOTS": str(SPARE),
    "ISOLOAD_POLICY": f"prefill={POLICY},decode=exact",
}


def metadata_of(tables: Tensor) -> Any:
    """SGLang's record of expert locations, as much of it as is read or written."""
    slots = tables.shape[1]
    record = SimpleNamespace(
        physical_to_logical_map=tables.clone(), physical_to_logical_map_cpu=tables.clone(),
        logical_to_all_physical_map=torch.full((len(tables), EXPERTS, slots), -1),
        logical_to_all_physical_map_cpu=torch.full((len(tables), EXPERTS, slots), -1),
        logical_to_all_physical_map_num_valid=torch.zeros(len(tables), EXPERTS, dtype=torch.int64),
        ep_size=RANKS, num_layers=len(tables), num_logical_experts=EXPERTS, num_physical_experts=slots,
    )  # fmt: skip
    borrowing.write_maps(record, range(len(tables)), tables)
    return record


def skewed_counts(seed: int) -> Tensor:
    return torch.rand(NUM_LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed)).pow(4) * 1000 + 1


def maps(seed: int) -> Tensor:
    """[L, P] as a rebalance lays experts out."""
    table = lay_out(skewed_counts(seed), TOPOLOGY, SIZE, "eplb", None, spare_slots=SPARE)
    return table.physical_to_logical


def module_of(parts: dict[str, Tensor]) -> Any:
    return SimpleNamespace(named_parameters=lambda: parts.items())


class Engine:
    """One rank's process: layers as the plug-in makes them, stacks whose rows name expert and version."""

    def __init__(self, rank: int, same: bool) -> None:
        self.rank, self.version = rank, 0
        LAYERS.start(Settings.read(VARIABLES))
        LAYERS.engine_group = lambda: dist.group.WORLD  # type: ignore[method-assign]
        LAYERS.engine_rank = LAYERS.own_rank = lambda: rank  # type: ignore[method-assign]
        self.metadata = metadata_of(maps(0))
        LAYERS.place(self.metadata.physical_to_logical_map_cpu, EXPERTS, TOPOLOGY, torch.device("cpu"))
        group = None if same else isoload.CollectiveGroup.own(TOPOLOGY)
        policies = LAYERS.settings.policies_for(shared=False)
        for i in range(NUM_LAYERS):
            layer = Layer(LAYERS.balancer(i, policies["decode"], group, "gathered"), None)
            layer.plan_by(policies)
            LAYERS.add(layer)
        borrowing.begin()
        self.stacks = {
            i: [torch.zeros(SIZE, 3), torch.zeros(SIZE, dtype=torch.float64)] for i in LAYERS.by_id
        }
        self.write(self.metadata.physical_to_logical_map_cpu)
        parameters = {
            i: dict(zip(("w13_weight", "w2_weight"), self.stacks[i], strict=True)) for i in self.stacks
        }
        borrowing.topology_of = lambda _: TOPOLOGY
        borrowing.bind(self.metadata, self.stacks, {i: module_of(parts) for i, parts in parameters.items()})

    def row(self, layer: int, expert: int) -> float:
        return 10000 * self.version + 100 * layer + expert

    def write(self, tables: Tensor) -> None:
        """The weights of these experts, in all slots of this rank but those of -1."""
        for i, stacks in self.stacks.items():
            for place, expert in enumerate(tables[i, self.rank * SIZE : (self.rank + 1) * SIZE].tolist()):
                for stack in stacks if expert >= 0 else ():
                    stack[place] = self.row(i, expert)

    def holds(self, layer: int) -> list[int]:
        """The expert of each slot by its weights; -2: those of another version."""
        base = self.row(layer, 0)
        rows = [[round(float(row)) for row in stack.view(SIZE, -1)[:, 0]] for stack in self.stacks[layer]]
        assert rows[0] == rows[1], "the parts of an expert travel together"
        return [row - int(base) if 0 <= row - base < EXPERTS else -2 for row in rows[0]]

    def rebalance(self, seed: int) -> None:
        """SGLang's, of all layers: each slot is filled from where the old map lists its expert."""
        new, old = metadata_of(maps(seed)), self.metadata
        table = new.physical_to_logical_map_cpu

        def move(**kwargs: Any) -> None:
            listed = kwargs["old_expert_location_metadata"].physical_to_logical_map_cpu
            true = [[None] * RANKS for _ in self.stacks]
            for i in self.stacks:
                dist.all_gather_object(true[i], self.holds(i))
                sources = [expert for of_rank in true[i] for expert in of_rank]  # type: ignore[union-attr]
                wrong = [p for p, e in enumerate(listed[i].tolist()) if e >= 0 and sources[p] != e]
                assert not wrong, f"slots {wrong} hold other experts than the updater reads there"
            changed = torch.where(listed == table, -1, table)
            self.write(changed)

        layers = list(range(NUM_LAYERS))
        borrowing.update_expert_weights(move, old_expert_location_metadata=old, update_layer_ids=layers)
        borrowing.write_maps(old, range(NUM_LAYERS), table)
        LAYERS.refresh(old.physical_to_logical_map_cpu)
        borrowing.moved(old, range(NUM_LAYERS))

    def update(self) -> None:
        """A weight update: every expert is written to the slots that SGLang's own list has."""
        self.version += 1

        def load(_: object) -> None:  # of SGLang's WeightUpdater
            for i in range(NUM_LAYERS):
                listed = torch.full((NUM_LAYERS, RANKS * SIZE), -1)
                for expert, slots in enumerate(self.metadata.logical_to_all_physical_map_cpu[i].tolist()):
                    listed[i, [p for p in slots if p >= 0]] = expert
                self.write(listed)

        borrowing.update_weights(load, None)


def drawn(rank: int, batch: int, same: bool) -> Tensor:
    """[T, K] of a rank; in some batches it has none."""
    seed = 1000 * batch + (0 if same else rank)
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(batch)).pow(5) + 1e-3
    tokens = 0 if (batch + rank) % 5 == 0 and not same else int(torch.randint(1, 90, (), generator=generator))
    ids = torch.empty(0, K, dtype=torch.int32)
    return torch.multinomial(popularity.expand(tokens, -1), K, generator=generator).int() if tokens else ids


def serve(rank: int, same: bool, batches: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    engine, log = Engine(rank, same), []
    chosen = random.Random(5)
    check = WeightCheck("SGLang", engine.stacks, dist.group.WORLD, strict=True, detach=str)
    check.loaded(LAYERS.tables, EXPERTS)
    for batch in range(batches):
        LAYERS.phase = chosen.choice(("prefill", "prefill", "decode"))
        refill = chosen.choice((1.0, 1.05, 1.2, 3.0))
        for i, layer in LAYERS.by_id.items():
            policy = isoload.POLICIES["llep"](within="node", threshold=1.0, min_chunk=1, refill_above=refill)
            layer.policies = {"prefill": policy, "decode": isoload.POLICIES["exact"]()}
            before, present = layer.spare.counts.tolist()[:5], layer.spare.filled.slot_to_expert.clone()
            ids = drawn(rank, batch, same)
            slots = layer.solve(ids)
            borrowing.wait_for_experts(lambda *_: None, SimpleNamespace(layer_id=i), None)
            table = layer.spare.filled.slot_to_expert
            assert torch.equal(table[slots.long()], ids), "every copy is in a slot of its expert"
            own = table[rank * SIZE : (rank + 1) * SIZE].tolist()
            assert all(e in (-1, w) for e, w in zip(own, engine.holds(i), strict=True)), (
                own,
                engine.holds(i),
            )
            homes = borrowing.home_slots(i, slots)
            assert torch.equal(LAYERS.tables[i][homes.long()].int(), ids), (
                "as SGLang's recorder reads its map"
            )
            assert not (homes % SIZE >= SIZE - SPARE).any()
            counts = [now - then for now, then in zip(layer.spare.counts.tolist()[:5], before, strict=True)]
            log.append({
                "layer": i, "phase": LAYERS.phase, "refill": refill, "loads": layer.balancer.last_loads.sum(0).int(),
                "peak": int(layer.balancer.last_plan.peak), "counts": counts, "present": present,
                "table": table.clone(), "sent": torch.bincount(slots.flatten().long(), minlength=RANKS * SIZE),
            })  # fmt: skip
        if not engine.version:
            check.moved(LAYERS.present())
        if batch % 13 == 7:
            engine.rebalance(batch)
        elif batch % 13 == 11:
            engine.update()
            for layer in LAYERS.by_id.values():
                assert (layer.spare.filled.slot_to_expert.view(RANKS, SIZE)[:, -SPARE:] == -1).all()
    return log


@pytest.fixture(scope="module", params=[False, True], ids=["own tokens", "same tokens"])
def served(request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    """By rank what happened in each layer and batch; inside, weights were compared with fills."""
    result: list[list[dict[str, Any]]] = run_ranks(serve, RANKS, request.param, 40, timeout=120.0)
    return result


def test_ranks_agree_on_loads_fills_and_moves(served: list[list[dict[str, Any]]]) -> None:
    first = served[0]
    for other in served[1:]:
        for a, b in zip(first, other, strict=True):
            for name in ("layer", "phase", "peak", "counts"):
                assert a[name] == b[name]
            assert torch.equal(a["loads"], b["loads"]) and torch.equal(a["table"], b["table"])
    moves = [row["counts"][1] for row in first]
    assert sum(n > 0 for n in moves) > 10 and sum(n == 0 for n in moves) > 20


def exact_peak(loads: Tensor, table: Tensor) -> int:
    """Of all slots that hold an expert, none of them spare."""
    placed = isoload.Placement(table.view(1, -1), TOPOLOGY, EXPERTS)
    return int(isoload.plan(loads, placed, 0).peak)


def replayed(row: dict[str, Any]) -> tuple[Tensor, int]:
    """The fill and the peak of a batch from its loads and the last fill, in plain loops."""
    table, loads = row["present"].clone(), row["loads"]
    before = exact_peak(loads, table)
    if row["phase"] == "decode" or before * RANKS <= int(loads.sum()) * row["refill"]:
        return table, before
    homes = table.view(RANKS, SIZE).clone()
    homes[:, -SPARE:] = -1
    placed = isoload.Placement(homes.view(1, -1), TOPOLOGY, EXPERTS, spare_slots=SPARE)
    filled = isoload.plan(
        loads, placed, 0, POLICY.partition(":")[0], within="node", threshold=1.0, min_chunk=1
    )
    wanted = filled.slot_to_expert.view(RANKS, SIZE)
    for rank in range(RANKS):
        places = [rank * SIZE + SIZE - SPARE + i for i in range(SPARE)]
        wants = [e for e in wanted[rank, -SPARE:].tolist() if e >= 0]
        arriving = [e for e in wants if e not in table[places].tolist()]
        empty = [p for p in places if table[p] < 0]
        free = [p for p in places if table[p] >= 0 and int(table[p]) not in wants]
        for place, expert in zip([*empty, *free], arriving, strict=False):
            table[place] = expert
    after = exact_peak(loads, table)
    return (table, after) if after < before else (row["present"], before)


def test_a_replay_of_the_loads_has_the_same_fills_moves_and_peaks(served: list[list[dict[str, Any]]]) -> None:
    for row in served[0]:
        table, peak = replayed(row)
        assert torch.equal(row["table"], table) and row["peak"] == peak
        moves = int((table != row["present"]).sum())
        assert row["counts"][1] == moves and row["counts"][0] == (moves > 0)


def test_slots_get_the_copies_of_a_plan_whose_peak_is_the_least(served: list[list[dict[str, Any]]]) -> None:
    for rows in zip(*served, strict=True):
        sent = torch.stack([row["sent"] for row in rows])
        total = sent[0] if int(sent[0].sum()) == int(rows[0]["loads"].sum()) else sent.sum(0)
        assert int(total.view(RANKS, SIZE).sum(1).max()) == rows[0]["peak"]


OPTIONS = SimpleNamespace(
    moe_a2a_backend="none", ep_num_redundant_experts=8, eplb_algorithm="isoload", enable_eplb=True,
    elastic_ep_backend=None, deepep_mode="auto", expert_distribution_recorder_mode="stat",
    enable_waterfill=False, init_expert_location="trivial",
)  # fmt: skip
DEEPEP = {"moe_a2a_backend": "deepep", "deepep_mode": "normal"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    LAYERS.start(Settings.read(VARIABLES))
    monkeypatch.setattr(LAYERS, "own_rank", lambda: 0)
    monkeypatch.setattr(borrowing, "topology_of", lambda _: TOPOLOGY)


def check(
    algorithm: str | None = "dynamic", overlap: bool = False, dwdp_size: int = 1, **changed: Any
) -> None:
    options = SimpleNamespace(**(vars(OPTIONS) | changed))
    others = SimpleNamespace(enable_two_batch_overlap=overlap), SimpleNamespace(dwdp_size=dwdp_size)
    borrowing.check_options(algorithm, RANKS, options, *others)


def test_options_with_which_experts_travel(started: None) -> None:
    check()
    check("lp", **DEEPEP)
    check(eplb_algorithm="auto", enable_eplb=False, expert_distribution_recorder_mode=None)


def test_the_documented_launch_is_accepted() -> None:
    (line,) = (of for of in launches(SGLANG_PAGE, "sglang.launch_server") if "ISOLOAD_SPARE_SLOTS" in of)
    variables = dict(word.split("=", 1) for word in launch_words(line) if word.startswith("ISOLOAD_"))
    settings = Settings.read(variables)
    assert settings.spare_slots == 1 and settings.policies_for(shared=False)["prefill"].refill_above == 1.1


UNFIT = {
    "--enable-two-batch-overlap": {"overlap": True},
    "--moe-a2a-backend": {"moe_a2a_backend": "megamoe"},
    "--dwdp-size": {"dwdp_size": 4},
    "--elastic-ep-backend": {"elastic_ep_backend": "mooncake"},
    "--enable-waterfill": {"enable_waterfill": True},
    "--enable-deepep-waterfill": {"enable_deepep_waterfill": True},
}


@pytest.mark.parametrize("option", UNFIT)
def test_options_that_use_the_weights_in_other_ways(started: None, option: str) -> None:
    (value,) = UNFIT[option].values()
    rule = f"{option} must be left out with ISOLOAD_SPARE_SLOTS, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        check(**UNFIT[option])


REFUSED = [
    (
        {"algorithm": "static"},
        "with --ep-dispatch-algorithm dynamic and --moe-a2a-backend none, got 'static'",
    ),
    (DEEPEP, "with --ep-dispatch-algorithm lp and --moe-a2a-backend deepep, got 'dynamic'"),
    (
        {"ep_num_redundant_experts": 10},
        "with --ep-num-redundant-experts 12, a multiple of 4 ranks with at least 2 of each rank, got 10",
    ),
    ({"ep_num_redundant_experts": 4}, "with --ep-num-redundant-experts 8, a multiple of 4 ranks with at least 2"),
    (
        {"eplb_algorithm": "auto"},
        "with --eplb-algorithm isoload, because other placers put experts in spare slots alone, got 'auto'",
    ),
    (
        {"expert_distribution_recorder_mode": "stat_approx"},
        "with --expert-distribution-recorder-mode stat and --deepep-mode normal, which record copies where they are "
        "routed, got 'stat_approx' and 'auto'",
    ),
    ({"algorithm": "lp", **DEEPEP, "deepep_mode": "low_latency"}, "with --expert-distribution-recorder-mode stat"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "rule"), REFUSED)
def test_options_with_which_experts_cannot_travel(started: None, changed: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ISOLOAD_SPARE_SLOTS must come {rule}")):
        check(**changed)


@pytest.mark.parametrize("lost", ["ISOLOAD_SPARE_SLOTS", "dynamic", "--eplb-algorithm isoload"])
def test_an_sglang_of_other_functions_is_refused(started: None, lost: str) -> None:
    LAYERS.lost = frozenset({lost})
    with pytest.raises(ValueError, match="ISOLOAD_SPARE_SLOTS must come with"):
        check()


def test_a_trivial_start_gives_every_expert_a_slot_that_is_not_spare(
    started: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trivial = (torch.arange(RANKS * SIZE) % EXPERTS).expand(NUM_LAYERS, -1)
    record = metadata_of(trivial)
    monkeypatch.setattr(borrowing, "moe", lambda: OPTIONS)
    borrowing.check_layout(record)
    for table in (record.physical_to_logical_map, record.physical_to_logical_map_cpu):
        for row in table.view(NUM_LAYERS, RANKS, SIZE):
            assert set(row[:, :-SPARE].flatten().tolist()) == set(range(EXPERTS))
            assert all(len(set(of_rank)) == SIZE for of_rank in row.tolist()), "no expert twice on a rank"
    lists = record.logical_to_all_physical_map_cpu
    assert (record.logical_to_all_physical_map_num_valid == (lists >= 0).sum(-1)).all()
    for layer in range(NUM_LAYERS):
        for expert in range(EXPERTS):
            slots = (record.physical_to_logical_map_cpu[layer] == expert).nonzero().flatten().tolist()
            assert [p for p in lists[layer, expert].tolist() if p >= 0] == slots, (
                "weights are loaded into all"
            )
    borrowing.hide(record, range(NUM_LAYERS))
    assert not ((lists >= 0) & (lists % SIZE >= SIZE - SPARE)).any(), "later SGLang finds no spare slot"
    assert (record.logical_to_all_physical_map_num_valid >= 1).all()
    before = record.physical_to_logical_map_cpu.clone()
    borrowing.check_layout(record)
    assert torch.equal(before, record.physical_to_logical_map_cpu), "a layout that fits stays"


def test_a_file_with_an_expert_in_spare_slots_alone_is_refused(
    started: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        borrowing, "moe", lambda: SimpleNamespace(**vars(OPTIONS) | {"init_expert_location": "f"})
    )
    table = maps(0)
    borrowing.check_layout(metadata_of(table))
    table.view(NUM_LAYERS, RANKS, SIZE)[1, :, :-SPARE][
        table.view(NUM_LAYERS, RANKS, SIZE)[1, :, :-SPARE] == 3
    ] = 4
    with pytest.raises(
        ValueError, match="has expert 3 of layer 1 in spare slots alone, the last 2 of each rank"
    ):
        borrowing.check_layout(metadata_of(table))


def test_rebalances_fill_spare_slots_by_the_counts() -> None:
    counts = skewed_counts(3)
    table = maps(3).view(NUM_LAYERS, RANKS, SIZE)
    homes = table.clone()
    homes[:, :, -SPARE:] = -1
    for layer in range(NUM_LAYERS):
        flat, rest = table[layer].flatten().int(), homes[layer].flatten().int()
        loads = counts[layer].round().int()
        assert exact_peak(loads, flat) <= exact_peak(loads, rest)
        assert all(len(set(of_rank)) == SIZE for of_rank in table[layer].tolist())
    placed = isoload.Placement(homes.flatten(1).int(), TOPOLOGY, EXPERTS, spare_slots=SPARE)
    assert torch.equal(fill_spare_slots(placed, counts * 1e9), fill_spare_slots(placed, counts * 1e9))


WHOLE = {"w13_weight": (SIZE, 4, 3), "w2_weight": (SIZE, 3, 2), "w13_weight_bias": (SIZE, 4)}


def parameters(*without: str) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in WHOLE.items() if name not in without}


def test_stacks_of_whole_experts() -> None:
    whole = parameters()
    borrowing.check_stacks(1, list(whole.values()), whole, SIZE)
    packed = {
        "w13_qweight": torch.zeros(SIZE, 2),
        "w2_qweight": torch.zeros(SIZE, 2),
        "w2_scales": torch.zeros(SIZE),
    }
    borrowing.check_stacks(1, list(packed.values()), packed, SIZE)


@pytest.mark.parametrize("part", ["w13", "w2"])
def test_experts_whose_weights_sglang_does_not_move_are_refused(part: str) -> None:
    """gpt-oss in MXFP4 with Triton kernels: SGLang keeps the biases and the scales and deletes the weights."""
    left = parameters(f"{part}_weight") | {f"{part}_weight_scale": torch.zeros(SIZE, 4, 1)}
    with pytest.raises(
        ValueError, match=f"layer 1: SGLang moves .*w13_weight_bias.* and not its {part} weights, as"
    ):
        borrowing.check_whole(1, list(left.values()), left)
    whole = parameters()
    listed = [tensor for name, tensor in whole.items() if name != f"{part}_weight"]
    with pytest.raises(ValueError, match=f"and not its {part} weights"):
        borrowing.check_stacks(1, listed, whole, SIZE)


@pytest.mark.parametrize(
    ("stack", "got"),
    [
        (torch.zeros(SIZE + 1, 2), rf"got \[{SIZE + 1}, 2\], contiguous"),
        (torch.zeros(2, SIZE).t(), rf"got \[{SIZE}, 2\], not contiguous"),
    ],
)
def test_stacks_of_other_slots_or_strides_are_refused(stack: Tensor, got: str) -> None:
    whole = parameters() | {"w2_weight": stack}
    with pytest.raises(ValueError, match=f"layer 1: ISOLOAD_SPARE_SLOTS must come with contiguous .*, {got}"):
        borrowing.check_stacks(1, list(whole.values()), whole, SIZE)


def one_layer() -> Any:
    LAYERS.place(maps(0), EXPERTS, TOPOLOGY, torch.device("cpu"))
    policies = LAYERS.settings.policies_for(shared=False)
    layer = Layer(LAYERS.balancer(0, policies["decode"], None, "gathered"), None)
    layer.plan_by(policies)
    LAYERS.add(layer)
    borrowing.begin()
    return layer


def test_a_graph_of_prefill_is_refused(started: None) -> None:
    layer = one_layer()
    LAYERS.phase, LAYERS.in_prefill_graph = "prefill", lambda: True
    with pytest.raises(
        RuntimeError, match="must come without graphs of prefill, .*: pass --disable-prefill-cuda-g"
    ):
        layer.solve(drawn(0, 1, True))


def test_experts_that_are_computed_without_a_wait_are_an_error(started: None) -> None:
    layer = one_layer()
    layer.solve(drawn(0, 1, True))
    layer.spare._finish = lambda: None
    with pytest.raises(
        RuntimeError, match="layer 0: the experts of the last batch were computed without a wait"
    ):
        layer.solve(drawn(0, 2, True))


def test_a_fill_stays_in_its_memory(started: None) -> None:
    """Captured graphs of decode read it."""
    layer = one_layer()
    spare = layer.spare
    addresses = [spare.filled.slot_to_expert.data_ptr(), spare.filled.tables.data.data_ptr()]
    spare.drop()
    assert (spare.filled.slot_to_expert.view(RANKS, SIZE)[:, -SPARE:] == -1).all()
    assert addresses == [spare.filled.slot_to_expert.data_ptr(), spare.filled.tables.data.data_ptr()]
    ids = drawn(0, 1, True)
    assert torch.equal(spare.filled.slot_to_expert[layer.solve(ids).long()], ids)


def test_an_update_that_replaces_memory_ends_the_travel(
    started: None, caplog: pytest.LogCaptureFixture
) -> None:
    layer, parts = one_layer(), parameters()
    layer.spare.stacks, layer.spare.backend = list(parts.values()), None
    layer.spare.module = module_of(parts)
    borrowing.stop_where_replaced()
    assert layer.spare.stacks is not None and not caplog.messages
    layer.spare.module = module_of(parts | {"w2_weight": parts["w2_weight"].clone()})
    borrowing.stop_where_replaced()
    assert layer.spare.stacks is None
    (line,) = caplog.messages
    assert (
        "a weight update has replaced the memory of experts in layers [0]: no expert travels from now on"
        in line
    )


def test_weights_move_to_memory_that_peers_read() -> None:
    parts = {name: torch.nn.Parameter(torch.rand(tensor.shape)) for name, tensor in parameters().items()}
    stacks, before = (
        [part.data for part in parts.values()],
        [part.detach().clone() for part in parts.values()],
    )
    backend: Any = SimpleNamespace(new_stack=lambda like, rows: like.new_zeros(rows, *like.shape[1:]))
    addresses = [stack.data_ptr() for stack in stacks]
    borrowing.rehome(backend, stacks, parts)
    for part, stack, value, address in zip(parts.values(), stacks, before, addresses, strict=True):
        assert part.data_ptr() == stack.data_ptr() != address and torch.equal(part.data, value)
    rule = r"must come with expert weights that are parameters, got a tensor \[2\]: unset ISOLOAD_SPARE_SLOTS"
    with pytest.raises(ValueError, match=rule):
        borrowing.rehome(backend, [torch.zeros(2)], parts)


def test_gpus_that_read_no_memory_of_each_other_are_refused(
    started: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = SimpleNamespace(reads_peers=False, why="pull cannot be used: no NVLink")
    for name, value in {
        "get_process_group_ranks": lambda _: [0, 1, 2, 3],
        "get_backend": lambda _: "nccl",
    }.items():
        monkeypatch.setattr(dist, name, value)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: None)
    monkeypatch.setattr(borrowing, "CollectiveGroup", lambda *_: None)
    monkeypatch.setattr(borrowing, "make_backend", lambda *_: why)
    monkeypatch.setattr(LAYERS, "engine_group", lambda: None)
    LAYERS.device = torch.device("cuda")
    with pytest.raises(
        ValueError, match="GPUs that read each other's memory within a node, got pull cannot be used"
    ):
        borrowing.node_backend(TOPOLOGY)


def test_a_report_has_what_travelled_since_the_last_one(
    started: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = one_layer()
    layer.spare.stacks = list(parameters().values())
    told: dict[tuple[str, ...], float] = {}
    monkeypatch.setattr(LAYERS, "engine_rank", lambda: 0)
    monkeypatch.setattr(LAYERS.metrics, "add", lambda name, value: told.update({(name,): value}))
    monkeypatch.setattr(
        LAYERS.metrics, "set_imbalance", lambda phase, plan, layers: told.update({(phase, plan): layers[0]})
    )
    layer.spare.counts += torch.tensor([2, 3, 150, 110, 100, 1])
    with caplog.at_level("INFO", "isoload"):
        borrowing.report()
    assert told == {
        ("fills_total",): 2, ("experts_travelled_total",): 1, ("bytes_travelled_total",): 4 * (12 + 6 + 4),
        ("prefill", "last_fill"): 1.5, ("prefill", "filled"): 1.1,
    }  # fmt: skip
    assert caplog.messages == [
        "isoload SGLang: spare slots of 1 layers were filled 2 times by 3 experts; imbalance of prefill 1.500 over the "
        "last fill, 1.100 filled"
    ]
    borrowing.report()
    assert len(caplog.messages) == 1, "nothing since"


@pytest.mark.slow
@pytest.mark.parametrize("same", [False, True], ids=["own tokens", "same tokens"])
def test_200_batches_with_drawn_thresholds(same: bool) -> None:
    logs = run_ranks(serve, RANKS, same, 200, timeout=300.0)
    assert len(logs[0]) == 200 * NUM_LAYERS
    test_ranks_agree_on_loads_fills_and_moves(logs)
    test_a_replay_of_the_loads_has_the_same_fills_moves_and_peaks(logs)
    test_slots_get_the_copies_of_a_plan_whose_peak_is_the_least(logs)
