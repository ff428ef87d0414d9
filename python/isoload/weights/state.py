"""State: which expert lies in which row of a saved state, a rank's own or the full one of all experts.

A rank's state holds, beside its stacks [homes, ...], the experts of their rows, so that it loads into any placement
where the rank is home to some of these experts. The full state has stacks [E, ...] and loads into any placement.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isoload.experts.weights import DTYPES, NAMES

HOMES = "home_experts"  # [homes] int64, beside the stacks of a rank
FULL = "experts."  # prefix of the stacks [E, ...] of a full state


def check_kind(key: str, given: Tensor, held: Tensor) -> None:
    """Raises ValueError where loading would cast quantised weights, whose values say nothing alone, or scales."""
    plain = given.dtype in DTYPES and held.dtype in DTYPES and "_scale" not in key.rpartition(".")[2]
    if given.dtype != held.dtype and not plain:
        raise ValueError(f"{key} must be {held.dtype} as the layer's experts, got {given.dtype}")


def rows_for(homes: Sequence[int], state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The state with the rows under the prefix in the order of these homes, and without their names."""
    held = [key for key in state if key.startswith(prefix)]
    rows = {key: value for key, value in state.items() if key != prefix + HOMES}
    if not held:
        return rows
    if prefix + HOMES not in state:
        raise ValueError(
            f"state_dict must have {prefix}{HOMES}, the experts of its rows, which older versions did not save: set it "
            "to layer.weights[i].layout.homes as under the placement of that time, got none"
        )
    saved = state[prefix + HOMES].tolist()
    missing = sorted(set(homes) - set(saved))
    if missing:
        raise ValueError(
            f"{prefix}{HOMES} must hold experts {missing}, at home on this rank, got {saved}: load what "
            "merge_states makes of all ranks' files by load_full_state_dict"
        )
    if saved == list(homes):
        return rows
    if any(key.startswith(f"{prefix}parametrizations.") for key in held):
        raise ValueError(f"{prefix}{HOMES} must be {list(homes)} for parametrized experts, got {saved}")
    index = [saved.index(expert) for expert in homes]
    for key in (prefix + name for name in NAMES if prefix + name in rows):
        if len(rows[key]) != len(saved):
            raise ValueError(f"{key} must have {len(saved)} rows as {prefix}{HOMES}, got {len(rows[key])}")
        rows[key] = rows[key][index]
    return rows


def merge_states(states: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, Any]:
    """One layer's full state, from the states of all ranks: for :meth:`isoload.MoE.load_full_state_dict`.

    Args:
        states: state_dict() of every process, in any order; what is not a rank's is taken from the first.
        prefix: of the layer's keys in them, "model.layers.3.mlp." for example.

    Raises:
        ValueError: if they do not say which experts they hold, or do not hold every expert once.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(weights\.\d+\.)({'|'.join(NAMES)})")
    own = [key for key in states[0] if key.startswith(prefix) and not key.startswith(prefix + "weights.")]
    full = {key.removeprefix(prefix): states[0][key] for key in own}
    rows: dict[str, dict[int, Tensor]] = {}
    for number, state in enumerate(states):
        for key, value in state.items():
            if (match := pattern.fullmatch(key)) is None:
                continue
            homes = f"{prefix}{match[1]}{HOMES}"
            if homes not in state:
                raise ValueError(f"states[{number}] must have {homes}, the experts of its rows, got none")
            for expert, row in zip(state[homes].tolist(), value, strict=True):
                if expert in rows.setdefault(match[2], {}):
                    raise ValueError(f"states must hold every expert once, got expert {expert} in several")
                rows[match[2]][expert] = row
    for name, found in rows.items():
        if missing := sorted(set(range(max(found, default=-1) + 1)) - set(found)):
            raise ValueError(f"states must hold every expert once, got none of {missing} for {name}")
        full[FULL + name] = torch.stack([found[expert] for expert in range(len(found))])
    return full
