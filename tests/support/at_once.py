"""A pytest plugin (-p support.at_once): failures as they come, so that a run that is cut short tells them too."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} failed in {report.when}:\n{report.longreprtext[-4000:]}", flush=True)
