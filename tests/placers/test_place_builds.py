"""The same slots and objectives, bit for bit, from vectors, from plain loops of another build, and in NumPy."""

from __future__ import annotations

import ctypes
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from isoload.placers.compiled import search_slots
from reference.place_scenario import place_scenario
from support.place_build import PLAIN, build_loops, calls_of

CSRC = Path(__file__).parents[2] / "csrc"

pytestmark = pytest.mark.slow


def drawn(seed, layers, experts, batches=7):
    """Loads without ties or round numbers: every sum rounds."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=(1, layers, experts)), rng.normal(size=(batches, layers, experts))
    return np.exp(1.1 * (common + 0.7 * own)) * np.pi


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return ctypes.CDLL(str(build_loops(CSRC, tmp_path_factory.mktemp("plain"), *PLAIN)))


@pytest.mark.parametrize("split", ["even", "exact"])
@pytest.mark.parametrize(("ranks", "experts", "slots"), [(32, 256, 9), (64, 256, 5), (6, 40, 8)])
def test_vectors_and_plain_loops_agree(plain, monkeypatch, ranks, experts, slots, split):
    for call in calls_of(monkeypatch, drawn(ranks, 3, experts), ranks, slots, split=split):
        for one, other in zip(search_slots(**call), search_slots(**call, library=plain), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("split", ["even", "exact"])
def test_numpy_finds_the_same_objectives(monkeypatch, split):
    for call in calls_of(monkeypatch, drawn(1, 9, 16), 6, 4, split=split):
        for one, other in zip(search_slots(**call), place_scenario(**call), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() != "x86_64", reason="reads AVX2 code"
)
def test_the_shipped_build_has_vectors_of_four(tmp_path):
    """As Python compiles it: -fwrapv, under which indices narrower than an address leave none."""
    path = build_loops(CSRC, tmp_path, *shlex.split(sysconfig.get_config_var("CFLAGS")), "-O3")
    code = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    wide = re.findall(r"<_ZNK7isoload7placers5Judge(\w+)\.avx2>:\n(.*?)\n\n", code, re.S)
    assert {name for name, body in wide if "%ymm" in body} == {"5afterEii", "5worthEi"}
