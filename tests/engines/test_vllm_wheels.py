"""The last four minor versions of vLLM, unpacked by `make test-vllm-wheels`: the signatures of all seams."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isoload.engines.seams import Seam, read_seams
from support.wheels import definition, holds

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "build" / "vllm"
VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "newest")
SEAMS = {"ISOLOAD_VLLM=1": "vllm", "ISOLOAD_PLACEMENT": "vllm_start"}
"""The variables, and the list of the seams that each needs."""


@pytest.mark.slow
@pytest.mark.parametrize("variable", SEAMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_seam_is_in_a_version(version: str, variable: str) -> None:
    root = WHEELS / version
    if not (root / "vllm").is_dir():
        pytest.skip(f"{root.relative_to(ROOT)} is not there: make test-vllm-wheels")
    assert not [seam.target for seam in read_seams(SEAMS[variable]) if not holds(root, seam, follow=True)]


def test_the_make_target_unpacks_these_and_the_page_names_them() -> None:
    unpacked = re.search(r"^VLLM_WHEELS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert unpacked is not None and tuple(unpacked[1].split()) == VERSIONS
    page = (ROOT / "docs" / "vllm.md").read_text()
    for variable in SEAMS:
        assert re.search(rf"^\| `{variable}` \| `{re.escape(VERSIONS[0])}` ", page, re.M), variable


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

    place, route = (
        seam("engine.policy.Policy.place", "(loads, ranks=1)"),
        seam("engine.router.route", "(ids)"),
    )
    assert holds(tmp_path, place, follow=True) and holds(tmp_path, route, follow=True)
    assert definition(tmp_path, "engine.policy.Named.place", follow=True) is not None
    assert not holds(tmp_path, place) and definition(tmp_path, "engine.policy.Gone", follow=True) is None
