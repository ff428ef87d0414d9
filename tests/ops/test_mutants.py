"""Proof that the suite can fail: each named fault, seeded into a copy of the sources, turns its tests red."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from support import native_build
from support.changed_ops import compile_sources, link_ops
from support.mutants import OF_FILLS, OF_OWN, OF_PLACERS, Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "isoload"


MUTANTS = {
    "an id of -1 counted": Mutant(
        "csrc/cpu/count.h", "else if (id != -1)", "else if (++part[0], id != -1)", "count"
    ),
    "de-duplication off": Mutant(
        "csrc/algorithms/replica_tables.h",
        "first = slot_to_expert[q] != e;",
        "first = true;",
        "replica_tables",
    ),
    "a class shares a rank": Mutant(
        "csrc/algorithms/replica_tables.h",
        "if (free) mine = k;",
        "if (k < mine) mine = k;",
        "teams",
    ),
    "a rank counted by each of its copies": Mutant(
        "csrc/cpu/number_rows.h",
        "if (at > 0 && row[at - 1] == rank) continue;",
        "",
        "number_rows",
    ),
    "a row with the slots of all ranks": Mutant(
        "csrc/cpu/pack_rows.h", "in.space.rank_of(slots[k]) == rank", "slots[k] >= 0", "pack_rows"
    ),
    "copies beyond the places kept": Mutant(
        "csrc/cpu/group_copies.h",
        "if (present > in.num_places) return present;",
        "if (present > in.num_places) return in.num_places;",
        "every_op",
    ),
    "remainder dropped": Mutant(
        "csrc/algorithms/start.h", "each + (turn < more)", "each + 0 * (turn < more)", "plan_exact"
    ),
    "an overloaded rank forgotten": Mutant(
        "csrc/algorithms/plan_exact_paths.h",
        "if (width == excess) sides_.over.erase(source_);",
        "sides_.over.erase(source_);",
        "plan_exact",
    ),
    "bound + 1": Mutant(
        "csrc/algorithms/plan_exact_paths.h",
        "bound = paths.certify();",
        "bound = paths.certify() + 1;",
        "plan_exact",
    ),
    "poured copies left out of the level": Mutant(
        "csrc/algorithms/plan_exact.h", "R, copies + pour, R,", "R, copies, R,", "plan_exact_pour"
    ),
    "a level with room for all is passed": Mutant(
        "csrc/algorithms/least_level.h",
        "here >= of.wanted",
        "here > of.wanted",
        "least_level",
        op="plan_exact",
    ),
    "near copies spread over all nodes": Mutant(
        "csrc/algorithms/start.h",
        "if (j > first)",
        "if (false)",
        "plan_exact_objectives::test_equals_reference",
    ),
    "ties flipped": Mutant(
        "csrc/algorithms/plan_exact_paths.h",
        "key(last_hop ? room(r) : 0, r); k > most",
        "key(last_hop ? room(r) : 0, r); k >> 32 >= most >> 32",
        "plan_exact::test_equals_reference",
    ),
    "speeds ignored": Mutant(
        "csrc/algorithms/plan_exact.h",
        "in_.ticks ? int64_t(in_.ticks[r]) * ws_.load[r]",
        "in_.ticks ? int64_t(1024) * ws_.load[r]",
        "plan_exact::test_ticks",
    ),
    "sweeps overshoot": Mutant(
        "csrc/algorithms/balance.h",
        "seven_tenths(load1 - load0)",
        "2 * (load1 - load0)",
        "plan_exact::test_equals_reference",
    ),
    "a barrier removed from the sweeps": Mutant(
        "csrc/algorithms/plan_exact.h",
        "first = end;\n      team_.sync();",
        "first = end;",
        "teams",
    ),
    "a barrier removed from the factorisation": Mutant(
        "csrc/algorithms/cholesky.h",
        "if (i == k + 1) add_row(i, lane, lanes);\n    });\n    team_.sync();",
        "if (i == k + 1) add_row(i, lane, lanes);\n    });",
        "teams",
    ),
    "a barrier removed from the substitution": Mutant(
        "csrc/algorithms/cholesky.h",
        "sum * ws_.inverse[i];\n    });\n    team_.sync();",
        "sum * ws_.inverse[i];\n    });",
        "teams",
    ),
    "a tile's inverse without the longer ways": Mutant(
        "csrc/algorithms/cholesky.h",
        "add(part, row, tile + lane, k, lanes, other);",
        "add(part, row, tile + lane, tile + 1, lanes, other);",
        "plan_lp::test_equals_reference",
    ),
    "the dearest rank proves the bound": Mutant(
        "csrc/algorithms/plan_lp.h",
        "value < least ? value : least",
        "value > least ? value : least",
        "plan_lp",
    ),
    "every split is called converged": Mutant(
        "csrc/algorithms/plan_lp.h",
        "primal_ - dual_ <= in_.tolerance * primal_ ?",
        "primal_ - dual_ <= primal_ ?",
        "plan_lp::test_status_is_true",
    ),
    "ties of fractions flipped": Mutant(
        "csrc/algorithms/round_split.h",
        "fraction(j) > fraction(best)",
        "fraction(j) >= fraction(best)",
        "round_split",
    ),
    "a barrier removed from the rounding": Mutant(
        "csrc/algorithms/round_split.h",
        "quota_[p] = 0; });\n    team_.sync();",
        "quota_[p] = 0; });",
        "teams",
    ),
    "node level left out of share": Mutant(
        "python/isoload/ops/routing.py",
        "tables.data, ranks_per_node, source,",
        "tables.data, tables.num_ranks, source,",
        "share",
    ),
    "own-rank level left out of share": Mutant(
        "csrc/algorithms/share.h", "in_.locality ? load(t_.ranks[j], t_.order[i]) : 0", "0", "share"
    ),
    "an active slot too many": Mutant(
        "csrc/algorithms/plan_active.h",
        "(ws_.active[t_.ranks[j]] + 1) >",
        "ws_.active[t_.ranks[j]] >",
        "plan_active::test_small_cases_against_all_choices",
    ),
    "an idle expert takes a slot": Mutant(
        "csrc/algorithms/plan_active.h",
        "ws_.unit[e] = ws_.total[e] > 0;",
        "ws_.unit[e] = 1;",
        "plan_active::test_peak_is_the_maximum_flow_s",
    ),
    "a barrier removed from settling": Mutant(
        "csrc/algorithms/plan_active.h",
        "moved += relieve(t_.order[first + i]); });\n        team_.sync();",
        "moved += relieve(t_.order[first + i]); });",
        "teams",
    ),
    "the capacity rounded down": Mutant(
        "csrc/algorithms/plan_fill.h", "copies + most.live - 1", "copies", "plan_fill"
    ),
    "a small excess moves": Mutant(
        "csrc/algorithms/fill_level.h",
        "ws_.load[r] - level_ >= in_.min_chunk",
        "ws_.load[r] > level_",
        "plan_fill",
    ),
    "a rest of a cut expert is lost": Mutant(
        "csrc/algorithms/fill_level.h", "return pays && copies < here;", "return false;", "plan_fill"
    ),
    "an expert leaves its node": Mutant(
        "csrc/algorithms/fill_level.h", "(in_.within && !near)", "false", "plan_fill"
    ),
    "one import too many": Mutant("csrc/algorithms/fill_level.h", "ws_.free[q] == 0 ||", "", "plan_fill"),
    "imports cost nothing": Mutant(
        "csrc/algorithms/fill_level.h",
        "int64_t(peak) + most_in + most_out",
        "int64_t(peak) + most_out",
        "plan_fill",
    ),
    "exports cost nothing": Mutant(
        "csrc/algorithms/fill_level.h",
        "int64_t(peak) + most_in + most_out",
        "int64_t(peak) + most_in",
        "plan_fill",
    ),
    "an expert stays on a rank after its level": Mutant(
        "csrc/algorithms/plan_fill.h", "attempt.undo();", "", "plan_fill"
    ),
    "a move read while it is written": Mutant(
        "csrc/algorithms/plan_fill.h",
        "ws_.queue[before] = ws_.slots[i];\n    });\n    team_.sync();",
        "ws_.queue[before] = ws_.slots[i];\n    });",
        "teams",
    ),
    **OF_FILLS,
    **OF_OWN,
    **OF_PLACERS,
    "a share dealt one short": Mutant(
        "csrc/cpu/route.h", "--hands_[e].left == 0", "--hands_[e].left <= 1", "route"
    ),
    "every copy draws the same": Mutant(
        "csrc/cpu/route.h", "random_word(seed, i))", "random_word(seed, 0))", "route"
    ),
    "a shared slot in front of the routed": Mutant(
        "csrc/cpu/append_shared_expert.h",
        "ranks[j] * S + routed + j",
        "ranks[j] * S + j",
        "append_shared_expert",
    ),
    "no preference for the own rank": Mutant(
        "csrc/algorithms/route_shared_sampled.h", "room * 10 / 11", "room", "route_shared_sampled"
    ),
    "a level one too high": Mutant(
        "csrc/algorithms/plan_waterfill.h",
        "return top > mean ? top : mean;",
        "return (top > mean ? top : mean) + 1;",
        "plan_waterfill",
    ),
    "excess leaves the node first": Mutant(
        "csrc/algorithms/plan_waterfill.h",
        "int size = in_.per_node;;",
        "int size = in_.R;;",
        "plan_waterfill",
    ),
    "spread loses a copy": Mutant(
        "csrc/algorithms/visit_flow.h", "before < left)", "before + 1 < left)", "plan_waterfill"
    ),
    "the flow to visited ranks left as it started": Mutant(
        "csrc/algorithms/visit_flow.h", "if (depth < 0) break;", "if (depth < in_.R) break;", "plan_waterfill"
    ),
    "a pour read while the next is written": Mutant(
        "csrc/algorithms/plan_waterfill.h",
        "ws_.room[r] - wanted : 0;\n    });\n    team_.sync();",
        "ws_.room[r] - wanted : 0;\n    });",
        "teams",
    ),
    "ranks choose tokens in rank order": Mutant(
        "csrc/cpu/route_shared.h",
        "return spare(a, budget) < spare(b, budget);",
        "return a < b;",
        "route_shared::test_is_near_the_best_matching",
    ),
    "static forgets the node": Mutant(
        "python/isoload/policies/exact.py",
        "slots[first : first + topology.ranks_per_node] = near",
        "slots[first] = near",
        "planning",
    ),
    "a layer's random stream is every layer's": Mutant(
        "python/isoload/policies/base.py",
        "mix(seed, step + plan.step)",
        "mix(seed, 0)",
        "planning",
    ),
}


def seed_fault(mutant: Mutant, folder: Path) -> None:
    """Copies csrc and the package into `folder` and puts the fault in."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(PACKAGE, folder / "python" / "isoload", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} must hold exactly once: {mutant.old}"
    file.write_text(text.replace(mutant.old, mutant.new))


