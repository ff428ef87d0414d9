"""Absent slots in SGLang's own functions, with isoload's hooks and without; and refusals before a model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepseek_config import make_config
from one_process import published
from sglang.srt.eplb import expert_distribution, expert_location, expert_location_updater
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from torch import Tensor

from isoload.engines.settings import Settings
from isoload.engines.sglang import LAYERS, pages
from isoload.engines.sglang.layers import FOREIGN
from isoload.engines.sglang.placement import check_file
from isoload.weights.pages import PagePool

EXPERTS, RANKS, NUM_LAYERS = 16, 2, 3
TABLE = torch.tensor([[0, 1, -1, 2, 1, -1]])  # two ranks of three slots, three experts
LISTS = expert_location._compute_logical_to_all_physical_map
COUNT = expert_distribution._convert_global_physical_count_to_logical_count
UPDATE = expert_location_updater.update_expert_weights_single_layer


@pytest.fixture
def ragged(attached: None) -> Iterator[None]:
    LAYERS.start(Settings.read({"ISOLOAD_RAGGED": "pages"}))
    yield


def test_an_absent_slot_is_in_no_list_of_replicas() -> None:
    """Without the hook SGLang lists it for the last expert, and says nothing."""
    how = {"num_logical_experts": 3, "ep_size": 2, "moe_ep_rank": None}
    assert LISTS(physical_to_logical_map=TABLE, **how)[0, 2].tolist() == [2, 3, 5], "the control"
    lists = pages.lists_without_holes(LISTS, physical_to_logical_map=TABLE, **how)
    assert lists.tolist() == [[[0, -1], [1, 4], [3, -1]]]
    full = TABLE.clamp(min=0)
    found = pages.lists_without_holes(LISTS, physical_to_logical_map=full, **how)
    assert torch.equal(found, LISTS(physical_to_logical_map=full, **how))


def test_copies_are_counted_where_slots_are_absent() -> None:
    """Without the hook the recorder's scatter fails."""
    copies = torch.tensor([[[4, 1, 0, 2, 5, 0]]])
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        COUNT(copies, 1, 3, TABLE)
    assert pages.counts_without_holes(COUNT, copies, 1, 3, TABLE).tolist() == [[[4, 6, 2]]]


def update(function: Any, old: list[int], new: list[int]) -> Tensor:
    """One rank's weights, row i of expert i filled with i."""
    weights = [torch.tensor(old).float().view(-1, 1).repeat(1, 4)]
    function(
        routed_experts_weights=weights, temp_buffers=[torch.empty_like(weights[0])],
        old_physical_to_logical_map=old, new_physical_to_logical_map=new,
        num_local_physical_experts=len(old), num_gpu_per_node=1, rank=0, world_size=1,
    )  # fmt: skip
    return weights[0][:, 0]


def test_nothing_is_fetched_for_an_absent_slot() -> None:
    """Without the hook the updater looks for a rank that has expert -1."""
    old, new = [0, 1, 2, 1], [0, 2, 1, -1]
    with pytest.raises((AssertionError, ZeroDivisionError, IndexError, ValueError)):
        update(UPDATE, old, new)

    def hooked(**named: Any) -> Any:
        return pages.update_layer(UPDATE, **named)

    assert update(hooked, old, new).tolist() == [0, 2, 1, 1]
    assert update(hooked, [0, 1, 2, -1], [0, 1, 2, 2])[3] == 2, "a slot that gets memory gets its expert"


def test_a_file_with_absent_slots_starts_no_sglang_without_isoload() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'isoload_ragged'"):
        expert_location.ExpertLocationMetadata.init_by_mapping(
            None, physical_to_logical_map=TABLE, isoload_ragged="pages"
        )
    got = pages.by_mapping(
        lambda *args, **named: (args, named), None, physical_to_logical_map=1, isoload_ragged="pages"
    )
    assert got == ((None, 1), {})


def table() -> Tensor:
    """Nine slots on each rank, the last of rank 1 absent in every layer."""
    row = [*range(8), 8, *range(8, 16), -1]
    return torch.tensor([row] * NUM_LAYERS)


def location(path: Path, rows: Tensor) -> str:
    path.write_text(json.dumps({"physical_to_logical_map": rows.tolist(), "isoload_ragged": "pages"}))
    return str(path)


def early() -> Tensor:
    rows = table()
    rows[1, 8], rows[1, 17] = -1, 8
    rows[1, 7:9] = rows[1, 7:9].flip(0)
    return rows


def lacking() -> Tensor:
    rows = table()
    rows[2, 3] = 4
    return rows


