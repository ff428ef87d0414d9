"""LLEP's listing and isoload's `llep` at full size on the 36 settings of section 5.1: plans alone, no GEMMs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import isoload
from isoload.policies import make_policy
from isoload.policies.published_borrowing import llep_published
from isoload.times import local_bytes
from lib import table
from lib.llep_setting import FULL, NUM_HOT, SHAPES, SHARES, Setting

MODELS = ("gpt-oss-120b", "DeepSeek-V3", "Kimi-K2")
LISTING, OURS = "the paper's listing", "isoload's llep"
Row = dict[str, Any]


def settings() -> list[Setting]:
    """Three models, four shares of the tokens, into 1, 4 and 16 experts; as published, a token may repeat an expert."""
    bases = [Setting(shape=SHAPES[name], scale=FULL, repeat=True) for name in MODELS]
    return [replace(base, share=share, num_hot=hot) for base in bases for hot in NUM_HOT for share in SHARES]


def by_listing(setting: Setting, loads: list[int]) -> Row:
    """Algorithms 2 and 3 with the options of the preset."""
    options = make_policy("llep_section_5_1")
    found = llep_published(loads, setting.ranks, options.capacity, options.min_chunk, "paper")
    copies = np.zeros((setting.ranks, len(loads)), dtype=np.int64)
    for segment in found:
        copies[segment.rank, segment.expert] += segment.last - segment.first
    home = np.arange(len(loads)) * setting.ranks // len(loads)
    foreign = (copies > 0) & (home != np.arange(setting.ranks)[:, None])
    small = sum(s.last - s.first < options.min_chunk for s in found if s.rank != home[s.expert])
    return figures(setting, copies, foreign.sum(1)) | {"chunks_below_m": int(small)}


def by_llep(setting: Setting, loads: list[int]) -> Row:
    """Two spare slots on every rank; lambda over experts, too."""
    counts = torch.tensor(loads, dtype=torch.int32)
    options = {"capacity": 1.0, "min_chunk": 1024, "threshold": 1.3, "measure": "expert"}
    made = isoload.plan(counts, setting.placement, 0, "llep", **options)
    assert made.quota is not None
    quota = made.quota.view(setting.ranks, -1).numpy()
    slots, held = made.slot_to_expert.view_as(made.quota).numpy(), setting.placement.arrays[0][0]
    foreign = ((slots >= 0) & (held < 0)).reshape(setting.ranks, -1).sum(1)
    return figures(setting, quota, foreign)


def figures(setting: Setting, copies: Any, foreign: Any) -> Row:
    shape = setting.shape
    load = copies.sum(1)
    return {
        "peak": float(load.max() / load.mean()),
        "imports": int(foreign.sum()),
        "imports_of_a_rank": int(foreign.max()),
        "memory": float(local_bytes(copies, shape.hidden, shape.intermediate).max()),
    }


def plan_rows() -> list[Row]:
    rows = []
    for setting in settings():
        loads = expert_loads(setting)
        plain = np.diag(loads).reshape(setting.ranks, -1, len(loads)).sum(1)
        where = {"shape": setting.shape.name, "share": setting.share, "num_hot": setting.num_hot}
        made = {
            "plain EP": figures(setting, plain, np.zeros(setting.ranks, int)),
            LISTING: by_listing(setting, loads),
            OURS: by_llep(setting, loads),
        }
        rows += [{"kind": "plans", **where, "whose": whose, **row} for whose, row in made.items()]
    return rows


def expert_loads(setting: Setting) -> list[int]:
    """[E] copies of all ranks' tokens, without drawing them."""
    return [int(n) for n in setting.workload.expert_loads(0)]


PLANS: table.Columns = {
    "layer": "{shape}",
    "tokens into experts": "{share:.0%} into {num_hot}",
    "whose plan": "{whose}",
    "busiest / mean": "{peak:.3f}",
    "experts imported": "{imports}",
    "by one rank": "{imports_of_a_rank}",
    "chunks below m": "{chunks_below_m}",
    "Equation 4, MB": "{memory:.0f/1e6}",
}
