"""Storage: a rank's weight rows of a layer in one tensor per stack, Parameters first, replicas behind them.

The storage is made once and never again. Its first rows are the home rows, which the Parameter shows, then come the
replica rows, which are kept equal to their homes, then rows that nothing uses yet. Replica gradients return to the
home row, so an optimizer sees each expert once. Storages are no buffers: what copies or averages those (EMA) would
write home rows once more, past the Parameters.

Others may give a Parameter memory of its own: ``p.data = x``, flat buffers (ZeRO, FSDP), functional_call, parametrize.
The layer then reads the home rows from the Parameter, and replica rows from the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from isoload.checkpoints import Checkpoint
from isoload.transport import Group
from isoload.weights.experts import NAMES, ExpertWeights
from isoload.weights.layout import Layout
from isoload.weights.moves import Move, move_rows
from isoload.weights.quantised import check_stay
from isoload.weights.state import HOMES, check_kind, rows_for


def new_stack(like: Tensor, rows: int) -> Tensor:
    return like.new_zeros(rows, *like.shape[1:])


class RankWeights(nn.Module):
    """One rank's weight rows of a layer.

    Args:
        layout: the experts of its rows.
        dense: the stacks of all E experts, or their checkpoint, from which the rank takes its own.
        num_rows: weight rows to make room for; those that the layout does not use hold zeros.
        spare_slots: the last local slots, for borrowed experts, whose rows count on from num_rows.
        new_stack: (like, rows) -> [rows, ...] zeros: where the storages come from.
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
        """Notes which row every slot has; the end of construction."""
        self.num_rows, self.spare_slots = num_rows, spare_slots
        self.gradient_divisor = 1  # of the home rows' gradients
        self.had_gradients = False  # so an optimizer may keep state of the home rows
        self.row_of_slot = torch.tensor(self._rows(self.layout), dtype=torch.int64, device=device)
        self._own = dict(self.named_parameters(recurse=False))
        held = self.stored() if self.stored_down_scale is not None else {}
        # noted since a cast, by .to(dtype), changes the storages along with the Parameters
        self.fixed_dtypes = {name: s.dtype for name, s in held.items() if not name.endswith("_bias")}
        self._refreshed: list[tuple[Tensor, int]] | None = None
        self.note_refreshed()

    def replaced(self) -> list[str]:
        """The stacks that have another Parameter than this was made with, as fully_shard gives them one."""
        now = self.named_parameters(recurse=False)
        return [name for name, p in now if p is not self._own[name] and isinstance(p, nn.Parameter)]

    def homes(self) -> dict[str, Tensor]:
        """The home rows [homes, ...] by stack: the Parameters."""
        held = [(name, getattr(self, name)) for name in NAMES]
        return {name: parameter for name, parameter in held if parameter is not None}

    def home_rows(self) -> list[Tensor]:
        """The home rows of every stack, each [homes, ...]."""
        return list(self.homes().values())

    def stored(self) -> dict[str, Tensor]:
        """The storages [rows, ...] by stack."""
        held = [(name, getattr(self, f"stored_{name}")) for name in NAMES]
        return {name: stack for name, stack in held if stack is not None}

    def stored_rows(self) -> list[Tensor]:
        """The storage of every stack, each [rows, ...]."""
        return list(self.stored().values())

    def replica_rows(self) -> list[Tensor]:
        """The storages behind the home rows."""
        return [stack[len(self.layout.homes) :] for stack in self.stored_rows()]

    def shows_storage(self) -> bool:
        """Whether the Parameters lie in the storages, as the host sees for free. Fakes have no memory: yes."""
        return all(map(_shows, self.home_rows(), self.stored_rows()))

    def readable_homes(self) -> list[Tensor]:
        """Contiguous stacks that begin with the home rows: the storages, or the Parameters that lie elsewhere."""
        if self.shows_storage():
            return self.stored_rows()
        return [home.detach().contiguous() for home in self.home_rows()]

    def note_refreshed(self) -> None:
        """Replicas are equal to the home rows as these are now."""
        self._refreshed = self.marks()

    def is_refreshed(self) -> bool:
        """Whether the home rows are those of the last :meth:`note_refreshed`, as far as torch counts their versions.

        It counts none for fused optimizers' steps, nor for ``p.data.add_()``.
        """
        return self._refreshed is not None and self.is_marked(self._refreshed)

    def is_marked(self, marks: Sequence[tuple[Tensor, int]]) -> bool:
        """Whether nothing is seen to have changed the home rows since they had these :meth:`marks`."""
        return all(
            isinstance(home, FakeTensor) or (home.data_ptr(), now) == (noted.data_ptr(), version)
            for (home, now), (noted, version) in zip(self.marks(), marks, strict=True)
        )

    def versions(self) -> list[int]:
        """How often the home rows of every stack have changed."""
        return list(map(version_of, self.home_rows()))

    def marks(self) -> list[tuple[Tensor, int]]:
        """The home rows of every stack and how often they have changed."""
        # The alias keeps the memory, so that no other tensor comes to lie at the same address.
        return [(home.detach(), now) for home, now in zip(self.home_rows(), self.versions(), strict=True)]

    def check(self, replicated: bool) -> None:
        """Raises ValueError if the Parameters do not fit the layout or, replicated, changed since the refresh."""
        homes, storages = self.homes(), self.stored()
        if homes.keys() != storages.keys():
            raise ValueError(f"experts must have the stacks {list(storages)}, got {list(homes)}")
        for name, home in homes.items():
            stored = storages[name]
            wanted = [len(self.layout.homes), *stored.shape[1:]], stored.dtype, stored.device
            if (given := (list(home.shape), home.dtype, home.device)) != wanted:
                raise ValueError(
                    f"{name} must be {' '.join(map(str, wanted))}, got {' '.join(map(str, given))}"
                )
        if self.fixed_dtypes:
            check_stay(homes, self.fixed_dtypes)
        if replicated and not self.is_refreshed():
            raise ValueError(
                "replicas must be refreshed after the expert Parameters change: call refresh_replicas() on all ranks, "
                "got Parameters that changed since"
            )

    def check_move(self) -> None:
        """Raises ValueError if the home rows cannot be moved now."""
        if not self.shows_storage():
            raise ValueError(
                "expert Parameters must lie in the layer's storage to move, got memory of their own (p.data = x, a "
                "flat buffer, functional_call or parametrize)"
            )
        for name, home in self.homes().items():
            if home.grad is not None:
                raise ValueError(
                    f"expert Parameters must have no gradient (zero_grad(set_to_none=True) first), {name} has one"
                )

    def check_load(self) -> None:
        """Raises ValueError if the home rows cannot be written from a state."""
        for name in self.stored():
            if not isinstance(getattr(self, name), nn.Parameter):
                raise ValueError(f"{name} must be a Parameter to be loaded, got a parametrized one")

    def by_name(self, stacks: Sequence[Tensor]) -> dict[str, Tensor]:
        """Stacks in the order of home_rows, by name again."""
        return dict(zip(self.stored(), stacks, strict=True))

    def weight_rows(self, slots: Tensor) -> Tensor:
        """Local slots [N, K] as int64 weight rows; -1 stays."""
        return self.row_of_slot[slots]  # -1 reads the last entry

    def row_ends(self, ends: Sequence[int]) -> list[int] | None:
        """Where the copies of every weight row end, given those of the local slots [S]; None if these lie otherwise."""
        placed = len(ends) - self.spare_slots
        found: list[int] = []
        for slot, row in enumerate(self._rows(self.layout)[:placed]):
            if row < 0 and ends[slot] != (ends[slot - 1] if slot else 0):
                raise ValueError(
                    f"slot {slot} must have no copies, since it holds no expert, got ends {list(ends)}"
                )
            if row >= 0 and row != len(found):
                return None
            if row >= 0:
                found.append(ends[slot])
        last = ends[placed - 1] if placed else 0
        return [*found, *[last] * (self.num_rows - len(found)), *ends[placed:]]

    def take_layout(self, layout: Layout) -> None:
        """Takes the storages as they are now for the rows of another layout; no pointer changes."""
        self.layout = layout
        self.row_of_slot.copy_(torch.tensor(self._rows(layout), device=self.row_of_slot.device))
        for home in self.home_rows():
            torch.autograd.graph.increment_version(home)  # a backward from before the move must raise
        self._show_homes()
        self.note_refreshed()

    def _rows(self, layout: Layout) -> list[int]:
        """[S + 1] weight row of every local slot, -1 = none, and of no slot."""
        placed = len(layout.row_of_slot) - self.spare_slots
        return [*layout.row_of_slot[:placed], *range(self.num_rows, self.num_rows + self.spare_slots), -1]

    def _show_homes(self) -> None:
        """Makes each Parameter the first rows of its storage."""
        for home, stored in zip(self.home_rows(), self.stored_rows(), strict=True):
            rows = stored.narrow(0, 0, len(self.layout.homes))
            if home.shape != rows.shape:
                # A graph that is still around keeps the node that adds up gradients, and the node holds the old
                # shape. Only data of another dtype makes torch drop the node.
                other = torch.float32 if home.dtype == torch.float64 else torch.float64
                home.data = home.new_empty(0, dtype=other)
            home.data = rows

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + HOMES] = torch.tensor(self.layout.homes, dtype=torch.int64)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *how: Any) -> None:
        state = rows_for(self.layout.homes, state, prefix)
        for name, held in self.stored().items():
            if (given := state.get(prefix + name)) is not None:
                check_kind(prefix + name, given, held)
            of = name.removesuffix("_2").removesuffix("_scale")
            if of != name and (given is None) != (state.get(prefix + of) is None):
                raise ValueError(
                    f"state must hold {prefix + of} and {prefix + name} together, got one of them"
                )
        # assign=True would put Parameters with memory of their own in place of these: copy instead
        metadata = {**metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state, prefix, metadata, *how)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RankWeights:
        before = self.shows_storage(), self.is_refreshed()
        super()._apply(fn, recurse)
        for name, stored in self.stored().items():
            setattr(self, f"stored_{name}", fn(stored))
        self.row_of_slot = fn(self.row_of_slot)
        self._own = dict(self.named_parameters(recurse=False))
        self._restore(*before)  # .to() and the like give the Parameters memory of their own
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_refreshed": (self.shows_storage(), self.is_refreshed())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._restore(*state["_refreshed"])  # so do deepcopy and pickle

    def _restore(self, shown: bool, refreshed: bool) -> None:
        """Makes all Parameters and storages, new tensors with the values of others, what these were to each other."""
        if shown:
            self._show_homes()
        self._refreshed = None
        if refreshed:
            self.note_refreshed()


def _shows(home: Tensor, stored: Tensor) -> bool:
    if isinstance(home, FakeTensor) or not len(home):
        return True
    rows = home.shape[1:] == stored.shape[1:] and home.stride() == stored.stride()
    return rows and home.dtype == stored.dtype and home.data_ptr() == stored.data_ptr()


def version_of(tensor: Tensor) -> int:
    """How often torch has seen a tensor change."""
    return 0 if tensor.is_inference() else tensor._version


def refresh_replicas(group: Group, ranks: Sequence[RankWeights], moves: Sequence[Move]) -> None:
    """Copies home rows to their replicas, by their moves, as after an optimizer step. All ranks call it together."""
    move_rows(group, "refresh", moves, [r.home_rows() for r in ranks], [r.replica_rows() for r in ranks])
    for rank in ranks:
        rank.note_refreshed()