FILES = {
    "has absent slots: set ISOLOAD_RAGGED=pages, or make a file without them by isoload place --rectangle": (
        {}, table(), 2
    ),
    "has no absent slots, so ISOLOAD_RAGGED=pages has no effect: unset it": (
        {"ISOLOAD_RAGGED": "pages"}, table().clamp(min=0), 2
    ),
    "absent slots must be the last of their rank, not so in layer 1, rank 0": (
        {"ISOLOAD_RAGGED": "pages"}, early(), 2
    ),
    "must have a slot for each of the 16 experts, expert 3 has none in layer 2": (
        {"ISOLOAD_RAGGED": "pages"}, lacking(), 2
    ),
    "has 18 slots in each layer but the engine has 16 (16 experts and 0 redundant ones) on 2 expert-parallel ranks: "
    "pass --ep-num-redundant-experts 2": ({"ISOLOAD_RAGGED": "pages"}, table(), 0),
}  # fmt: skip


@pytest.mark.parametrize("message", FILES)
def test_a_file_that_cannot_start_is_refused(attached: None, tmp_path: Path, message: str) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    variables, rows, redundant = FILES[message]
    LAYERS.start(Settings.read(variables))
    path = location(tmp_path / "p.json", rows)
    with published(tp_size=2, ep_size=2, ep_num_redundant_experts=redundant, init_expert_location=path):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        with pytest.raises(ValueError, match=re.escape(message)):
            check_file(ModelConfig(str(make_config(tmp_path / "config"))))


def test_absent_slots_need_a_file(ragged: None) -> None:
    with published(), pytest.raises(ValueError, match="ISOLOAD_RAGGED=pages needs a file with absent slots"):
        check_file(None)


OPTIONS: dict[str, dict[str, Any]] = {
    "ISOLOAD_RAGGED=pages gives back memory on CPUs and NVIDIA GPUs only, the model is on xpu": {"device": "xpu"},
    "--elastic-ep-backend must be left out with ISOLOAD_RAGGED=pages, got 'mooncake'": {
        "elastic_ep_backend": "mooncake"
    },
    "--enable-paged-experts must be left out with ISOLOAD_RAGGED=pages, got True": {"enable_paged_experts": True},
    "--dwdp-size must be left out with ISOLOAD_RAGGED=pages, got 2": {"dwdp_size": 2},
    "--enable-memory-saver must be left out with ISOLOAD_RAGGED=pages, got True": {"enable_memory_saver": True},
    "--remote-instance-weight-loader-start-seed-via-transfer-engine must be left out": {
        "remote_instance_weight_loader_start_seed_via_transfer_engine": True
    },
    "--moe-a2a-backend must be left out with ISOLOAD_RAGGED=pages, got 'megamoe'": {"moe_a2a_backend": "megamoe"},
    "--load-format must be left out with ISOLOAD_RAGGED=pages, got 'remote_instance'": {
        "load_format": "remote_instance"
    },
    "--load-format must be left out with ISOLOAD_RAGGED=pages, got 'expert_pack'": {"load_format": "expert_pack"},
    "--cpu-offload-gb must be left out with ISOLOAD_RAGGED=pages, got 4": {"cpu_offload_gb": 4},
    "--offload-group-size must be left out with ISOLOAD_RAGGED=pages, got 2": {"offload_group_size": 2},
    "--enable-elastic-expert-backup must be left out with ISOLOAD_RAGGED=pages, got True": {
        "enable_elastic_expert_backup": True
    },
    "--weight-cache-mode must be left out with ISOLOAD_RAGGED=pages, got 'disk'": {"weight_cache_mode": "disk"},
    "--kt-weight-path must be left out with ISOLOAD_RAGGED=pages, got '/some'": {"kt_weight_path": "/some"},
    "SGLang's own --ep-dispatch-algorithm fake must be left out": {"algorithm": "fake"},
    "SGLang's own --ep-dispatch-algorithm lp must be left out": {"algorithm": "lp"},
    "--eplb-algorithm must be isoload with ISOLOAD_RAGGED=pages": {"enable_eplb": True, "eplb_algorithm": "auto"},
    "--eplb-rebalance-layers-per-chunk must be left out": {
        "enable_eplb": True, "eplb_algorithm": "isoload", "eplb_rebalance_layers_per_chunk": 1
    },
}  # fmt: skip


def test_the_options_are_sglangs_and_off_by_default() -> None:
    """An option that SGLang renames would be refused no more."""
    defaults = {name: of.default for name, of in signature(ServerArgs).parameters.items()}
    for name, (off, _) in FOREIGN.items():
        assert name == "enable_deepep_waterfill" or name in defaults  # the older name
        assert not off or defaults.get(name) in off, name


def test_shadow_mode_does_not_rebalance_absent_slots(attached: None) -> None:
    shadow = {"ISOLOAD_MODE": "shadow", "ISOLOAD_REPORT_SECONDS": "1"}
    LAYERS.start(Settings.read({"ISOLOAD_RAGGED": "pages"} | shadow))
    runner = SimpleNamespace(device="cpu", server_args=SimpleNamespace())
    with published(ep_dispatch_algorithm="dynamic"):
        pages.check_start(runner)
    rule = "--enable-eplb must be left out with ISOLOAD_RAGGED=pages in shadow"
    with published(ep_dispatch_algorithm="dynamic", enable_eplb=True), pytest.raises(ValueError, match=rule):
        pages.check_start(runner)


