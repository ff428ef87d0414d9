"""Storage: a rank's weight rows of a layer in one tensor per stack, allocated once: Parameters first, then replicas.

Storages are not buffers: code that copies or averages buffers (EMA) would write home rows a second time. A Parameter
may get other memory: ``p.data = x``, flat buffers (ZeRO, FSDP), functional_call, parametrize; the layer then reads the
home rows from it. A rank's saved state holds, with its stacks [homes, ...], the experts of their rows; the full state
has stacks [E, ...]. Over processes every key of a rank's part contains ``rank_1_of_4``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer

from isoload.transport import Group
from isoload.weights.checkpoints import Checkpoint
from isoload.weights.experts import DTYPES, NAMES, ExpertWeights
from isoload.weights.layout import Layout, Move, move_rows
from isoload.weights.quantised import check_stay

HOMES = "home_experts"  # [homes] int64, saved with the stacks of a rank
FULL = "experts."  # prefix of the stacks [E, ...] of a full state


PART = re.compile(r"\brank_\d+_of_\d+\.")
WHOLE = (
    "on all ranks call isoload.save(model, optimizer, folder), or model.save_pretrained(folder) of a transformers "
    "model that isoload.balance changed, or save isoload.layer.ProgramState(model, optimizer) by "
    "torch.distributed.checkpoint"
)


def without_part(key: str) -> str:
    return PART.sub("", key, count=1)


def check_whole(keys: Iterable[str]) -> None:
    if parts := [key for key in keys if PART.search(key)]:
        raise ValueError(
            f"state_dict must hold the experts of all ranks, got {parts[0]}, which holds those of one rank: {WHOLE}"
        )


class PartTensor(Tensor):
    """A tensor of one rank's part of a state: torch.save pickles a plain one, writers of one process's state raise."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    content = "the optimizer state of the experts"

    def untyped_storage(self) -> NoReturn:
        raise ValueError(f"this state holds {self.content} of only one rank: {WHOLE}")

    def contiguous(self, *how: Any, **options: Any) -> NoReturn:  # type: ignore[override]
        self.untyped_storage()

    def __create_write_items__(self, key: str, value: object) -> NoReturn:
        raise ValueError(no_distributed_checkpoint(key))

    def __create_chunk_list__(self) -> NoReturn:
        raise TypeError(no_distributed_checkpoint(self.content))  # torch hides a ValueError

    def plain(self) -> Tensor:
        return self.as_subclass(Tensor)  # type: ignore[arg-type]

    def to(self, *how: Any, **options: Any) -> Tensor:  # optimizers load their state by this call
        return self.plain().to(*how, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> PartTensor:
        return self.plain().clone().as_subclass(type(self))


class PartIndex(PartTensor):
    """The experts [homes] of the rows of one rank's part, int64."""

    @property
    def content(self) -> str:  # type: ignore[override]
        return f"the experts {self.plain().tolist()}"


class ExpertParameter(nn.Parameter):
    """Expert Parameter of one of several ranks, until an optimizer reads its ``is_leaf``. From then on that optimizer
    marks its state in ``state_dict()``, and the Parameter has torch's own class, which foreach kernels need.
    """

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        leaf = super().is_leaf
        taker = sys._getframe(1).f_locals.get("self")
        if isinstance(taker, Optimizer):
            if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(taker).__mro__):
                raise ValueError(
                    "experts must not be in a ZeroRedundancyOptimizer, which gives every rank those of one rank: give "
                    "layer.expert_parameters() of all layers an optimizer of their own, got experts of one of several "
                    "ranks"
                )
            self.__class__ = nn.Parameter  # type: ignore[assignment]
            if taker not in _TAKEN:
                taker.register_state_dict_post_hook(_mark_experts)
            _TAKEN.setdefault(taker, set()).add(id(self))
        return leaf


# For each optimizer the ids of the expert Parameters that it took.
_TAKEN: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()


