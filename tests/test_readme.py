"""Every path and command that a document names exists and works as printed."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from isoload import POLICIES
from support.documents import blocks

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_named_paths_exist(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.S | re.M)
    quoted = re.findall(r"`([\w.-]*/[\w./-]*|[\w-]+\.(?:py|md|toml|cpp|h))`", text)
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert quoted or linked
    assert [p for p in quoted + linked if not (ROOT / p).exists()] == []


def test_the_tree_is_the_tree():
    """Names before three spaces; an indented line is inside the folder that stands last at the left edge."""
    (tree,) = [b for b in blocks(ROOT / "README.md", "") if "csrc/" in b]
    folder, seen = ROOT, set()
    for line in tree.splitlines():
        names = line.strip().split("   ")[0].split()
        base = folder if line.startswith(" ") else ROOT
        for name in names:
            assert (base / name).exists(), f"{name} in README's tree"
            seen.add((base / name).relative_to(ROOT).parts[0])
        if not line.startswith(" ") and names[-1].endswith("/"):
            folder = ROOT / names[-1]
    top = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")} - {"build"}
    assert {t for t in top if not t.endswith(".egg-info")} <= seen


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_make_targets_exist(document):
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)\b", document.read_text())):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_examples_run(document):
    commands = [[sys.executable, "-c", code] for code in blocks(document, "python")]
    for line in "".join(blocks(document, "sh")).replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["isoload"]:
            commands.append([sys.executable, "-m", *words])
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_printed_output_is_what_replay_prints():
    """Every number of README's replay table but the planning times is the same today."""
    (shown,) = blocks(ROOT / "README.md", "text")
    makefile = (ROOT / "Makefile").read_text()
    trace = re.search(r"^TRACE := (.+)$", makefile, re.M)[1]
    options = re.search(r"-m isoload (replay .+)$", makefile, re.M)[1].replace("$(TRACE)", trace)
    done = subprocess.run(
        [sys.executable, "-m", "isoload", *options.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    def stable(text):
        """Lines without their last three words (planning times), which a policy's row ends with."""
        rows = [line.split() for line in text.strip().splitlines()]
        return [row[:-3] if len(row) > 12 and row[0] in POLICIES else row for row in rows]

    assert stable(shown) == stable(done.stdout)


def test_bench_numbers_are_those_of_the_results_file():
    lines = (ROOT / "bench" / "results" / "bench_plan.jsonl").read_text().splitlines()
    readme = (ROOT / "README.md").read_text()
    assert len(lines) == 4
    for row in map(json.loads, lines):
        cells = [
            f"{row['ranks']}+{row['replicas']}",
            f"{row['plan_us']['batch']:.2f}",
            f"{row['plan_us']['single_p99']:.1f}",
            f"{row['public_us']['median']:.1f}",
            f"{row['highs_us']:.0f} ({row['highs_ratio']:.0f}x)",
            f"{row['affine_us']:.0f} ({row['affine_ratio']:.0f}x), {row['affine_gap_mean']:.1f} %",
            f"{row['share_row_us']:.1f}",
            f"{row['count_share_route_us']:.0f}",
        ]
        assert f"| {' | '.join(cells)} |" in readme


def test_training_losses_are_those_of_the_results_file():
    lines = (ROOT / "bench" / "results" / "bench_layer.jsonl").read_text().splitlines()
    rows = {
        row["policy"]: row
        for row in map(json.loads, lines)
        if row["kind"] == "virtual" and row["routing"].startswith("gptoss")
    }
    without, exact = rows["no replicas"], rows["exact"]

    def pair(key, unit, digits=0):
        return f"{exact[key] / unit:.{digits}f} MB for {without[key] / unit:.{digits}f}"

    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"from {without['busiest_copies']:.0f} to {exact['busiest_copies']:.0f} copies" in readme
    assert f"sends {pair('backward_bytes', 1e6, 1)}" in readme
    assert f"memory is {pair('training_peak_bytes', 1e6)}" in readme
    assert f"step sends {exact['refresh_bytes'] / 1e6:.1f} MB" in readme and without["refresh_bytes"] == 0
