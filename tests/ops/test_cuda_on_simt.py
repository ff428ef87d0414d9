"""The CUDA kernels without a GPU (tests/native/simt): the CPU's bits, no race, and a race for each barrier removed.

The scenarios run every kernel in seconds. The tests of the ops, of which small ones are chosen, take minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from support import simt_build
from support.simt_scenarios import SCENARIOS, bits

SEEDS = (0, 1)
pytestmark = pytest.mark.slow  # compiling all kernels takes both cores for half a minute

# A barrier of each family: the file and the text behind which it is removed.
MUTANTS = {
    "team": ("cuda/block_team.cuh", "if (lane() == 0) partial[warp()] = v;\n    sync();"),
    "count": ("cuda/count.cuh", "mine[threadIdx.x] = 0;\n  __syncthreads();"),
    "count of many": ("cuda/count.cu", "mine[e] = 0;\n  __syncthreads();"),
    "count_numbered": ("cuda/count_numbered.cu", "__syncwarp();  // all have read the counter"),
    "count_numbered, own counters": ("cuda/count_numbered.cu", "__syncwarp();  // a warp's row is its own"),
    "count_numbered, next copies": ("cuda/count_numbered.cu", "__syncwarp();  // all have read: the next copies"),
    "route": ("cuda/stable_rank.cuh", "__syncwarp();  // all have read"),
    "route, earlier copies": ("cuda/stable_rank.cuh", "atomicAdd(&counts[k[a]], 1);\n  }\n  __syncthreads();"),
    "route_numbered": ("cuda/route_numbered.cu", "sum += total;\n  }\n  team.sync();"),
    "replica_tables": ("algorithms/replica_tables.h", "num_classes += is_new;\n    group.sync();"),
    "replica_tables, holders": ("algorithms/replica_tables.h", "t.offsets[e] = 0; });\n  team.sync();"),
    "plan_exact": ("algorithms/plan_exact_paths.h", "team_.sync();  // all lanes have read the loads that lane 0"),
    "plan_exact, sweeps": ("algorithms/plan_exact.h", "first = end;\n      team_.sync();"),
    "plan_exact, one group": ("cuda/block_team.cuh", "warp() == 0) f(group);\n    sync();"),
    "plan_active": ("algorithms/plan_active.h", "ws_.copies[r] = copies;\n    });\n    team_.sync();"),
    "plan_lp": ("algorithms/plan_lp.h", "ws_.speed[r] * ws_.rank_g[r]; }});\n    team_.sync();"),
    "ordered_sum": ("algorithms/ordered_sum.h", "start(Terms{n, term});\n    team_.sync();"),
    "mesh": ("algorithms/mesh.h", "current * ws_.inverse[first + m];\n    });\n    team_.sync();"),
    "mesh of columns": ("algorithms/mesh_columns.h", "+ k] = ground[c];\n      }\n      group.sync();"),
    "mesh of columns, a tile": ("algorithms/mesh_columns.h", "to[m] = flow[c];\n    }\n    group.sync();"),
    "mesh of columns, tiles": ("algorithms/mesh_columns.h", "follow(a, b, first);\n      });\n      team_.sync();"),
    "network": ("algorithms/network.h", "conductance[k] / star;\n      }\n    });\n    team_.sync();"),
    "round_split": ("algorithms/round_split.h", "quota_[p] = 0; });\n    team_.sync();"),
    "plan_spill": ("algorithms/plan_spill.h", "low + step(k), slack, least);\n      });\n      team_.sync();"),
    "plan_spill, copies": ("algorithms/spill_layer.h", "replica |= held && !home;\n    });\n    team_.sync();"),
    "plan_spill, a try": ("algorithms/spill_greedy.h", "open_cost(cost, free));\n    }\n    group_.sync();"),
    "plan_spill, a level": ("algorithms/spill_level.h", "to_.free[giver]));\n    }\n    group_.sync();"),
    "spare_fill": ("algorithms/spare_fill.h", "ws.exports[r] = 0; });\n    team_.sync();"),
    "plan_replication": ("algorithms/plan_replication.h", "take_local(r, group); });\n    team_.sync();"),
    "top_up": ("algorithms/top_up.h", "part(e, replicas(e)); });\n    team_.sync();"),
    "shard_tokens": ("algorithms/shard_tokens.h", "quota_[p] = 0; });\n    team_.sync();"),
    "share": ("algorithms/share.h", "serve_own_ranks();\n    team_.sync();"),
    "what is fetched": ("cuda/fetch.cuh", "this lane's; the barrier for all\n  team.sync();"),
    "share_alone": ("algorithms/share_alone.h", "out[p] = 0; });\n  team.sync();"),
    "plan_waterfill": ("algorithms/visit_flow.h", "excess_[s] = excess - there;\n    team_.sync();"),
    "route_shared": ("cuda/route_shared.cu", "team_.sync();  // all have read the budget and the levels"),
    "route_shared_sampled": ("algorithms/route_shared_sampled.h", "team.sync();"),
    "number_rows": ("cuda/number_rows.cu", "chunk_counts[int64_t(blockIdx.x) * keys + k];\n  }\n  __syncthreads();"),
    "pack_rows": ("cuda/pack_rows.cu", "p.out.row_to_rank[row] = rank;\n    }\n    __syncthreads();"),
    "group_copies": ("cuda/group_copies.cu", "present = all;\n  }\n  __syncthreads();"),
    "borrow": ("cuda/borrow.cu", "report(errors, kBorrowedSlot);\n  }\n  __syncthreads();"),
    "borrow_backward": ("cuda/borrow.cu", "chains.head[own] = head;\n  }\n  __syncthreads();"),
}  # fmt: skip

# How many barriers of a file no scenario misses: after them a kernel ends, another barrier comes before memory is
# shared, or a lane reads only what it wrote. A new one has to be thought about.
UNNOTICED = {
    "algorithms/gather_rows.h": 1,  # other ranks miss it: test_gather_rows_threads.py
    "algorithms/network.h": 2,
    "algorithms/plan_active.h": 2,
    "algorithms/plan_exact.h": 2,
    "algorithms/plan_lp.h": 1,
    "algorithms/plan_lp_parts.h": 3,
    "algorithms/plan_spill.h": 2,
    "algorithms/plan_waterfill.h": 1,
    "algorithms/replica_tables.h": 2,
    "algorithms/shard_tokens.h": 1,
    "algorithms/share.h": 4,
    "algorithms/spare_fill.h": 1,
    "algorithms/visit_flow.h": 1,
    "cuda/route_shared.cu": 2,
    "cuda/stable_rank.cuh": 3,
}

# Small ones of every op; a barrier of 128 lanes costs 128 changes of context here.
CHOSEN = {
    "count": "not refuses and not 257",
    "replica_tables": "(equals_reference and not split_) or layers",
    "share_alone": "equals_reference or layers",
    "share": "layers or largest",
    "plan_exact": "(wide_groups or layers_at_once or overflow) and not refuses",
    "plan_exact_share": "plan_exact_and_share and 0 or many_ranks or shared_memory or layers or largest",
    "plan_waterfill": "(wide_groups or layers_at_once or overflow) and not refuses",
    "plan_active": "(layers_at_once or overflow) and not refuses",
    "plan_lp": "equals_reference_with or layers_at_once or nothing",
    "round_split": "by_hand or layers_at_once or largest",
    "plan_spill": "named or layers_at_once",
    "plan_replication": "first_phase or layers_at_once",
    "top_up": "by_hand or layers_at_once",
    "shard_tokens": "layers_at_once",
    "route": "equals_reference_where or nothing or 12-empty_slots",
    "route_numbered": "(equals_route_and and (700 or 129)) or other_columns",
    "route_shared": "equals_reference and 1-True",
    "route_shared_sampled": "equals_reference",
    "append_shared_expert": "equals_reference",
    "number_rows": "equals_reference",
    "pack_rows": "equals_reference and 63 or more_ranks",
    "gather_rows": "1-5 or 2-200 or wraps",
    "group_copies": "equals_reference",
    "borrow": "equals_reference",
    "device_errors": "noted",
}


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simt_build.build(tmp_path_factory.mktemp("simt"))


def python(package: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With the isoload of `package`."""
    path = os.pathsep.join([str(package), str(simt_build.TESTS)])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=simt_build.ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def answers(package: Path, task: str, *arguments: str) -> Any:
    done = python(package, "-m", "support.simt_run", task, *arguments)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kernels(package: Path) -> Any:
    return answers(package, "kernels", *map(str, SEEDS))


