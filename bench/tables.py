"""Writes the tables of README.md, docs/*.md and paper_tables.md from bench/results, each between its two markers:

    <!-- table: NAME -->
    | ... |
    <!-- end -->

Usage: python bench/tables.py            # after a bench has written its results file
       python bench/tables.py --check    # writes nothing; exit status 1 and the names of tables that are not current
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import lib.cross_tables  # its tables are in TABLES, too
import lib.gpu_tables
import lib.paper_rows  # noqa: F401
from lib import table
from lib.result_tables import TABLES

ROOT = Path(__file__).parent.parent
# Rows that the pages show, by how they begin: those on which a decision or a claim of the text rests, losses included.
# All rows are in the results file that the page names. A table that is not here is shown whole.
SELECTION: dict[str, tuple[str, ...]] = {
    "ahead": (
        *("DeepSeek-V2-Lite, R=8, by sequence | 0.45 |", "DeepSeek-V2-Lite, R=8, by sequence | last"),
        *("gpt-oss-20b, R=8 | 0.45 partner", "GLM-5.2, R=8 | last", "GLM-5.2, R=32"),
    ),
    "ahead_others": ("DeepSeek-V2-Lite, R=8, by sequence", "gpt-oss-20b", "GLM-5.2"),
    "balance": (
        *("DeepSeek-V3 | no EPLB", "DeepSeek-V3 | red0", "DeepSeek-V3 | red32"),
        *("GLM-5.2 | red32 | 4096", "gpt-oss-20b | red16"),
    ),
    "borrow": (
        *(
            "gpt-oss-120b | 95 % into 1 |",
            "gpt-oss-120b | 95 % into 4",
            "DeepSeek-V3 | 95 % into 1 | distinct",
        ),
        *("DeepSeek-V3 | 95 % into 4", "Kimi-K2 | 95 % into 16"),
    ),
    "gpu_layer": ("`none`", "`dynamic`", "`exact`", "`llep`", "`hedge`"),
    "gpu_ops": (
        *("`count`", "`plan_exact`", "`route`", "`chain`", "`balancer`", "`balance_own`"),
        *("`plan_lp`", "`top_up`", "`route_shared`"),
    ),
    "known_routes": ("16",),
    "loads": ("4 |", "16 |", "64 |", "2048 |"),
    "place_budgets": ("DeepSeek-V3 | 32", "DeepSeek-V3 | 64 | 14", "GLM-5.2 | 32 | 4"),
    "place_near": (
        *("DeepSeek-V2-Lite, law", "DeepSeek-V2-Lite, intent", "DeepSeek-V2-Lite, summary | intent"),
        *("gpt-oss-20b | its others | 4", "OLMoE, first"),
    ),
    "place_unseen": ("DeepSeek-V3", "GLM-5.2 | 32", "gpt-oss-20b", "GLM-5.2, a domain"),
    "planning": ("16+32", "64+128", "128+128"),
    "published": (
        *("prefill, EP32, prompts of 4096", "the same, prompts of 4096", "decode, EP72", "EPLB's speed-up"),
        *("EPLB without redundant", "LPLB over static, 32", "Waterfill over shared experts"),
        *(
            "LLEP over EP, a layer",
            "LLEP over EP, gpt-oss-20b as",
            "experts of a layer of Qwen3MoE, 8 H200, SGLang",
            "Kimi-K3",
        ),
        *("KV cache with a replica per layer and rank, Kimi-K2, 48 A100", "goodput with EPLB's"),
        "DWDP over EP4 with an all-gather, gpt-oss-120b, 4 B200, prefill, prompts of 8192",
    ),
    "rebalance_rule": (
        "steady | `eplb`",
        "steady | `scenario` |",
        "drifting | `eplb`",
        "drifting | `scenario` |",
    ),
    "sampling": (
        "DeepSeek-V3 | 16+32 | 64",
        "DeepSeek-V3 | 128",
        "GLM-5.2 | 16+32",
        "gpt-oss-20b | 16+16 | 64",
    ),
    "sglang": (
        *("64 | their own | SGLang `dynamic`", "64 | their own | isoload", "1024 | their own", "1024 | all"),
    ),
    "vllm": ("64 | their own", "1024 | their own"),
}
START, END = re.compile(r"<!-- table: (.*) -->"), "<!-- end -->"


def pages(root: Path = ROOT) -> list[Path]:
    complete = root / "bench" / "paper_tables.md"  # of which docs/papers.md shows a part
    return [
        root / "README.md",
        *sorted((root / "docs").glob("*.md")),
        *([complete] if complete.exists() else []),
    ]


def markdown(name: str) -> list[str]:
    """Lines of a table as Markdown."""
    head, rows = TABLES[name]()
    width = head.count(" | ") + 1
    for row in rows:
        if len(row) != width:
            raise ValueError(f"table {name} has {width} columns, got a row of {len(row)}: {row}")
    if name in SELECTION:
        lines = [" | ".join(row) for row in rows]
        for start in SELECTION[name]:
            if not any(line.startswith(start) for line in lines):
                raise ValueError(f"table {name} has no row that begins with {start!r}")
        rows = [row for row, line in zip(rows, lines, strict=True) if line.startswith(SELECTION[name])]
    return table.markdown(head, rows)


def renew(text: str, page: str) -> tuple[str, list[str], list[str]]:
    """(the page with current tables, names of all its tables, names of those that changed)

    Raises ValueError where a marker names no table or the other marker of a pair is missing.
    """
    lines, out, names, changed = text.split("\n"), [], [], []
    i = 0
    while i < len(lines):
        line = lines[i]
        out.append(line)
        i += 1
        if line == END:
            raise ValueError(f"{page}:{i}: {END} without <!-- table: NAME -->")
        if not (marker := START.fullmatch(line)):
            continue
        name = marker[1]
        if name not in TABLES:
            raise ValueError(f"{page}:{i}: no table {name!r}; there are {', '.join(TABLES)}")
        last = next((j for j in range(i, len(lines)) if lines[j] == END or START.fullmatch(lines[j])), None)
        if last is None or lines[last] != END:
            raise ValueError(f"{page}:{i}: table {name} has no {END}")
        current = markdown(name)
        names.append(name)
        if lines[i:last] != current:
            changed.append(name)
        out += [*current, END]
        i = last + 1
    return "\n".join(out), names, changed


def main(root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    old = []
    for page in pages(root):
        text = page.read_text()
        new, names, changed = renew(text, page.name)
        old += changed
        print(
            f"{page.relative_to(root)}: {len(names)} tables, {len(changed)} {'not current' if check else 'new'}"
        )
        for name in changed:
            print(f"  {name}")
        if not check and changed:
            page.write_text(new)
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
