"""Real vLLM engines over two CPU processes that start from a placement file (ISOLOAD_PLACEMENT), of a model with a
dense first layer: tensor parallel with synchronous EPLB, where vLLM itself chooses replicas, and data parallel with
asynchronous EPLB, where isoload does. Hugging Face's model of the same checkpoint is the oracle."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint import PROMPTS, make_qwen3_moe
from engine_runs import Batch, EngineRun, refused_vllm, run_vllm, run_vllm_pair
from transformers import Qwen3MoeForCausalLM
from vllm.distributed import parallel_state
from vllm_cpu import map_and_record

import isoload
from isoload.engines.settings import Settings
from isoload.engines.tables import replica_lists
from isoload.engines.vllm import placement as vllm_placement
from isoload.placement.placement import Placement
from isoload.traces import Identity, Trace
from support.sweeps import slow

CALM, TOKENS = 200, 240  # passes before the first rebalance, tokens of a request
EPLB = {"num_redundant_experts": 4, "window_size": 4, "step_interval": 8, "communicator": "torch_gloo"}
OPTIONS = {"enable_eplb": True, "max_model_len": 512, "max_tokens": TOKENS}
RANKS, SLOTS, EXPERTS, K = 2, 10, 16, 4
MOE_LAYERS = (1, 2, 3)
DEFAULT = [*range(EXPERTS), 0, 1, 2, 3]
"""vLLM's own map of every layer."""


class Oracle(NamedTuple):
    """A checkpoint, Hugging Face's greedy tokens, and a placement of what its router chose for them."""

    folder: Path
    tokens: list[list[int]]
    placement: Placement
    file: Path


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("tiny-moe", numbered=False)
    tokens = make_qwen3_moe(folder, head_dim=32, num_dense=1, tokens=TOKENS)
    model = Qwen3MoeForCausalLM.from_pretrained(folder)
    counts = torch.zeros(len(MOE_LAYERS), EXPERTS, dtype=torch.int64)
    for prompt, made in zip(PROMPTS, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + made]), output_router_logits=True).router_logits
        for row, of in enumerate(logits):
            counts[row] += torch.bincount(of.topk(K, dim=-1).indices.flatten(), minlength=EXPERTS)
    identity = Identity("model", MOE_LAYERS, folder.name)
    trace = Trace("tiny", EXPERTS, counts=counts.numpy()[None], layer_ids=MOE_LAYERS, identity=identity)
    placement = isoload.place(trace, isoload.Topology(RANKS), SLOTS, "scenario")
    file = folder.parent / f"{folder.name}.json"
    isoload.write_placement(placement, file)
    rows = placement.slot_to_expert.tolist()
    assert DEFAULT not in rows and len({tuple(row) for row in rows}) == len(rows), (
        "each layer has a map of its own"
    )
    return Oracle(folder, tokens, placement, file)