@pytest.mark.parametrize("name", SCENARIOS)
def test_kernels_equal_the_cpu_and_do_not_race(name: str, kernels: Any) -> None:
    found = kernels[name]
    assert found["launches"] >= len(SEEDS)
    assert not found["findings"], "\n".join(found["findings"])
    assert found["bits"] == [bits(SCENARIOS[name]())] * len(SEEDS)


def line_of(file: str, text: str) -> str:
    """Where the barrier at the end of the text stands, or at its start if a comment ends it."""
    source = (simt_build.ROOT / "csrc" / file).read_text()
    assert source.count(text) == 1, f"{file}: {text}"
    return f"{file}:{source[: source.index(text) + len(text)].count(chr(10)) + 1}"


@pytest.fixture(scope="module")
def removed(package: Path) -> Any:
    return answers(package, "barriers", *(line_of(*of) for of in MUTANTS.values()))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_removed_barrier_is_noticed(name: str, removed: Any) -> None:
    at = [found for found in removed if found["line"] == line_of(*MUTANTS[name])]
    assert any(re.match("race|uninitialised", found["finding"]) for found in at), at


@pytest.mark.parametrize("name", ["share", "round_split", "route"])
def test_a_barrier_removed_from_the_source_is_noticed(name: str, tmp_path: Path) -> None:
    """A barrier that the run-time skips is one that is not there: the same by way of the compiler."""
    file, text = MUTANTS[name]
    without = re.sub(r"(team_\.sync|__syncwarp)\(\);", ";", text)
    assert without != text
    found = answers(simt_build.build(tmp_path, file, text, without), "kernels", "0")
    assert any(re.match("race|uninitialised", line) for of in found.values() for line in of["findings"])


@pytest.mark.exhaustive
def test_every_barrier_is_needed(package: Path) -> None:
    """By some kernel that comes to it, but for a few lines of each file: the last barrier of a kernel, say."""
    noticed = defaultdict(bool)
    for found in answers(package, "barriers"):
        noticed[found["line"]] |= bool(found["finding"])
    unnoticed: dict[str, list[str]] = {}
    for line in sorted(line for line, found in noticed.items() if not found):
        unnoticed.setdefault(line.split(":")[0], []).append(line)
    assert len(noticed) > 60
    assert all(len(lines) <= UNNOTICED.get(file, 0) for file, lines in unnoticed.items()), unnoticed


@pytest.mark.parametrize("op", CHOSEN)
def test_op(op: str, package: Path) -> None:
    """The op's own tests, with lanes in a drawn order."""
    command = [
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "support.simt_plugin",
        "-k",
        CHOSEN[op],
    ]
    done = python(package, *command, f"tests/ops/test_{op}.py", SIMT_SEED="3")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    launches = re.findall(r"(\d+) launches", done.stdout)
    assert launches and int(launches[0]) > 0, done.stdout[-3000:]
