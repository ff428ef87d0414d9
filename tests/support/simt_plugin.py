"""pytest -p support.simt_plugin: a test fails if tests/native/simt found anything. SIMT_SEED: order of lanes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch  # noqa: F401  # the library below needs libtorch, which `import isoload` alone does not load

import isoload
from support.simt import Runtime

RUNTIME = Runtime(next(Path(isoload.__file__).parent.glob("_C*.so")))
RUNTIME.seed(int(os.environ.get("SIMT_SEED", "0")))


@pytest.fixture(autouse=True)
def nothing_found() -> Iterator[None]:
    RUNTIME.take_findings()
    yield
    found = RUNTIME.take_findings()
    assert not found, "\n".join(map(str, found))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{RUNTIME.launches} launches")
