"""StoredExperts stores a layer's expert weights: state that outlives a batch, with saving, loading and moving."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isoload.balancing.balancer import Balancer
from isoload.layer.checks import Experts, check_copies, check_traversal, check_wrappers, device_of
from isoload.placement.placement import Placement
from isoload.transport import Call, CollectiveGroup, Group
from isoload.weights.backends import Backend, make_backend
from isoload.weights.borrowing import Borrowing
from isoload.weights.experts import DTYPES, NAMES
from isoload.weights.layout import Address, Layout, Move, home_addresses, layouts, move_rows, replica_moves
from isoload.weights.shard import (
    FACTS,
    Shard,
    ShardWeights,
    check_move,
    move_facts,
    move_state,
    move_weights,
)
from isoload.weights.storage import (
    FULL,
    HOMES,
    PART,
    ExpertParameter,
    PartIndex,
    RankWeights,
    check_kind,
    new_stack,
    no_distributed_checkpoint,
    refresh_replicas,
    without_part,
)


class StoredExperts(nn.Module):
    """Base of :class:`isoload.MoE` with the weight rows of every owned rank, arranged by the placement."""

    group: Group
    balancer: Balancer
    layouts: list[Layout]  # expert of every row on all ranks
    num_rows: list[int]  # for which each rank has memory
    borrowing: Borrowing | None  # fetches the weights of spare slots; None without spare slots
    compute_dtype: torch.dtype | None  # in which experts compute; None: autocast's, else their own

    def named_modules(self, *how: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        if not torch.compiler.is_compiling():  # no wrapper is constructed there, and frames cannot be traced
            check_traversal(self.group, self._ranks())
        modules: Iterator[tuple[str, nn.Module]] = super().named_modules(*how, **options)
        return modules

    @property
    def has_replicas(self) -> bool:
        return bool(self.replica_moves)

    @property
    def placement(self) -> Placement:
        """Current placement; change it by :meth:`load_placement`."""
        return self.balancer.placement

    @property
    def layer(self) -> int:
        """Position of this layer in the placement."""
        return self.balancer.layer

    def __getstate__(self) -> dict[str, Any]:
        backend = None if self.borrowing is None else self.borrowing.backend
        if backend is not None and backend.reads_peers and not self.group.owns_all:
            raise TypeError(
                f"a layer with borrow={backend.name!r}, whose weights other processes read in place, cannot be copied: "
                "load its full_state_dict() into a new layer"
            )
        return {**super().__getstate__(), "borrowing": None if backend is None else backend.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_parameters()
        if (name := state["borrowing"]) is not None:
            self._borrow_by(make_backend(self.group, name, self._device()))

    def _mark_parameters(self) -> None:
        for parameter in self.weights.parameters() if self.part_name else ():
            if type(parameter) is nn.Parameter:  # DTensors are whole in all checkpoints
                parameter.__class__ = ExpertParameter

    def _borrow_by(self, backend: Backend) -> None:
        spare = self.placement.spare_slots
        self.borrowing = Borrowing(self.group, self._ranks(), spare, backend, self.compute_dtype)
        self.borrowing.note_layouts(self.layouts, self.placement.num_experts)

    def _note_layouts(self, layouts: list[Layout]) -> None:
        self.layouts, self.replica_moves = layouts, replica_moves(layouts)
        self._replicated = {move.source.rank for move in self.replica_moves}

    def _hold(self, experts: Experts, borrow: str | None) -> None:
        spare, group, new, self.borrowing = self.placement.spare_slots, self.group, new_stack, None
        if spare:
            with group.agreeing("construction"):
                whole = not isinstance(experts[0], Shard)
                backend = make_backend(group, borrow, device_of(experts), own_memory=whole)
            new = backend.new_stack
            if backend.reads_peers:
                self.num_rows = [max(self.num_rows)] * len(self.num_rows)
        # tensors that are created in inference mode could not be written outside of it
        with group.agreeing("construction"), torch.inference_mode(False):
            self.weights = OwnedRanks(
                ShardWeights(self.layouts[rank], part, self.num_rows[rank], spare, new)
                if isinstance(part, Shard)
                else RankWeights(self.layouts[rank], part, self.num_rows[rank], spare, new)
                for rank, part in zip(group.ranks, experts, strict=True)
            )
            self.weights.part = self.part_name
            self._mark_parameters()
            if spare:
                self._borrow_by(backend)
        self.register_state_dict_post_hook(_mark_part)
        self.register_load_state_dict_pre_hook(_read_part)

    @property
    def part_name(self) -> str:
        """Mark in the keys of this process's part of a state, or "" if the process owns all ranks."""
        group = self.group
        return "" if group.owns_all else f"rank_{group.ranks[0]}_of_{group.topology.num_ranks}."

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the expert Parameters of the owned ranks. Their gradients are sums over the tokens of all ranks, so
        data parallelism must not reduce them; those of all other Parameters need an all-reduce: docs/training.md.
        """
        return list(self.weights.parameters())

    def dtype_now(self) -> torch.dtype | None:
        """Return the dtype in which rows travel and experts compute now; None: the rows' own (quantised experts)."""
        down = self._ranks()[0].stored_down
        if down.dtype not in DTYPES:
            return None
        if self.compute_dtype is not None:
            return self.compute_dtype
        device = down.device.type
        # Autocast does not apply to float64.
        follows = down.dtype != torch.float64 and torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if follows else down.dtype

    def refresh_replicas(self) -> None:
        """Copy home rows to their replicas. All ranks call it together after every optimizer step."""
        if os.environ.get("ISOLOAD_CHECK") == "1":
            with self.group.agreeing("refresh"):
                check_copies(f"layer {self.layer}", self._ranks())
        if self.has_replicas:
            refresh_replicas(self.group, self._ranks(), self.replica_moves)

    def meet_readers(self) -> None:
        """Wait until no rank reads the experts in place, so that they can be written. All ranks call it together."""
        if self.borrowing is not None:
            self.borrowing.backend.meet()

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of all experts (``experts.gate_up`` [E, ...] etc.) on every rank. All ranks together."""
        entries = {
            name: value for name, value in self.state_dict().items() if not name.startswith("weights.")
        }
        return entries | {FULL + name: stack for name, stack in self.full_experts().items()}

    def full_experts(self, reader: int | None = None) -> dict[str, Tensor]:
        """Return every stack [E, ...], with rows on the rank `reader` only, or on all. All ranks call it together."""
        ranks = self._ranks()
        homes = [rank.home_rows() for rank in ranks]
        return ranks[0].by_name(gather_rows(self.group, self.layouts, homes, reader))

    @property
    def part_keys(self) -> str:
        """Prefix of the keys of this module's state that belong to the experts."""
        return "weights."

    @property
    def writer(self) -> int:
        """Rank in the layer's group of the process that writes a saved program: rank 0 of the default group."""
        group = self.group
        processes = group.process_group if isinstance(group, CollectiveGroup) else None
        return 0 if processes is None else dist.get_group_rank(processes, 0)

    def whole_experts(self) -> dict[str, Tensor]:
        """Return the stacks of all experts on the writer, by key of the full state. All ranks call it together."""
        return {FULL + name: stack for name, stack in self.full_experts(self.writer).items()}

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`full_state_dict` for any number of ranks, replicas included."""
        entries = {name: value for name, value in state.items() if not name.startswith(FULL)}
        names = {name for name in self.state_dict() if not name.startswith("weights.")}
        if entries.keys() != names:
            raise ValueError(f"state must hold {sorted(names)} and experts, got {sorted(entries)}")
        self.meet_readers()
        load_full(self._ranks(), self.placement.num_experts, state)
        self.load_state_dict(entries, strict=False)

    def load_placement(
        self,
        placement: Placement,
        *,
        rows_per_chunk: int | None = None,
        optimizer: torch.optim.Optimizer | Literal["none"] | None = None,
    ) -> None:
        """Move the layer to a new placement. All ranks call it together, between batches.

        Only rows that change travel; the Parameters remain the same objects on the same memory. Layers that share a
        Placement may be moved one by one, with batches between. Errors are raised on all ranks before anything moves;
        if a rank is gone (RuntimeError), the layer's weights are undefined.

        Args:
            placement: placement with the same topology, layers, experts and slots. Replicas must be up to date
                (:meth:`refresh_replicas`), because any row of an expert may be copied.
            rows_per_chunk: most rows that are copied at a time, which limits temporary memory. None: R, at least 2.
            optimizer: optimizer whose state of the expert Parameters moves too, if it has their shape. "none": no
                optimizer keeps such state. None: the same, but rejected if experts move that have had gradients.
        """
        ranks, before = self._ranks(), self.layouts
        moved = None if isinstance(optimizer, str) else optimizer
        size = max(2, len(before)) if rows_per_chunk is None else rows_per_chunk
        facts: list[list[int]] = []
        call = Call(self.group, "placement", ranks[0].row_of_slot.device)
        with call:
            check_move(self.placement, placement, size, ranks)
            self._check_weights()
            placed = placement.layer(self.layer, "cpu")
            after = layouts(placed, before)
            facts = move_facts(placed, before, after, self.num_rows, size, ranks, optimizer)
            write = self.balancer.prepare_load(placement)
        call.agree("placement", FACTS, facts)
        self.meet_readers()
        if moved is not None:
            move_state(self.group, ranks, moved, before, after, size)
        move_weights(self.group, ranks, before, after, size)
        for rank, weights in zip(self.group.ranks, ranks, strict=True):
            weights.take_layout(after[rank])
        if self.borrowing is not None:
            self.borrowing.note_layouts(after, placement.num_experts)
        self._note_layouts(after)
        write()

    def _device(self) -> torch.device:
        return self._ranks()[0].row_of_slot.device

    def _ranks(self) -> list[RankWeights]:
        return list(self.weights)  # type: ignore[arg-type]

    def _check_weights(self) -> None:
        ranks = self._ranks()
        check_wrappers(self.group, ranks)
        for rank, weights in zip(self.group.ranks, ranks, strict=True):
            weights.check(rank in self._replicated)
            if self.borrowing is not None:
                self.borrowing.check(weights)


class OwnedRanks(nn.ModuleList):
    """The weights of every owned rank."""

    part = ""  # mark in the keys of this process's part of a state; "" if the process owns all ranks

    def __getattr__(self, name: str) -> Any:
        # torch.distributed.checkpoint looks up every Parameter by name before it reads an optimizer's state.
        module = sys.modules.get("torch.distributed.checkpoint.state_dict") if self.part else None
        lookup = getattr(module, "_get_fqns", None)
        if lookup is not None and sys._getframe(1).f_code is lookup.__code__:
            raise AttributeError(no_distributed_checkpoint(f"weights.{self.part}"))
        return super().__getattr__(name)


def _mark_part(layer: StoredExperts, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Add the rank to the keys of one process's part of a state, which would be the same on other processes."""
    if not (part := layer.part_name):
        return
    inner, marked = f"{prefix}weights.0.", f"{prefix}weights.{part}"
    for key in [key for key in state if key.startswith(inner)]:
        value = state.pop(key)
        name = key.removeprefix(inner)
        state[marked + name] = value.as_subclass(PartIndex) if name == HOMES else value


