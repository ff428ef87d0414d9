"""tests/native/simt sees what it says it sees: small kernels, right and wrong (probes.cu)."""

from __future__ import annotations

import faulthandler
import os
from ctypes import CDLL, c_bool, c_int32, c_int64

import pytest

from support import simt_build
from support.simt import Runtime

pytestmark = pytest.mark.slow  # compiles for half a minute
LANES = 64
# name: the kinds that are found, on two blocks
PROBES = {
    "block_barrier": set(),
    "no_barrier": {"race"},
    "a_warp_barrier_between_warps": {"race"},
    "a_static_array": {"race"},
    "blocks_have_their_own_static<kLanes>": set(),
    "global_memory": {"race"},
    "warp_barrier": set(),
    "a_shuffle_orders_nothing": {"race"},
    "half_a_warp_each": {"race"},
    "a_chain_of_masks": set(),
    "a_broken_chain": {"race"},
    "a_write_after_reads": {"race"},
    "blocks_write_their_own": set(),
    "blocks_write_the_same": {"race"},
    "blocks_add_to_the_same": set(),
    "an_atomic_beside_a_read": {"race"},
    "bytes_of_one_word": set(),
    "a_byte_of_a_word": {"race"},
    "uninitialised": {"uninitialised"},
    "uninitialised_static": {"uninitialised"},
    "beyond": {"bounds"},
    "before": {"bounds"},
    "a_copy_waited_for": set(),
    "a_copy_not_waited_for": {"uninitialised", "copy"},
    "warp_values": set(),
}
# Of kernels that start before the one ahead of them has ended: what is said of them.
EARLY = {
    "an_early_start": "",
    "an_early_read": "reads global memory",
    "an_early_write": "writes global memory",
    "an_early_copy": "reads global memory",
    "an_early_atomic": "writes global memory",
    "the_next_before_the_wait": "lets the next kernel start",
    "a_block_that_never_waits": "lane 0 of block 0 leaves",
}


class Probes(Runtime):
    def run(self, name: str, blocks: int = 1, early: bool = False) -> tuple[list[int], list[int]]:
        result, order = (c_int32 * LANES)(), (c_int32 * LANES)()
        run = CDLL(str(self.library)).probe
        assert run(name.encode(), c_int64(blocks), c_bool(early), result, order), name
        return list(result), list(order)


@pytest.fixture(scope="module")
def probes() -> Probes:
    runtime = [(path, simt_build.RUN_TIME) for path in sorted(simt_build.RUNTIME.glob("*.cpp"))]
    source = simt_build.RUNTIME / "probes.cu"
    return Probes(simt_build.link([(source, simt_build.KERNELS), *runtime], source.parent, [], []))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", PROBES)
def test_finds(name: str, seed: int, probes: Probes) -> None:
    probes.seed(seed)
    probes.take_findings()
    result, _ = probes.run(name, 2)
    found = probes.take_findings()
    told = {finding.kind for finding in found}
    if "race" in told:
        told.discard("uninitialised")  # whether the reader comes first depends on the order
    assert told == PROBES[name], "\n".join(map(str, found))
    assert all(finding.kernel == name.split("<")[0] or "<" in name for finding in found)
    if name == "warp_values":
        assert result == [0] * LANES


@pytest.mark.parametrize("name", EARLY)
def test_a_kernel_that_starts_early_waits_first(name: str, probes: Probes) -> None:
    probes.seed(0)
    probes.take_findings()
    before = probes.early_launches
    probes.run(name, 2, early=True)
    found = probes.take_findings()
    said = [(finding.kind, finding.kernel) for finding in found]
    assert said == [("early", name)] * bool(EARLY[name]), "\n".join(map(str, found))
    assert all(EARLY[name] in finding.text for finding in found)
    assert probes.early_launches == before + 1


def test_a_race_names_both_lines(probes: Probes) -> None:
    probes.take_findings()
    probes.seed(0)
    probes.run("a_write_after_reads")
    found = probes.take_findings()
    race = next(
        finding for finding in found if "write by lane 40 of block 0 after read by lane" in finding.text
    )
    lines = (simt_build.RUNTIME / "probes.cu").read_text().splitlines()
    assert "dynamic()[5] = 1" in lines[race.frames[0].line - 1]
    assert "dynamic()[5];" in lines[race.other[0].line - 1]


@pytest.mark.parametrize("name", ["a_lane_leaves", "a_foreign_mask"])
def test_a_barrier_that_never_opens_ends_the_process(name: str, probes: Probes) -> None:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        faulthandler.disable()  # pytest's would print every thread's stack
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        probes.tell(write)
        probes.run(name)
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as told:
        (finding,) = probes.findings_in(told.read())
    assert os.WIFSIGNALED(status) and finding.kind == "stuck" and finding.kernel == name


def test_a_seed_draws_the_order_of_lanes(probes: Probes) -> None:
    orders = []
    for seed in (0, 1, 1, 2):
        probes.seed(seed)
        orders.append(probes.run("order_of_lanes")[1])
        assert sorted(orders[-1]) == list(range(LANES))
    probes.take_findings()
    assert orders[0] == list(range(LANES))
    assert orders[1] == orders[2] and orders[1] != orders[3] and orders[1] != orders[0]


def test_a_skipped_barrier_is_a_race(probes: Probes) -> None:
    """In a child: nothing brings a skipped barrier back."""
    probes.take_findings()
    probes.watch(barriers=True)
    probes.run("block_barrier")
    probes.watch()
    (barrier,) = (barrier for barrier in probes.take_barriers() if barrier.kernel == "block_barrier")
    assert not probes.take_findings()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        probes.tell(write)
        probes.watch(barriers=True)
        probes.skip(barrier.number)
        probes.run("block_barrier")
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as told:
        assert "race" in {finding.kind for finding in probes.findings_in(told.read())}
