"""State: which expert lies in which row of a saved state, a rank's own or the full one of all experts.

A rank's state holds, beside its stacks [homes, ...], the experts of their rows, so that it loads into any placement
where the rank is home to some of these experts. The full state has stacks [E, ...] and loads into any placement.

Over processes a rank's state is a part of the layer's, and every key of that part contains ``rank_1_of_4``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from isoload.weights.experts import DTYPES, NAMES

HOMES = "home_experts"  # [homes] int64, beside the stacks of a rank
FULL = "experts."  # prefix of the stacks [E, ...] of a full state


PART = re.compile(r"\brank_\d+_of_\d+\.")
WHOLE = (
    "on all ranks call isoload.save(model, optimizer, folder), or model.save_pretrained(folder) of a transformers "
    "model that isoload.balance changed"
)


def part_name(rank: int, num_ranks: int) -> str:
    """Return the piece of a key that marks one rank's part of a state."""
    return f"rank_{rank}_of_{num_ranks}."


def without_part(key: str) -> str:
    """Return a key without the mark of a rank's part."""
    return PART.sub("", key, count=1)


def check_whole(keys: Iterable[str]) -> None:
    """Raise ValueError if a state holds one rank's experts alone."""
    if parts := [key for key in keys if PART.search(key)]:
        raise ValueError(
            f"state_dict must hold the experts of all ranks, got {parts[0]}, which holds those of one rank: {WHOLE}"
        )


class PartIndex(Tensor):
    """The experts [homes] of the rows of one rank's part, int64.

    The tensor pickles as a plain one, so that every rank can save its own part with torch.save. Writers that keep the
    state of one process alone raise: safetensors' save_model, accelerate and torch.distributed.checkpoint.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def untyped_storage(self) -> NoReturn:
        raise ValueError(f"this state holds the experts of one rank alone, {self.plain().tolist()}: {WHOLE}")

    def contiguous(self, *how: Any, **options: Any) -> NoReturn:  # type: ignore[override]
        self.untyped_storage()

    def __create_write_items__(self, key: str, value: object) -> NoReturn:
        raise ValueError(no_distributed_checkpoint(key))

    def plain(self) -> Tensor:
        """Return the tensor as a plain one."""
        return self.as_subclass(Tensor)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> PartIndex:
        return self.plain().clone().as_subclass(PartIndex)


def no_distributed_checkpoint(key: str) -> str:
    """Return why torch.distributed.checkpoint cannot save or load a key of a rank's part."""
    return f"torch.distributed.checkpoint cannot save or load experts over ranks yet, got {key}: {WHOLE}"


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
            f"{prefix}{HOMES} must hold experts {missing}, whose home is this rank, got {saved}, as another rank's "
            "state has: load the state that this rank saved, or save and load the whole program by isoload.save and "
            "isoload.load"
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
