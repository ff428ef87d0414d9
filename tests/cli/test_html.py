"""--html: the pages of advise, replay, inspect and place, read as HTML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.documents import printed
from support.pages import missing, read_page

TRACE = str(Path(__file__).parents[2] / "examples" / "traces" / "gptoss20b_decode.npz")
ADVISE = [
    "advise",
    TRACE,
    "--gpu",
    "h100",
    "--model",
    "gpt-oss-20b",
    "--ranks",
    "8",
    "--tokens-per-rank",
    "512",
]
REPLAY = [
    "replay",
    TRACE,
    "--ranks",
    "8",
    "--ranks-per-node",
    "4",
    "--max-batches",
    "2",
    "--policies",
    "none,static,exact",
]
INSPECT = ["inspect", TRACE, "--ranks", "8"]
PLACE = ["place", TRACE, "--ranks", "8", "--slots-per-rank", "5", "-o", "plan.json", "--placer", "eplb"]
COMMANDS = {
    "advise": ADVISE,
    "replay": REPLAY,
    "replay-cost": [*REPLAY, "--cost", "default"],
    "inspect": INSPECT,
    "inspect-placement": [*INSPECT[:2], "--placement", "plan.json"],
    "place": PLACE,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_page_holds_what_json_does(command: list[str], tmp_path: Path) -> None:
    if "--placement" in command:
        printed(PLACE)
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    printed([*command, "--json", str(figures), "--html", str(page)])
    reader = read_page(page.read_text())
    found = json.loads(figures.read_text())
    assert missing(found, reader) == []
    assert missing([1234.5678, "no word of it"], reader) == [1234.5678, "no word of it"]  # it would be seen
