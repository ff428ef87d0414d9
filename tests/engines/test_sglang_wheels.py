"""The oldest and the newest SGLang that isoload attaches to, unpacked by `make test-sglang-wheels`: signatures alone.

Their sources are parsed, nothing of them is imported. Of each option the oldest version that has all of its seams, and
the one before it, which must not.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isoload.engines.seams import Seam, read_seams
from support.wheels import holds

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "build" / "sglang"
WATERFILL, EPLB, SHADOW = "Waterfill", "--eplb-algorithm isoload", "ISOLOAD_MODE=shadow"
SPARE = "ISOLOAD_SPARE_SLOTS"
ATTACHED = {
    "0.5.13": set(),
    "0.5.14": {WATERFILL},  # in its older home
    "0.5.16": {WATERFILL},
    "0.5.17": {WATERFILL, EPLB},
    "0.5.20": {WATERFILL, EPLB},
    "0.5.21": {WATERFILL, EPLB, SHADOW},
    "0.5.22": {WATERFILL, EPLB, SHADOW},
    "0.5.23": {WATERFILL, EPLB, "dynamic", "lp", SHADOW, SPARE},
    "newest": {WATERFILL, EPLB, "dynamic", "lp", SHADOW, SPARE},
}


def attached(root: Path) -> set[str]:
    """The options whose seams all hold."""
    seams = read_seams("sglang")
    options = {option for seam in seams for option in seam.serves}
    return options - {option for seam in seams if not holds(root, seam) for option in seam.serves or options}


@pytest.mark.slow
@pytest.mark.parametrize("version", ATTACHED)
def test_options_of_a_version(version: str) -> None:
    root = WHEELS / version
    if not (root / "sglang").is_dir():
        pytest.skip(f"{root.relative_to(ROOT)} is not there: make test-sglang-wheels")
    assert attached(root) == ATTACHED[version]


def test_the_make_target_unpacks_these_and_the_page_names_the_oldest() -> None:
    unpacked = re.search(r"^SGLANG_WHEELS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert unpacked is not None and unpacked[1].split() == list(ATTACHED)
    page = (ROOT / "docs" / "sglang.md").read_text()
    for option in ATTACHED["newest"]:
        oldest = next(version for version, options in ATTACHED.items() if option in options)
        assert re.search(rf"^\| `?[^|]*{option}[^|]* \| `{re.escape(oldest)}` ", page, re.M), (option, oldest)


def test_a_source_is_read_as_an_import_would_be(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text(
        "class Waterfill:\n    def __init__(self, rank: int, *, weight: float = 1.0) -> None: ...\n"
        "class Fields:\n    table: int\n    @property\n    def size(self): ...\n"
        "def route(ids, valid=None, *rest, **more): ...\n"
    )

    def seam(target: str, kind: str, *signatures: str, older: str = "") -> Seam:
        return Seam(target, kind, signatures, "1", "", (), older)  # type: ignore[arg-type]

    good = [
        seam("engine.Waterfill", "replace", "(rank, *, weight=1.0)"),
        seam("engine.gone.Waterfill", "replace", "(rank, *, weight=1.0)", older="engine.Waterfill"),
        seam("engine.Fields", "fields", "table", "size"),
        seam("engine.route", "call", "(ids, valid=None, *rest, **more)"),
    ]
    bad = [
        seam("engine.Waterfill", "replace", "(rank, *, weight)"),
        seam("engine.Fields", "fields", "table", "rank"),
        seam("engine.other", "call", "()"),
        seam("nowhere.other", "call", "()"),
    ]
    assert all(holds(tmp_path, one) for one in good) and not any(holds(tmp_path, one) for one in bad)