def _mark_experts(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Mark the state of one rank's experts in an optimizer's state_dict; the optimizer does not change."""
    numbers: dict[int, int] = {}  # as torch numbers them
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        numbers.setdefault(id(parameter), number)
    values = state["state"]
    for number in {number for i, number in numbers.items() if i in _TAKEN[optimizer]} & values.keys():
        values[number] = {
            key: value.detach().as_subclass(PartTensor) if getattr(value, "ndim", 0) else value
            for key, value in values[number].items()
        }


def no_distributed_checkpoint(key: str) -> str:
    return (
        f"torch.distributed.checkpoint would keep one rank's experts of the state dicts of a model and its optimizer, "
        f"got {key}: save and load isoload.layer.ProgramState(model, optimizer) in their place"
    )


def check_kind(key: str, loaded: Tensor, stored: Tensor) -> None:
    """Raise ValueError if loading would cast scales, or quantised weights, which are meaningless in another dtype."""
    plain = loaded.dtype in DTYPES and stored.dtype in DTYPES and "_scale" not in key.rpartition(".")[2]
    if loaded.dtype != stored.dtype and not plain:
        raise ValueError(f"{key} must be {stored.dtype} as the layer's experts, got {loaded.dtype}")


def rows_for(homes: Sequence[int], state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the state with the rows under the prefix in the order of these homes, and without HOMES."""
    keys = [key for key in state if key.startswith(prefix)]
    rows = {key: value for key, value in state.items() if key != prefix + HOMES}
    if not keys:
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
    if any(key.startswith(f"{prefix}parametrizations.") for key in keys):
        raise ValueError(f"{prefix}{HOMES} must be {list(homes)} for parametrized experts, got {saved}")
    index = [saved.index(expert) for expert in homes]
    for key in (prefix + name for name in NAMES if prefix + name in rows):
        if len(rows[key]) != len(saved):
            raise ValueError(f"{key} must have {len(saved)} rows as {prefix}{HOMES}, got {len(rows[key])}")
        rows[key] = rows[key][index]
    return rows


STORED = {name: f"stored_{name}" for name in NAMES}


def new_stack(like: Tensor, rows: int) -> Tensor:
    return like.new_zeros(rows, *like.shape[1:])


class RankWeights(nn.Module):
    """One rank's weight rows of a layer, from the stacks of all E experts or their checkpoint (`dense`). The last
    `spare_slots` local slots are for borrowed experts, whose rows are numbered from num_rows on.
    """

    reads_elsewhere = False  # whether home rows are computed from Parameters that are registered elsewhere
    row_of_slot: Tensor
    stored_down: Tensor
    stored_down_scale: Tensor | None

    def __init__(
        self,
        layout: Layout,
        dense: ExpertWeights | Checkpoint,
        num_rows: int,
        spare_slots: int = 0,
        new_stack: Callable[[Tensor, int], Tensor] = new_stack,
    ) -> None:
        super().__init__()
        self.layout = layout
        experts, num_homes = layout.experts, len(layout.homes)
        for name in NAMES:
            rows = dense.rows(name, experts)
            stored = None if rows is None else new_stack(rows, num_rows)
            if rows is not None and stored is not None:
                stored[: len(experts)] = rows
            homes = None if stored is None else nn.Parameter(stored[:num_homes], dense.trains(name))
            self.register_parameter(name, homes)
            setattr(self, f"stored_{name}", stored)
        self.place_rows(num_rows, spare_slots, self.stored_down.device)

    def place_rows(self, num_rows: int, spare_slots: int, device: torch.device) -> None:
        """Record the row of every slot; the end of construction."""
        self.num_rows, self.spare_slots = num_rows, spare_slots
        self.gradient_divisor = 1  # of the home rows' gradients
        self.had_gradients = False  # so an optimizer may keep state of the home rows
        self.row_of_slot = torch.tensor(self._rows(self.layout), dtype=torch.int64, device=device)
        self._made_parameters = dict(self.named_parameters(recurse=False))
        stored = self.stored() if self.stored_down_scale is not None else {}
        # Recorded because a cast, by .to(dtype), changes the storages together with the Parameters.
        self.fixed_dtypes = {name: s.dtype for name, s in stored.items() if not name.endswith("_bias")}
        self._refreshed: list[tuple[Tensor, int]] | None = None
        self.note_refreshed()

    def replaced(self) -> list[str]:
        """Return the stacks whose Parameter was replaced after construction, as fully_shard does."""
        now = self.named_parameters(recurse=False)
        return [
            name for name, p in now if p is not self._made_parameters[name] and isinstance(p, nn.Parameter)
        ]

    def homes(self) -> dict[str, Tensor]:
        """Return the home rows [homes, ...] by stack: the Parameters."""
        homes: dict[str, Tensor] = {}
        for name in NAMES:  # a loop, because this runs in every batch, and a comprehension is one call more
            if (parameter := getattr(self, name)) is not None:
                homes[name] = parameter
        return homes

    def home_rows(self) -> list[Tensor]:
        return list(self.homes().values())

    def stored(self) -> dict[str, Tensor]:
        """Return the storages [rows, ...] by stack."""
        stored: dict[str, Tensor] = {}
        for name in NAMES:
            if (stack := getattr(self, STORED[name])) is not None:
                stored[name] = stack
        return stored

    def stored_rows(self) -> list[Tensor]:
        return list(self.stored().values())

    def replica_rows(self) -> list[Tensor]:
        return [stack[len(self.layout.homes) :] for stack in self.stored_rows()]

    def shows_storage(self) -> bool:
        """Return whether the Parameters are in the storages, without a host wait; fake tensors always are."""
        return lie_in(self.home_rows(), self.stored_rows())

    def readable_homes(self) -> list[Tensor]:
        """Return contiguous stacks that begin with the home rows: the storages, or Parameters in other memory."""
        if self.shows_storage():
            return self.stored_rows()
        return [home.detach().contiguous() for home in self.home_rows()]

    def note_refreshed(self) -> None:
        self._refreshed = self.marks()

    def is_refreshed(self) -> bool:
        """Return whether torch counts no change of the home rows since the refresh (fused steps are not counted)."""
        return self._refreshed is not None and self.is_marked(self._refreshed)

    def is_marked(self, marks: Sequence[tuple[Tensor, int]]) -> bool:
        return all(
            isinstance(home, FakeTensor) or (home.data_ptr(), now) == (noted.data_ptr(), version)
            for (home, now), (noted, version) in zip(self.marks(), marks, strict=True)
        )

    def versions(self) -> list[int]:
        return list(map(version_of, self.home_rows()))

    def marks(self) -> list[tuple[Tensor, int]]:
        """Return the home rows of every stack and how often they have changed."""
        # The alias keeps the memory alive, so that no other tensor gets the same address.
        return [(home.detach(), now) for home, now in zip(self.home_rows(), self.versions(), strict=True)]

    def check(self, replicated: bool) -> None:
        homes, storages = self.homes(), self.stored()
        if homes.keys() != storages.keys():
            raise ValueError(f"experts must have the stacks {list(storages)}, got {list(homes)}")
        for name, home in homes.items():
            stored = storages[name]
            wanted = [len(self.layout.homes), *stored.shape[1:]], stored.dtype, stored.device
            if (actual := (list(home.shape), home.dtype, home.device)) != wanted:
                raise ValueError(
                    f"{name} must be {' '.join(map(str, wanted))}, got {' '.join(map(str, actual))}"
                )
        if self.fixed_dtypes:
            check_stay(homes, self.fixed_dtypes)
        if replicated and not self.is_refreshed():
            raise ValueError(
                "replicas must be refreshed after the expert Parameters change: call refresh_replicas() on all ranks, "
                "got Parameters that changed since"
            )

    def check_move(self) -> None:
        if not self.shows_storage():
            raise ValueError(
                "expert Parameters must be in the layer's storage to move, got memory of their own (p.data = x, a "
                "flat buffer, functional_call or parametrize)"
            )
        for name, home in self.homes().items():
            if home.grad is not None:
                raise ValueError(
                    f"expert Parameters must have no gradient (zero_grad(set_to_none=True) first), {name} has one"
                )

    def check_load(self) -> None:
        for name in self.stored():
            if not isinstance(getattr(self, name), nn.Parameter):
                raise ValueError(f"{name} must be a Parameter to be loaded, got a parametrized one")

    def by_name(self, stacks: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.stored(), stacks, strict=True))

    def weight_rows(self, slots: Tensor) -> Tensor:
        """Return local slots [N, K] as int64 weight rows; -1 stays -1."""
        return self.row_of_slot[slots]  # -1 reads the last entry

    def row_ends(self, ends: Sequence[int]) -> list[int] | None:
        """Return where the copies of every weight row end, from those of local slots [S]; None if the orders differ."""
        placed = len(ends) - self.spare_slots
        ends_by_row: list[int] = []
        for slot, row in enumerate(self._rows(self.layout)[:placed]):
            if row < 0 and ends[slot] != (ends[slot - 1] if slot else 0):
                raise ValueError(
                    f"slot {slot} must have no copies, since it holds no expert, got ends {list(ends)}"
                )
            if row >= 0 and row != len(ends_by_row):
                return None
            if row >= 0:
                ends_by_row.append(ends[slot])
        last = ends[placed - 1] if placed else 0
        return [*ends_by_row, *[last] * (self.num_rows - len(ends_by_row)), *ends[placed:]]

    def take_layout(self, layout: Layout) -> None:
        """Use the present storages for the rows of another layout; no pointer changes."""
        self.layout = layout
        self.row_of_slot.copy_(torch.tensor(self._rows(layout), device=self.row_of_slot.device))
        for home in self.home_rows():
            torch.autograd.graph.increment_version(home)  # a backward from before the move must raise
        self._show_homes()
        self.note_refreshed()

    def _rows(self, layout: Layout) -> list[int]:
        """Return [S + 1] weight row of every local slot, -1 = none, and of no slot."""
        placed = len(layout.row_of_slot) - self.spare_slots
        return [*layout.row_of_slot[:placed], *range(self.num_rows, self.num_rows + self.spare_slots), -1]

    def _show_homes(self) -> None:
        """Make each Parameter a view of the first rows of its storage."""
        for home, stored in zip(self.home_rows(), self.stored_rows(), strict=True):
            rows = stored.narrow(0, 0, len(self.layout.homes))
            if home.shape != rows.shape:
                # A graph that still exists keeps the node that accumulates gradients, and the node keeps the old shape.
                # Only data of another dtype makes torch drop the node.
                other = torch.float32 if home.dtype == torch.float64 else torch.float64
                home.data = home.new_empty(0, dtype=other)
            home.data = rows

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + HOMES] = torch.tensor(self.layout.homes, dtype=torch.int64)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *how: Any) -> None:
        state = rows_for(self.layout.homes, state, prefix)
        for name, stored in self.stored().items():
            if (loaded := state.get(prefix + name)) is not None:
                check_kind(prefix + name, loaded, stored)
            stem = name.removesuffix("_2").removesuffix("_scale")
            if stem != name and (loaded is None) != (state.get(prefix + stem) is None):
                raise ValueError(
                    f"state must hold {prefix + stem} and {prefix + name} together, got one of them"
                )
        # assign=True would replace these Parameters by Parameters with memory of their own: copy instead.
        metadata = {**metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state, prefix, metadata, *how)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RankWeights:
        before = self.shows_storage(), self.is_refreshed()
        super()._apply(fn, recurse)
        for name, stored in self.stored().items():
            setattr(self, f"stored_{name}", fn(stored))
        self.row_of_slot = fn(self.row_of_slot)
        self._made_parameters = dict(self.named_parameters(recurse=False))
        self._restore(*before)  # .to() and similar calls give the Parameters memory of their own
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_refreshed": (self.shows_storage(), self.is_refreshed())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._restore(*state["_refreshed"])  # as do deepcopy and pickle

    def _restore(self, shown: bool, refreshed: bool) -> None:
        if shown:
            self._show_homes()
        self._refreshed = None
        if refreshed:
            self.note_refreshed()


def lie_in(homes: Sequence[Tensor], stored: Sequence[Tensor]) -> bool:
    """Return whether the home rows of every stack are the first rows of its storage."""
    return all(map(_shows, homes, stored))


def _shows(home: Tensor, stored: Tensor) -> bool:
    if isinstance(home, FakeTensor) or not len(home):
        return True
    rows = home.shape[1:] == stored.shape[1:] and home.stride() == stored.stride()
    return rows and home.dtype == stored.dtype and home.data_ptr() == stored.data_ptr()


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def refresh_replicas(group: Group, ranks: Sequence[RankWeights], moves: Sequence[Move]) -> None:
    move_rows(group, "refresh", moves, [r.home_rows() for r in ranks], [r.replica_rows() for r in ranks])
    for rank in ranks:
        rank.note_refreshed()