def test_a_weight_update_that_replaces_memory_ends_at_the_next_rebalance(ragged: None) -> None:
    LAYERS.pages, LAYERS.page_limits = PagePool(), torch.tensor([2, 2])
    parameter = torch.nn.Parameter(torch.zeros(2, 8))
    (paged,) = LAYERS.pages.add(0, [parameter.data], 1)
    parameter.data = paged
    LAYERS.paged = [(0, parameter, paged.data_ptr())]
    pages.check_in_place()
    parameter.data.copy_(torch.ones(2, 8)[:1].expand(2, 8))
    pages.check_in_place()
    parameter.data = torch.zeros(2, 8)
    maps = SimpleNamespace(physical_to_logical_map_cpu=torch.tensor([[0, -1, 1, -1]]), ep_size=2)
    moved = {
        "old_expert_location_metadata": maps,
        "new_expert_location_metadata": maps,
        "update_layer_ids": [0],
    }
    with pytest.raises(RuntimeError, match="a weight update has replaced the memory of experts in layer 0"):
        pages.update_weights(lambda **_: {}, **moved)


@pytest.mark.parametrize("message", OPTIONS)
def test_an_option_that_does_not_fit_is_refused(
    attached: None, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    LAYERS.start(Settings.read({"ISOLOAD_RAGGED": "pages", "ISOLOAD_PLACER": "scenario:replicas=1"}))
    LAYERS.lost = frozenset({"lp"})
    fields = dict(OPTIONS[message])
    engine = {
        name: fields.pop(name)
        for name in ("enable_eplb", "eplb_algorithm", "eplb_rebalance_layers_per_chunk")
        if name in fields
    }
    algorithm, device = fields.pop("algorithm", "dynamic"), fields.pop("device", "cpu")
    runner = SimpleNamespace(device=device, server_args=SimpleNamespace(**fields))
    with published(ep_dispatch_algorithm=algorithm, **engine):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            pages.check_start(runner)
        LAYERS.start(Settings.read({}))
        pages.check_start(runner)


def test_the_updaters_canary_is_refused(ragged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pages.CANARY, "1")
    with published(), pytest.raises(ValueError, match=f"{pages.CANARY} must be unset with ISOLOAD_RAGGED"):
        pages.check_start(SimpleNamespace(device="cpu", server_args=SimpleNamespace()))


def test_pages_are_not_given_back_when_the_kv_cache_has_its_size(ragged: None) -> None:
    with pytest.raises(ValueError, match="ISOLOAD_RAGGED must give pages back before the KV cache is sized"):
        pages.into_pages(SimpleNamespace(token_to_kv_pool=object()))


def test_weights_of_another_shape_are_refused(ragged: None) -> None:
    """Nothing is paged where a tensor is no parameter of one row per slot."""
    model = torch.nn.Linear(4, 18)
    model.routed_experts_weights_of_layer = {0: [model.weight.data]}  # type: ignore[assignment]
    metadata = SimpleNamespace(physical_to_logical_map_cpu=table()[:1], ep_size=RANKS)
    expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
    with published(), pytest.raises(ValueError, match=re.escape("got [18, 4] in layer 0 of Linear")):
        get_parallel().override_permanently(tp_rank=0, moe_ep_rank=0)
        pages.into_pages(SimpleNamespace(model=model))


def test_weights_with_a_second_reference_are_refused(ragged: None) -> None:
    """Their old memory would stay, and a kernel that has the old address would read weights that no longer change."""
    weights = [torch.ones(4, 8)]
    parameter = torch.nn.Parameter(weights[0], requires_grad=False)
    again = parameter.data  # an alias, as a quantisation method may keep
    with pytest.raises(RuntimeError, match="the weights of layer 3 are referenced a second time"):
        pages.replace(weights, [torch.ones(4, 8)], {parameter.data_ptr(): parameter}, 3)
    del again
    pages.replace(weights, [torch.zeros(4, 8)], {parameter.data_ptr(): parameter}, 3)
    assert not parameter.any() and weights[0].data_ptr() == parameter.data_ptr()


def test_a_rebalance_beyond_the_memory_of_any_rank_is_refused_on_all_ranks(ragged: None) -> None:
    """From the maps of all ranks, before a weight moves."""
    pool = PagePool()
    for layer in range(2):
        pool.add(layer, [torch.zeros(2, 8)], 1)
    before, LAYERS.page_limits = torch.tensor([[2, 1], [1, 2]]), torch.tensor([3, 3])
    pages.check_moves(before, torch.tensor([[1, 1], [2, 2]]), [0, 1], pool)
    pages.check_moves(before, torch.tensor([[1, 1], [1, 2]]), [0], pool)
    for after in (
        [[1, 2], [2, 1]],
        [[2, 2], [1, 2]],
    ):  # ranks that exchange slots within layers; one slot more
        with pytest.raises(ValueError, match="a rebalance must leave rank . at most 3 slots with memory"):
            pages.check_moves(before, torch.tensor(after), [0, 1], pool)
