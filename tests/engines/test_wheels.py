"""The table of hooks by version is what the engines' wheels have, unpacked by `make test-wheels`: signatures alone.

Sources are parsed, nothing of them is imported. `isoload doctor` and docs/support.md show the same table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isoload.engines.seams import ENGINE_SEAMS, Seam, hooks_of, read_attached, version_ranges, versions_with
from support.wheels import UNPACKED, definition, fault, reasons, unpacked, version_of

ROOT = Path(__file__).parents[2]
ATTACHED = read_attached()
WHEELS = {
    engine: re.search(rf"^{name}_WHEELS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    for engine, name in zip(
        UNPACKED, ("SGLANG", "VLLM", "MEGATRON", "TRANSFORMERS", "TORCHTITAN"), strict=True
    )
}
VERSIONS = [(engine, version) for engine, line in WHEELS.items() if line for version in line[1].split()]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "version"), VERSIONS)
def test_the_table_is_what_a_wheel_has(engine: str, version: str) -> None:
    """A newer version than the table's must be as the table's newest."""
    if (root := unpacked(engine, version)) is None:
        pytest.skip(f"{engine} {version} is not unpacked: make test-wheels")
    table = ATTACHED[engine]
    row = table.get(version_of(root)) if version == "newest" else table[version]
    assert reasons(root, engine) == (row or list(table.values())[-1])


def test_the_table_has_every_hook_and_every_version_that_is_unpacked() -> None:
    assert list(ATTACHED) == list(UNPACKED) and set(ATTACHED) == set(ENGINE_SEAMS)
    for engine, versions in ATTACHED.items():
        assert all(list(row) == list(hooks_of(engine)) for row in versions.values()), engine
        assert {version for name, version in VERSIONS if name == engine} - {"newest"} <= set(versions), engine


def test_versions_are_joined_to_ranges() -> None:
    ranges = version_ranges("SGLang")
    assert ranges["Waterfill"][""] == f"0.5.14 to {list(ATTACHED['SGLang'])[-1]}"
    assert ranges["dynamic"]["no `resolve_routing_inputs`"] == "0.5.16 to 0.5.22"
    assert versions_with("SGLang", ["dynamic", "lp"]) == "; SGLang 0.5.23 has it"
    assert versions_with("SGLang", ["other"]) == versions_with("Engine", ["lp"]) == ""


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
        seam("engine.Waterfill", "call", "(rank)"),
        seam("engine.gone.Waterfill", "replace", "(rank, *, weight=1.0)", older="engine.Waterfill"),
        seam("engine.Fields", "fields", "table", "size"),
        seam("engine.route", "call", "(ids, valid=None, *rest, **more)"),
    ]
    bad = {
        "other parameters of `Waterfill`": seam("engine.Waterfill", "replace", "(rank, *, weight)"),
        "no field `rank` of `Fields`": seam("engine.Fields", "fields", "table", "rank"),
        "no `other`": seam("engine.other", "call", "()"),
        "no `thing`": seam("nowhere.thing", "call", "()"),
    }
    assert [fault(tmp_path, one) for one in good] == [""] * len(good)
    assert [fault(tmp_path, one) for one in bad.values()] == list(bad)


def test_names_that_are_imported_or_under_a_condition_are_found(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "policy/__init__.py": "from .default import Policy as Named\nfrom engine.policy.default import Policy\n",
        "policy/default.py": "class Policy:\n    @classmethod\n    def place(cls, loads, ranks=1): ...\n",
        "router.py": "if True:\n    def route(ids): ...\nelse:\n    def route(ids, more): ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def seam(target: str, signature: str) -> Seam:
        return Seam(target, "call", (signature,), "1", "")

    place = seam("engine.policy.Policy.place", "(loads, ranks=1)")
    assert not fault(tmp_path, place) and not fault(tmp_path, seam("engine.router.route", "(ids)"))
    assert definition(tmp_path, "engine.policy.Named.place", follow=True) is not None
    assert fault(tmp_path, place, follow=False) == "no `place`"
    assert definition(tmp_path, "engine.policy.Gone", follow=True) is None