def fails(mutant: Mutant, folder: Path, objects: list[Path]) -> tuple[bool, str]:
    """Whether the fault was noticed, and what was said."""
    seed_fault(mutant, folder)
    if mutant.tests == "teams":
        program = native_build.build(folder / "csrc", folder / "teams", native_build.THREAD)
        outcome = native_build.run(program, threads=8, instances=60, seed=1, room=64)
        return outcome.code not in (0, -1), outcome.text
    if mutant.file.startswith("csrc"):
        link_ops(folder, mutant.file, mutant.op or family(mutant), objects)
    file, _, test = mutant.tests.partition("::")
    where = str(next((ROOT / "tests").rglob(f"test_{file}.py"))) + (f"::{test}" if test else "")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", where]
    if test:  # all of its cases, the slow ones too
        command += ["-m", ""]
    environment = {**os.environ, "PYTHONPATH": str(folder / "python")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    return (
        done.returncode == 1,
        done.stdout + done.stderr,
    )  # 1: tests failed; anything else is our own mistake


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return compile_sources(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, objects: list[Path]
) -> Iterator[dict[str, Future[tuple[bool, str]]]]:
    """The mutants that this session runs, at work on all cores; a test waits for its own."""
    chosen = [
        item.callspec.params["name"] for item in request.session.items if "verdicts" in item.fixturenames
    ]
    folder = tmp_path_factory.mktemp("mutants")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            name: pool.submit(fails, MUTANTS[name], folder / str(i), objects) for i, name in enumerate(chosen)
        }
        pool.shutdown(cancel_futures=True)


def family(mutant: Mutant) -> str:
    """The op whose tests must notice; the planners on threads are a family of their own."""
    return mutant.tests.partition("::")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_fault_turns_the_suite_red(name: str, verdicts: dict[str, Future[tuple[bool, str]]]) -> None:
    if MUTANTS[name].tests == "teams":
        native_build.need(native_build.THREAD)
    noticed, said = verdicts[name].result()
    assert noticed, f"nobody noticed: {name}\n{said[-2000:]}"


@pytest.mark.slow
def test_no_fault_stays_green(tmp_path: Path, objects: list[Path]) -> None:
    """The same road without a fault: red above means the fault, not the road."""
    same = Mutant("csrc/cpu/count.h", "part[id]++;", "part[id]++;", "count")
    noticed, said = fails(same, tmp_path, objects)
    assert not noticed and "[100%]" in said, said[-2000:]


def test_the_gate_runs_a_mutant_of_each_family() -> None:
    listed = set(
        re.findall(r"test_fault_turns_the_suite_red\[(.*)\]", (ROOT / ".ci/slow_tests.txt").read_text())
    )
    assert listed <= MUTANTS.keys()
    assert {family(MUTANTS[name]) for name in listed} == {family(mutant) for mutant in MUTANTS.values()}
