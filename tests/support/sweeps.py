"""The two sizes of a sweep: some cases in `make test`, all of them in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Slow cases of a parametrize, or tuples of them."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
