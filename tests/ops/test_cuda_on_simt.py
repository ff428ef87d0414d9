"""The CUDA kernels without a GPU (tests/native/simt): the CPU's bits, no race, and no barrier that is not missed.

The scenarios run every kernel in seconds. The tests of the ops, of which small ones are chosen, take minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support import simt_build
from support.chain import NODES
from support.launches import OF_MANY
from support.simt_scenarios import LARGE, SCENARIOS, bits
from support.sweeps import slow

SEEDS = (0, 1)
pytestmark = pytest.mark.slow  # compiling all kernels takes both cores for half a minute

# Barriers that no scenario misses and that stay, by the text behind which they stand, and why.
LAST = "a planner's last: its caller's lanes may read the result, as those of tests/native/teams.cpp do"
SHUFFLED = "each read ends before the shuffles behind it, which order lanes but promise nothing of memory"
ALONE = "alone's own: publish has one before it reads"
UNNOTICED = {
    ("algorithms/plan_exact_warp_paths.h", "group_.sync();  // all have read the levels"): SHUFFLED,
    ("algorithms/top_up.h", "group.sync();  // all have read what changes now"): SHUFFLED,
    ("algorithms/top_up.h", "team_.alone([&](auto& group) { fill(group); });"): ALONE,
    ("algorithms/plan_active.h", "// unlimited: the solve was not cut short\n    team_.sync();"): LAST,
    ("algorithms/plan_exact.h", "out.telemetry[i] = telemetry[i];\n    }\n    team_.sync();"): LAST,
    ("algorithms/plan_lp.h", "static_cast<int32_t>(status);\n    }\n    team_.sync();"): LAST,
    ("algorithms/plan_waterfill.h", "a lower level would have done\n    team_.sync();"): LAST,
    ("cuda/route.cu", "__syncthreads();  // this block's visits are written"): "other blocks miss it",
    ("algorithms/replica_tables.h", "ws.index[e] : -1;\n  });\n  team.sync();"): LAST,
    ("algorithms/share.h", "send(s, t_.order[i], row); });\n    team_.sync();"): LAST,
    ("algorithms/spare_fill.h", "static_cast<int32_t>(counts[i]);\n  team.sync();"): LAST,
}  # fmt: skip

# From ids to slots, of exact and of joint; one launch each.
THREE = ("count", "plan_exact, of a rank", "route", "plan_joint", "route, shared columns")

# KB that a block may have: compute capability 9.0 and 10.0; 8.0; 8.9.
SHARED = {"H100": 227, "A100": 163, "L40": 99}

# Of some families, a barrier that the compiler leaves out: the file and the text at whose end it stands. All kernels
# are compiled anew for share's.
REMOVED = {
    "top_up": ("algorithms/top_up.h", "part(e, replicas(e)); });\n    team_.sync();"),
    "round_split": ("algorithms/round_split.h", "quota_[p] = 0; });\n    team_.sync();"),
    "number_rows": ("cuda/stable_rank.cuh", "__syncwarp();  // all have read"),
    "share": ("algorithms/share.h", "own_[j] = own_part(i, j); });\n    team_.sync();"),
}

# Small ones of every op; a barrier of 128 lanes costs 128 changes of context here.
CHOSEN = {
    "every_op": "contiguous",
    "count": "not 257",
    "replica_tables": "(equals_reference and not split_) or layers",
    "share": "layers or largest",
    "plan_exact": "(wide_groups or layers_at_once or overflow)",
    "plan_exact_share": "plan_exact_and_share and 0 or many_ranks or shared_memory or layers or largest",
    "plan_joint": "(joins and 0 or many_ranks or shared_memory or layers or largest) and not refuses",
    "plan_waterfill": "(wide_groups or layers_at_once or overflow)",
    "plan_active": "(layers_at_once or overflow)",
    "plan_lp": "equals_reference_with or layers_at_once or nothing",
    "round_split": "by_hand or layers_at_once or largest",
    "plan_fill": "named or layers_at_once",
    "balance_own": "equals_three_ops and (64-8 or 700) and (8-duplicates or 3-eplb)",
    "balance_same": "equals_three_ops and spread and (8-duplicates or 3-eplb)",
    "plan_own": "layers_at_once or most_copies or an_offset or slower or noted",
    "top_up": "by_hand or layers_at_once",
    "route": "equals_reference_where or nothing or 12-empty_slots",
    "route_numbered": "(equals_reference and (700 or 129)) or other_columns",
    "route_columns": "apart_and and (700 or 129) or many or 4097-64",
    "route_shared": "equals_reference and 1-True or many_tokens and not 32769",
    "route_shared_sampled": "equals_reference",
    "append_shared_expert": "equals_reference",
    "number_rows": "equals_reference",
    "pack_rows": "equals_reference and 63 or more_ranks",
    "group_copies": "equals_reference",
    "borrow": "equals_reference",
    "device_errors": "noted",
}
# Of all kernels the scenarios above tell the gate enough; of these their ops' own tests too.
IN_GATE = ("every_op", "number_rows", "share", "plan_exact", "borrow", "device_errors")


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
    assert found["early"] == found["launches"] >= len(SEEDS)
    assert not found["findings"], "\n".join(found["findings"])
    assert found["bits"] == [bits(SCENARIOS[name]())] * len(SEEDS)


@pytest.mark.parametrize("name", THREE)
def test_three_kernels_lead_to_slots(name: str, kernels: Any) -> None:
    assert kernels[name]["launches"] == len(SEEDS)


def test_six_kernels_make_an_unusual_joint_plan(kernels: Any) -> None:
    """And its tables one."""
    assert kernels["plan_joint, in parts"]["launches"] == 7 * len(SEEDS)


def test_one_kernel_leads_from_few_ids_to_slots(kernels: Any) -> None:
    """As support/launches.py has it."""
    for name, launches in {"": 1, ", most": 1, ", more": 3, ", many tokens": 3}.items():
        found = kernels[f"balance_own{name}"]
        assert (found["launches"], found["memsets"]) == (launches * len(SEEDS), 0), name


@pytest.mark.parametrize("tokens", NODES)
def test_nodes_of_the_chain(tokens: int, kernels: Any) -> None:
    """What tests/ops/test_cuda.py counts in a captured graph."""
    found = kernels[f"chain, {tokens} tokens"]
    assert found["launches"] + found["memsets"] == NODES[tokens] * len(SEEDS)


@pytest.mark.parametrize("op", OF_MANY)
def test_kernels_of_many_copies(op: str, kernels: Any) -> None:
    """What support/launches.py counts in a forward on fake tensors."""
    assert kernels[f"{op}, many tokens"]["launches"] == OF_MANY[op] * len(SEEDS)


@pytest.fixture(scope="module")
def large(package: Path) -> Any:
    return answers(package, "large", *(str(kilobytes * 1024) for kilobytes in SHARED.values()))


@pytest.mark.parametrize("name", LARGE)
def test_large_problems_equal_the_cpu_in_any_shared_memory(name: str, large: Any) -> None:
    expected, took = bits(LARGE[name]()), []
    for found in large[name].values():
        assert not found["findings"], "\n".join(found["findings"])
        assert found["bits"] == [expected]
        took.append(found["shared"])
    assert took[0] > 128 * 1024 and took[0] > took[-1]


def line_of(file: str, text: str) -> str:
    """Where the barrier at the end of the text stands, or at its start if a comment ends it."""
    source = (simt_build.ROOT / "csrc" / file).read_text()
    assert source.count(text) == 1, f"{file}: {text}"
    return f"{file}:{source[: source.index(text) + len(text)].count(chr(10)) + 1}"


def standing() -> set[str]:
    """Every line of csrc with a barrier; those inside of the team's methods are the runs' to find."""
    csrc, lines = simt_build.ROOT / "csrc", set()
    for path in [*csrc.rglob("*.h"), *csrc.glob("cuda/*.cu*")]:
        if path.name in ("team.h", "block_team.cuh"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"\bsync\(\)|__sync(warp|threads)|\.alone\(", line.split("//")[0]):
                lines.add(f"{path.relative_to(csrc)}:{number}")
    return lines


@pytest.fixture(scope="module")
def removed(package: Path) -> Any:
    return answers(package, "barriers")


def test_every_barrier_is_missed(removed: Any) -> None:
    """A race, wrong bits or no end without it, in a kernel at least; those that lanes never come to go unnoticed."""
    noticed = {found["place"] for found in removed if found["finding"]}
    unnoticed = (standing() | {found["place"] for found in removed}) - noticed
    assert len(noticed) > 100
    assert unnoticed == {line_of(*barrier) for barrier in UNNOTICED}


def test_every_kernel_misses_a_barrier(removed: Any) -> None:
    kernels = {found["kernel"] for found in removed}
    assert len(kernels) > 40
    assert not kernels - {found["kernel"] for found in removed if found["finding"]}


@pytest.mark.parametrize("name", ["number_rows", *slow("top_up", "round_split", "share")])
def test_a_barrier_removed_from_the_source_is_noticed(name: str, tmp_path: Path) -> None:
    """A barrier that the run-time skips is one that is not there: the same by way of the compiler."""
    file, text = REMOVED[name]
    without = re.sub(r"(team_\.sync|__syncwarp)\(\);", ";", text)
    assert without != text
    found = answers(simt_build.build(tmp_path, file, text, without), "kernels", "0", name)
    assert any(re.match("race|uninitialised", line) for of in found.values() for line in of["findings"])


def test_a_kernel_that_does_not_wait_for_the_one_ahead_is_noticed(tmp_path: Path) -> None:
    begins = "(Numbering<Id> in) {\n  take_turn();"
    changed = simt_build.build(tmp_path, "cuda/count.cu", begins, begins.replace("take_turn();", ""))
    found = answers(changed, "kernels", "0", "count")["count"]["findings"]
    assert any(
        re.match("early in count_numbered_kernel.*: lane .* reads global memory", line) for line in found
    )
    assert all(line.startswith("early in count_numbered_kernel") for line in found)


@pytest.mark.parametrize(("wanted", "early"), [("0", 0), ("1", 1)])
def test_kernels_start_early_unless_it_is_switched_off(wanted: str, early: int, package: Path) -> None:
    call = (
        "import torch; from support.simt_plugin import RUNTIME; from isoload import ops\n"
        "ops.count(torch.tensor([[0, 1]]), 2); print(RUNTIME.launches, RUNTIME.early_launches)"
    )
    assert python(package, "-c", call, ISOLOAD_PDL=wanted).stdout == f"1 {early}\n"


@pytest.mark.parametrize(("op", "marked"), [*product(IN_GATE, ["not slow"]), *slow(*product(CHOSEN, [""]))])
def test_op(op: str, marked: str, package: Path) -> None:
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
        "-m",
        marked,
    ]
    done = python(package, *command, f"tests/ops/test_{op}.py", SIMT_SEED="3")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    launches = re.findall(r"(\d+) launches", done.stdout)
    assert launches and int(launches[0]) > 0, done.stdout[-3000:]
