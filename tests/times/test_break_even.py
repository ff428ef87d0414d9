"""Break-even of a borrow, by hand, and what is refused."""

from __future__ import annotations

import math

import pytest

from isoload.times.exchanges import break_even


@pytest.mark.parametrize(
    ("expert_bytes", "bandwidth", "token_us", "tokens"),
    [
        (2 * 44_040_192, 400, 0.1468, 1500),
        (2 * 44_040_192, 50, 0.1468, 12_000),
        (1000, 1, 1, 1),
        (1, 1e3, 1, 1),
    ],
)
def test_break_even(expert_bytes: float, bandwidth: float, token_us: float, tokens: int) -> None:
    assert break_even(expert_bytes, bandwidth, token_us) == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize("name", ["expert_bytes", "bandwidth", "token_us"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_break_even_refuses(name: str, value: float) -> None:
    arguments = {"expert_bytes": 1.0, "bandwidth": 1.0, "token_us": 1.0, name: value}
    with pytest.raises(ValueError, match=f"{name} must be a positive number, got {value}"):
        break_even(**arguments)
