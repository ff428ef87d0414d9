"""Every path and command that a document names exists and works as printed."""

import re
import shlex
from pathlib import Path

import pytest

from support.documents import blocks, printed
from support.processes import run_program

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_named_paths_exist(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.S | re.M)
    quoted = re.findall(r"`([\w.-]*/[\w./-]*|[\w-]+\.(?:py|md|toml|cpp|h))`", text)
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert quoted or linked
    for path in quoted:  # X stands for an op's name: a planner's, or that of an op over tokens
        assert any(
            (ROOT / re.sub(r"\bX\b|(?<=_)X\b", op, path)).exists() for op in ("plan_exact", "route")
        ), path
    for path in linked:
        assert (document.parent / path).exists(), path


def test_the_tree_is_the_tree():
    """Names before three spaces; an indented line is inside the folder that stands last at the left edge."""
    (tree,) = [b for b in blocks(ROOT / "CONTRIBUTING.md", "") if "\nbench/" in b]
    folder, seen = ROOT, set()
    for line in tree.splitlines():
        names = line.strip().split("   ")[0].split()
        base = folder if line.startswith(" ") else ROOT
        for name in names:
            assert (base / name).exists(), f"{name} in the tree"
            seen.add((base / name).relative_to(ROOT).parts[0])
        if not line.startswith(" ") and names[-1].endswith("/"):
            folder = ROOT / names[-1]
    top = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")} - {"build", "dist"}
    assert {t for t in top if not t.endswith(".egg-info")} <= seen


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_make_targets_exist(document):
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)\b", document.read_text())):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_examples_run(document, monkeypatch, tmp_path):
    for folder in (
        "examples",
        "bench",
        "tests",
        "python",
    ):  # files that an example writes stay out of the repository
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    for code in blocks(document, "python"):
        status, said = run_program(code, tmp_path)
        assert status == 0, f"{code}\n{said}"
    shown = "".join(blocks(document, "sh") + blocks(document, "console")).replace("\\\n", "")
    for line in shown.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["isoload"]:
            few = ["--max-batches", "2"] if words[1] == "replay" else []  # .ci/first_hour runs them whole
            assert printed([*words[1:], *few])


def test_the_replay_file_is_what_make_run_replays():
    """So says bench/README.md, whose command tests/cli/test_cli.py runs and compares with the file."""
    makefile = (ROOT / "Makefile").read_text()
    trace = re.search(r"^TRACE := (.+)$", makefile, re.M)[1]
    options = re.search(r"-m isoload (replay .+)$", makefile, re.M)[1].replace("$(TRACE)", trace)
    assert f"```sh\nisoload {options}\n```" in (ROOT / "docs" / "results-cpu.md").read_text()
    assert f"`isoload {options} --json FILE`" in " ".join((ROOT / "bench" / "README.md").read_text().split())


def test_readme_s_first_screen():
    """What it is, what has run, a line for each engine and for an own loop, from record to page, one picture."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    screen = "\n".join(lines[:30])
    for part in (
        "**Status.**",
        "ISOLOAD_SGLANG=1",
        "ISOLOAD_VLLM=1",
        "isoload.Balancer(",
        "isoload advise",
        "--html page.html",
        "![A step",
        "table: replay",
    ):
        assert part in screen, part