def _read_part(layer: StoredExperts, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Rename a marked part to the first owned rank's keys; loading then compares its experts with the rank's."""
    layer.meet_readers()
    inner = f"{prefix}weights."
    for key in [key for key in state if key.startswith(inner) and PART.match(key, len(inner))]:
        state[f"{inner}0.{without_part(key.removeprefix(inner))}"] = state.pop(key)


def gather_rows(
    group: Group, layouts: Sequence[Layout], homes: Sequence[Sequence[Tensor]], reader: int | None = None
) -> list[Tensor]:
    """Return stacks [E, ...] of all experts, from stacks [homes, ...] of the owned ranks. All ranks call it together.
    reader: the only rank that gets rows; other ranks get [0, ...]. None: every process gets them.
    """
    home = home_addresses(layouts)
    # A process that owns all ranks needs one copy.
    readers = [0] if group.owns_all else range(len(layouts)) if reader is None else [reader]
    moves = [Move(home[expert], Address(rank, expert)) for rank in readers for expert in range(len(home))]
    full = [
        [stack.detach().new_zeros(len(home) if rank in readers else 0, *stack.shape[1:]) for stack in stacks]
        for rank, stacks in zip(group.ranks, homes, strict=True)
    ]
    move_rows(group, "state", moves, [list(stacks) for stacks in homes], full)
    return full[0]


@torch.no_grad()
def load_full(ranks: Sequence[RankWeights], num_experts: int, state: Mapping[str, Any]) -> None:
    for rank in ranks:
        rank.check_load()
        for name in NAMES:
            home = rank.homes().get(name)
            saved = state.get(FULL + name)
            shape = None if home is None else [num_experts, *home.shape[1:]]
            if (found_shape := None if saved is None else list(saved.shape)) != shape:
                raise ValueError(f"{FULL}{name} must be {shape}, got {found_shape}")
            if saved is not None and home is not None:
                check_kind(FULL + name, saved, home)
    for rank in ranks:
        homes, replicas = list(rank.layout.homes), list(rank.layout.replicas)
        stacks = [state[FULL + name] for name in rank.stored()]
        for stack, home, copies in zip(stacks, rank.home_rows(), rank.replica_rows(), strict=True):
            home.copy_(stack[homes])
            copies[: len(replicas)].copy_(stack[replicas])
        rank.note_refreshed()