@pytest.fixture(scope="module")
def started(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Tensor parallel, synchronous; vLLM itself chooses replicas and rebalances."""
    variables = {"ISOLOAD_PLACEMENT": str(oracle.file), "ENGINE_CALM": str(CALM)}
    options = OPTIONS | {"eplb_config": EPLB | {"use_async": False}}
    return run_vllm(oracle.folder, tmp_path_factory.mktemp("runs") / "start", variables, **options)


@pytest.fixture(scope="module")
def pair(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> list[EngineRun]:
    """Data parallel, asynchronous; isoload chooses replicas and rebalances, every slot's weights are compared."""
    variables = {
        "ISOLOAD_PLACEMENT": str(oracle.file), "ENGINE_CALM": str(CALM), "ISOLOAD_VLLM": "1", "ISOLOAD_STRICT": "1",
        "ISOLOAD_CHECK_WEIGHTS": "1",
    }  # fmt: skip
    options = OPTIONS | {"eplb_config": EPLB | {"use_async": True}}
    return run_vllm_pair(oracle.folder, tmp_path_factory.mktemp("runs") / "pair", variables, **options)


def passes(batches: list[Batch]) -> list[list[Batch]]:
    """Batches of all layers, pass by pass."""
    return [batches[i : i + len(MOE_LAYERS)] for i in range(0, len(batches), len(MOE_LAYERS))]


def check_maps(batches: list[Batch], placement: Placement) -> None:
    """Every layer lies as in the file from the first pass until the first rebalance, afterwards otherwise."""
    for number, layers in enumerate(passes(batches)):
        if number < CALM:
            for row, batch in enumerate(layers):
                assert batch.layer == row and batch.table.tolist() == placement.slot_to_expert[row].tolist()


def rebalances(batches: list[Batch]) -> int:
    """How often some layer got another map."""
    layers = zip(*passes(batches), strict=True)
    return min(sum(not torch.equal(a.table, b.table) for a, b in pairwise(layer)) for layer in layers)


def test_every_layer_starts_as_the_file_says(oracle: Oracle, started: EngineRun) -> None:
    for batches in started.batches:
        check_maps(batches, oracle.placement)
    (line,) = started.lines("starts from ISOLOAD_PLACEMENT=")
    changed = int((oracle.placement.slot_to_expert != torch.tensor(DEFAULT)).sum())
    assert f"3 layers, {changed} of 60 slots differ from vLLM's default map" in line


def test_tokens_are_hugging_faces(oracle: Oracle, started: EngineRun) -> None:
    assert started.tokens == oracle.tokens
    for batch in (batch for batches in started.batches for batch in batches):
        assert torch.equal(batch.table[batch.slots], batch.ids)


def imbalance(batches: list[Batch], table: list[int] | None = None) -> float:
    """Mean of max/mean rank load over the passes before the first rebalance; table: where vLLM's rule would have sent
    the same copies with this map."""
    found = []
    for batch in (batch for layers in passes(batches)[:CALM] for batch in layers):
        slots = batch.slots
        if table is not None:
            lists = replica_lists(Placement(torch.tensor([table]), isoload.Topology(RANKS), EXPERTS))
            maps = lists.logical_to_physical[0], lists.num_replicas[0]
            slots = map_and_record(batch.ids, torch.zeros(RANKS * SLOTS), *maps, torch.tensor(False))
        loads = torch.bincount(slots.flatten() // SLOTS, minlength=RANKS).double()
        found.append(float(loads.max() / loads.mean()))
    return sum(found) / len(found)


def test_the_first_passes_are_leveller_than_vllms_start(started: EngineRun) -> None:
    """vLLM's own choice of replicas both times."""
    ours, theirs = imbalance(started.batches[0]), imbalance(started.batches[0], DEFAULT)
    print(f"imbalance of {CALM} passes: {theirs:.3f} by vLLM's default start, {ours:.3f} by the file")
    assert ours < theirs


def test_rebalances_follow(started: EngineRun, pair: list[EngineRun]) -> None:
    """At least three, each of which starts from where the file has the experts."""
    assert len(started.lines("Rearranged experts")) >= 3
    assert len(pair[0].lines("Rearranging experts (async mode)")) >= 3
    assert rebalances(started.batches[0]) and rebalances(pair[0].batches[0])


def test_asynchronous_and_data_parallel(oracle: Oracle, pair: list[EngineRun]) -> None:
    for rank, run in enumerate(pair):
        assert run.tokens == [tokens[: TOKENS - 8 * rank] for tokens in oracle.tokens[rank::2]]
        check_maps(run.batches[rank], oracle.placement)
    checked = pair[0].lines("slots have their experts' weights ")
    assert "at load" in checked[0] and len(checked) > 3


def placed(
    table: list[int], layers: tuple[int, ...] = MOE_LAYERS, ranks: int = RANKS, **named: Any
) -> Placement:
    """The same map in every layer."""
    rows = torch.tensor([table] * len(layers), dtype=torch.int32)
    return Placement(rows, isoload.Topology(ranks), max(table) + 1, layer_ids=layers, **named)


FAULTS: dict[str, tuple[Placement, list[str]]] = {
    "a layer is missing": (
        placed(DEFAULT, (1, 2)),
        [
            "has layers 1..2 (the model's own layer numbers) and no layer 3",
            "the model has 3 MoE layers, 1..3: pass a file of these layers",
            "--extra-layers",
        ],
    ),
    "a layer is dense": (
        placed(DEFAULT, (0, 1, 2, 3)),
        ["is of layers 0..3", "but the model's MoE layers are 1..3", "--first-moe-layer"],
    ),
    "layers are not stated": (
        placed(DEFAULT, identity=Identity("order")), ["does not state which layers of the model its 3 rows are"],
    ),
    "an expert is missing": (
        placed([*range(EXPERTS - 1), 0, 1, 2, 3, 4]),
        ["has 15 experts but the model has 16: pass a file of this model"],
    ),
    "another model": (
        placed(DEFAULT, identity=Identity("model", MOE_LAYERS, "other-moe")),
        ["is of the model other-moe but vLLM serves ", "pass --served-model-name other-moe"],
    ),
    "more redundant experts": (
        placed([*DEFAULT, 4, 5]),
        [
            "has 22 slots in each layer but the engine has 20 (16 experts and 4 redundant ones) on 2 expert-parallel "
            "ranks: pass --eplb-config '{\"num_redundant_experts\": 6}', or a file made by isoload place --ranks 2 "
            "--slots-per-rank 10",
        ],
    ),
    "more ranks": (
        placed(DEFAULT, ranks=4),
        [
            "has 4 ranks but the engine has 2 expert-parallel ranks: start 4, or pass a file made by isoload place "
            "--ranks 2 --slots-per-rank 10",
        ],
    ),
    "spare slots": (
        placed([*range(9), -1, *range(7, 16), -1], spare_slots=1),
        ["placement must have no spare slots for an engine's file, got 1"],
    ),
}  # fmt: skip


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """What vLLM calls to make the tiny model, without weights and with our hook around it, in a group of two ranks."""
    group = SimpleNamespace(world_size=RANKS, rank_in_group=0)
    monkeypatch.setattr(parallel_state, "get_ep_group", lambda: group)
    made = SimpleNamespace(
        num_logical_experts=EXPERTS, moe_layers=[SimpleNamespace(layer_id=layer) for layer in MOE_LAYERS]
    )
    monkeypatch.setattr("vllm.model_executor.models.interfaces.get_mixture_of_experts_model", lambda of: of)

    def make(
        path: Path, name: str = "tiny-moe", draft: bool = False, additional: Any = None, **parallel: Any
    ) -> Any:
        vllm_placement.START.start(Settings.read({"ISOLOAD_PLACEMENT": str(path)}))
        of = SimpleNamespace(
            model=name, runner_type="draft" if draft else "generate", served_model_name=["served"]
        )
        config = SimpleNamespace(
            parallel_config=parallel_of(**parallel), model_config=of, additional_config=additional
        )
        return vllm_placement.initialize_model(lambda *_, **__: made, config)

    yield make
    vllm_placement.START.start(Settings.read({}))


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_does_not_fit_is_refused(model: Callable[..., Any], tmp_path: Path, name: str) -> None:
    placement, messages = FAULTS[name]
    isoload.write_placement(placement, tmp_path / "plan.json")
    with pytest.raises(ValueError) as error:
        model(tmp_path / "plan.json")
    assert str(error.value).startswith(f"ISOLOAD_PLACEMENT={tmp_path / 'plan.json'}")
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize("name", ["a layer is missing", *slow("an expert is missing", "another model")])
def test_an_engine_that_does_not_fit_loads_no_weights(oracle: Oracle, tmp_path: Path, name: str) -> None:
    isoload.write_placement(FAULTS[name][0], tmp_path / "plan.json")
    options = OPTIONS | {"eplb_config": EPLB}
    log = refused_vllm(
        oracle.folder, tmp_path / "run", {"ISOLOAD_PLACEMENT": str(tmp_path / "plan.json")}, **options
    )
    for message in FAULTS[name][1]:
        assert message in log
    assert "Loading weights took" not in log


def test_files_of_every_format_fit(model: Callable[..., Any], oracle: Oracle, tmp_path: Path) -> None:
    """By the model's own layer numbers, whichever the file's are."""
    placement = oracle.placement.with_moe_layers(moe_layers=MOE_LAYERS)
    for name in isoload.placement.files.FORMATS:
        path = tmp_path / f"{name}.json"
        if name == "vllm-ascend":  # takes an expert once on a rank
            continue
        isoload.write_placement(placement, path, name)
        if name == "sglang":
            assert isoload.read_placement(path, RANKS).num_layers == 4, "a row for the dense layer, too"
        rows = vllm_placement.START.rows(model(path), SimpleNamespace(model="tiny-moe"), parallel_of(), RANKS)
        assert torch.equal(rows.int(), placement.slot_to_expert), name


def parallel_of(**given: Any) -> SimpleNamespace:
    eplb = SimpleNamespace(num_redundant_experts=SLOTS * RANKS - EXPERTS)
    usual = {
        "enable_eplb": True,
        "enable_elastic_ep": False,
        "pipeline_parallel_size": 1,
        "eplb_config": eplb,
    }
    return SimpleNamespace(**usual | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_eplb": False}, "needs vLLM's EPLB: pass --enable-eplb --enable-expert-parallel"),
        ({"enable_elastic_ep": True}, "must come without --enable-elastic-ep"),
        (
            {"eplb_config": SimpleNamespace(num_redundant_experts=4, initial_mapping_path="start.jsonl")},
            "must come without initial_mapping_path in --eplb-config, which sets where experts start, too: leave",
        ),
        (
            {"additional": {"eplb_config": {"expert_map_path": "map.json"}}},
            "must come without expert_map_path in --additional-config, which sets where experts start, too: leave",
        ),
    ],
)
def test_options_under_which_no_expert_moves_are_refused(
    model: Callable[..., Any], oracle: Oracle, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model(oracle.file, **given)


def test_names_of_one_model_agree(model: Callable[..., Any], oracle: Oracle, tmp_path: Path) -> None:
    """With the organisation or the folder, in any case, without the ending; or the name under which it is served."""
    for own, engine in (
        ("qwen3-235b", "Qwen/Qwen3-235B-A22B-FP8"),
        ("Org/Tiny", "/models/tiny/"),
        ("served", "/m/x"),
    ):
        identity = replace(oracle.placement.identity, model=own)
        isoload.write_placement(replace(oracle.placement, identity=identity), tmp_path / "plan.json")
        model(tmp_path / "plan.json", engine)


def test_names_of_two_models_differ() -> None:
    """A file of DeepSeek-V3 would fit DeepSeek-V3.2, which has as many layers and experts."""
    for one, other in (
        ("deepseek-v3", "deepseek-v3.2"),
        ("glm-4", "glm-4.6"),
        ("qwen3-30b", "qwen3-235b"),
        ("", "x"),
    ):
        assert not vllm_placement.same_model(one, other) and not vllm_placement.same_model(other, one)


def test_a_draft_keeps_vllms_map(model: Callable[..., Any], tmp_path: Path) -> None:
    """Whose layers no file is compared with."""
    isoload.write_placement(FAULTS["a layer is missing"][0], tmp_path / "plan.json")
    model(tmp_path / "plan.json", draft=True)


def test_stages_of_a_pipeline_take_their_layers(model: Callable[..., Any], tmp_path: Path) -> None:
    rows = torch.tensor([[*DEFAULT[i:], *DEFAULT[:i]] for i in range(6)], dtype=torch.int32)
    placement = Placement(rows, isoload.Topology(RANKS), EXPERTS, layer_ids=(1, 2, 3, 4, 5, 6))
    isoload.write_placement(placement, tmp_path / "plan.json")
    made = model(tmp_path / "plan.json", pipeline_parallel_size=2)
    found = vllm_placement.START.rows(
        made, SimpleNamespace(model="x"), parallel_of(pipeline_parallel_size=2), RANKS
    )
    assert torch.equal(found.int(), rows[:3])


@pytest.mark.parametrize(
    ("fault", "other", "message"),
    [
        ("rank 1 cannot read it", 0, "rank 1: rank 1 cannot read it"),
        ("", 7, "must be the same on all ranks, got checksum .* on rank 0 and checksum 7 on rank 1"),
    ],
)
def test_ranks_that_read_other_files_all_stop(
    model: Callable[..., Any],
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    other: int,
    message: str,
) -> None:
    """Before any weight moves, which would wait for a rank that is not there."""

    def gather(known: list[Any], own: tuple[str, int], group: Any) -> None:
        known[:] = [own, (fault, other)]

    monkeypatch.setattr(vllm_placement.dist, "all_gather_object", gather)
    made = model(oracle.file)
    parallel_state.get_ep_group().cpu_group = None
    with pytest.raises(ValueError, match=message):
        vllm_placement.move(SimpleNamespace(model=made), SimpleNamespace(model="tiny-moe"), parallel_of())


def test_a_vllm_that_cannot_start_from_a_file_does_not_start(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isoload.engines.vllm import attach_or_leave

    monkeypatch.delattr("vllm.distributed.eplb.rebalance_execute.rearrange_expert_weights_inplace")
    monkeypatch.setenv("ISOLOAD_PLACEMENT", str(oracle.file))
    with pytest.raises(
        SystemExit, match="so its experts cannot start there: .*rearrange_expert_weights_inplace cannot"
    ):
        attach_or_leave()


def test_a_file_that_is_not_there_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from isoload.engines.vllm import attach_or_leave

    monkeypatch.setenv("ISOLOAD_PLACEMENT", str(tmp_path / "gone.json"))
    with pytest.raises(SystemExit, match="isoload: .*gone.json"):
        attach_or_leave()
    (tmp_path / "gone.json").write_text("{}")
    with pytest.raises(SystemExit, match="gone.json: is no placement file"):
        attach_or_leave()
