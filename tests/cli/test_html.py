"""--html: the pages of advise, replay, inspect and place, read as HTML."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isoload.cli.app import app
from support.documents import PLAIN, printed
from support.measured_times import written
from support.pages import missing, read_page, read_png
from support.sweeps import slow

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
    "replay-times": [*REPLAY, "--times", "times.json"],
    "inspect": INSPECT,
    "inspect-placement": [*INSPECT[:2], "--placement", "plan.json"],
    "place": PLACE,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "times.json", ranks=8, nodes=2, speeds=[1.0] * 8)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        *slow(ADVISE, REPLAY),
        [*REPLAY, "--times", "times.json"],
        *slow(INSPECT, COMMANDS["inspect-placement"]),
        PLACE,
    ],
    ids=COMMANDS,
)
def test_a_page_holds_what_json_does(command: list[str], tmp_path: Path) -> None:
    if "--placement" in command:
        printed(PLACE)
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    printed([*command, "--json", str(figures), "--html", str(page)])
    reader = read_page(page.read_text())
    found = json.loads(figures.read_text())
    assert missing(found, reader) == []
    assert missing([1234.5678, "no word of it"], reader) == [1234.5678, "no word of it"]  # it would be seen


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_without_the_extra_it_ends_before_any_work(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isoload.analysis.pages.find_spec", lambda name: None)
    words = ["nowhere.npz" if word == TRACE else word for word in command]  # no trace is read either
    assert (
        refused([*words, "--html", "page.html"])
        == "html needs vl-convert-python, which is missing: pip install 'isoload[report]'"
    )


def test_a_page_that_cannot_be_drawn_leaves_no_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*of: object) -> str:
        raise ValueError("charts must be drawn, got none")

    monkeypatch.setattr(
        import_module("isoload.analysis.pages"), "draw", fails
    )  # of that name is a function, too
    assert refused([*PLACE, "--html", "page.html"]) == "charts must be drawn, got none"


def refused(command: list[str]) -> str:
    """The error, after which every file is as it was."""
    before = {path: path.read_bytes() for path in Path().iterdir()}
    result = CliRunner().invoke(app, command, env=PLAIN)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert {path: path.read_bytes() for path in Path().iterdir()} == before
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("error: ").rstrip()


def test_a_page_replaces_a_page_and_with_force_any_file() -> None:
    target = Path("page.html")
    printed([*INSPECT, "--html", "page.html"])
    first = target.read_text()
    asked = [*PLACE, "--html", "page.html"]
    printed(asked)
    assert target.read_text() != first
    target.write_text("<html>mine</html>")
    said = "html must be a new file or replace a page, got 'page.html' of another kind, which takes --force"
    assert refused([*INSPECT, "--html", "page.html"]) == said
    printed([*INSPECT, "--html", "page.html", "--force"])
    assert target.read_text() == first
    assert refused([*INSPECT, "--html", "nowhere/page.html"]) == (
        "html must be a file in an existing folder or -, got 'nowhere/page.html'"
    )
    assert refused([*INSPECT, "--html", "new.html", "--json", "./new.html"]) == (
        "json and html must be two files, got './new.html' and 'new.html'"
    )
    assert refused([*PLACE[:-4], "-o", "new.html", "--html", "new.html"]) == (
        "output and html must be two files, got 'new.html' and 'new.html'"
    )


def test_a_page_to_stdout_stands_alone() -> None:
    read_page(printed([*INSPECT, "--html", "-"]))


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize(("width", "scheme"), [(1280, 0), (1280, 1), (400, 0), (400, 1)])
def test_a_browser_opens_the_file_and_complains_of_nothing(width: int, scheme: int, tmp_path: Path) -> None:
    """scheme: 0 dark, 1 light."""
    printed([*INSPECT, "--html", "page.html"])
    picture = tmp_path / "page.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={scheme}",
        "--enable-logging=stderr",
        "--v=0",
        f"--window-size={width},2000",
        f"--screenshot={picture}",
    ]
    opened = [str(CHROMIUM), *options, (tmp_path / "page.html").as_uri()]
    done = subprocess.run(opened, capture_output=True, text=True, timeout=240)
    assert "CONSOLE" not in done.stderr
    across, corner, drawn = read_png(picture.read_bytes())
    assert across == width and corner == ((20, 23, 26) if scheme == 0 else (255, 255, 255))
    assert drawn > 0.01
