"""Collective operations of an expert-parallel group, with error propagation: if one rank fails, every rank raises."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from isoload.checks import capturing, may_be_kept, put_on, values_readable
from isoload.ops.library import device_errors, error_word, raise_broken
from isoload.placement.placement import Placement
from isoload.topology import Topology
from isoload.transport.exchanges import Exchanges, Owned, PerRank
from isoload.wording import not_one_of

STAGE_BYTES = 40  # length of a stage's name in messages between ranks
STAGES = ("count", "plan", "route", "dispatch", "experts", "combine", "placement")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def error_code(stage: str) -> int:
    """Return the number by which ``gather_loads`` transmits to all ranks that one failed in a stage."""
    if stage not in STAGES:
        raise ValueError(not_one_of("stage", STAGES, stage))
    return STAGES.index(stage) + 1


def raise_failure(codes: Sequence[int]) -> None:
    """Raise for the first rank whose code [R] is not 0: the same error on every rank that has the same codes."""
    for rank, code in enumerate(codes):
        if code:
            stage = STAGES[code - 1] if 1 <= code <= len(STAGES) else f"of code {code}"
            raise ValueError(rank_failed(rank, stage))


@torch.library.custom_op("isoload::loads_of", mutates_args=())
def loads_of(loads: Tensor, first: Tensor) -> Tensor:
    """Return the loads [R, E] if no rank failed, else raise: an op, so that compiled code on CPU reads the codes."""
    raise_failure([max(-count, 0) for count in first.tolist()])
    return loads.clone()


@loads_of.register_fake
def _(loads: Tensor, first: Tensor) -> Tensor:
    return loads.new_empty(loads.shape)


def rank_failed(rank: int, stage: str) -> str:
    return f"rank {rank} failed in stage {stage}, so all ranks stop; see the error of that rank"


def raise_unlike(name: str, values: Sequence[object], first: int = 0, reason: str = "") -> None:
    for rank, value in enumerate(values, first):
        if value != values[0]:
            raise ValueError(
                f"{name} must be the same on all ranks, got {values[0]} on rank {first} and {value} on rank "
                f"{rank}{reason}"
            )


def raise_disagreement(names: Sequence[str], facts: Sequence[Sequence[int]], first: int = 0) -> None:
    """Run :func:`raise_unlike` for facts [n][F]; "dtype ..." is an index of DTYPES."""
    for name, values in zip(names, zip(*facts, strict=True), strict=True):
        if len(set(values)) > 1:
            raise_unlike(name, [DTYPES[v] for v in values] if name.startswith("dtype") else values, first)


def stage_header(stage: str, row_bytes: int) -> Tensor:
    """Return [STAGE_BYTES + 8] uint8: an exchange's stage and the bytes of its rows."""
    text = stage.encode()[:STAGE_BYTES].ljust(STAGE_BYTES, b"\0")
    return torch.frombuffer(bytearray(text + row_bytes.to_bytes(8, "little")), dtype=torch.uint8)


def raise_other_stage(headers: Tensor, first: int = 0) -> None:
    rows = [bytes(row) for row in headers.tolist()]
    stages = [row[:STAGE_BYTES].rstrip(b"\0").decode(errors="replace") for row in rows]
    sizes = [int.from_bytes(row[STAGE_BYTES:], "little") for row in rows]
    reason = ": all ranks make the same calls in the same order"
    raise_unlike("stage", stages, first, reason)
    raise_unlike(f"bytes per row of stage {stages[0]}", sizes, first, reason)


def checksum(value: object) -> int:
    """Return 56 bits that are the same on every machine for equal lists of numbers and strings."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def placement_facts(placement: Placement, layer: int) -> dict[str, int]:
    slots, homes = placement.arrays
    weight = placement.weight_array
    tensors = {
        "slot_to_expert": slots[layer].tolist(),
        "home_slot": homes[layer].tolist(),
        "replica_weight": None if weight is None else weight[layer].tolist(),
    }
    return {f"checksum of {name}": checksum(value) for name, value in tensors.items()}


LENGTH = ("length of counts",)
FACT_RANGE = 2**31 - 1  # facts travel as int32 with the loads: larger ones by their remainder


class Group(Exchanges):
    """R ranks that share a layer; for the arguments see :class:`Exchanges`."""

    def __init__(self, topology: Topology | int, ranks: Sequence[int]) -> None:
        super().__init__(topology, ranks)
        # [R] smallest first count of every rank since the host last looked, minus the code of a failure; the second is
        # of captured gathers, at an address that graphs contain.
        self._unread: Tensor | None = None
        self._replayed: Tensor | None = None
        self._near: range | None = None  # ranks of the owned rank's node, after join_node
        self._captures = False  # whether there are captured gathers
        self._agreed: set[tuple[Any, ...]] = set()

    def gather_loads(
        self,
        counts: Owned,
        errors: list[int] | None = None,
        facts: Mapping[str, int] | None = None,
        in_node: bool = False,
    ) -> Tensor:
        """Gather every rank's counts and facts into loads [R, E] int32; raise the same ValueError on all ranks if one
        failed.

        On CPU at once; on a GPU at the next :meth:`Call.swap_counts` or :meth:`check`, also for every replay of a
        graph.

        Args:
            counts: [E] int32 each, see :func:`isoload.count`.
            errors: :func:`error_code` of the stage that failed on each rank, 0 = none; sent in place of its counts.
            facts: integers that must be equal on all ranks, by name, the same names on all ranks; compared only on CPU
                or under ISOLOAD_CHECK=1.
            in_node: gather in the node only, after :meth:`join_node`; counts must have equal lengths. Rows of other
                nodes are 0, and their failures and facts are not received.
        """
        if len(counts) != len(self.ranks) or (errors is not None and len(errors) != len(self.ranks)):
            self.check_owned("counts", counts)
            self.check_owned("errors", errors or [])
        agreed: list[tuple[int, ...]] = []
        for rank, row in zip(self.ranks, counts, strict=True):
            if row.dim() != 1 or row.dtype != torch.int32:
                raise ValueError(
                    f"counts of rank {rank} must be [E] int32, got {list(row.shape)} {row.dtype}"
                )
            agreed.append((len(row),))
        if (LENGTH, *agreed) not in self._agreed:
            self.agree_new("gather", LENGTH, agreed, counts[0].device)
        compared = facts if facts and values_readable(counts[0]) else {}
        width, rows, values = len(counts[0]), [], []
        for value in compared.values():
            values.append(value % FACT_RANGE)
        beside = counts[0].new_tensor(values) if compared else None
        for row, code in zip(counts, errors or [0] * len(counts), strict=True):
            if code:
                row = row.new_full(row.shape, -code)
            rows.append(row if beside is None else torch.cat([row, beside]))
        self.traffic.bytes["gather"] += len(rows) * rows[0].numel() * rows[0].itemsize
        gathered = self._gather("gather", rows, in_node)
        loads = gathered.narrow(1, 0, width) if compared else gathered
        first = gathered.select(1, 0)
        if torch.compiler.is_compiling() and loads.device.type == "cpu":
            checked: Tensor = loads_of(loads, first)
            return checked
        if capturing(first.device):
            assert self._replayed is not None, "made by the gather before"
            torch.minimum(self._replayed, first, out=self._replayed)
            self._captures = True
            return loads
        if compared and first.device.type == "cpu" and not self._captures:
            codes = first.tolist()
            if min(codes) < 0:  # a rank that failed has no facts to compare
                _raise_gathered(codes, first.device)
        else:
            # A copy: writing to the loads, which belong to the caller, must not hide a failure.
            self._unread = first.clone() if self._unread is None else torch.minimum(self._unread, first)
        if self._replayed is None and may_be_kept(first):
            with torch.inference_mode(False):  # otherwise only inference mode could write it
                self._replayed = torch.zeros(first.shape, dtype=first.dtype, device=first.device)
        if self._unread is not None and (compared or first.device.type == "cpu"):
            self.check()
        if compared:
            if self._near is None and in_node:
                self._near = self.topology.node_of(self.ranks[0])
            near = self._near if in_node and self._near is not None else range(len(gathered))
            facts_of_ranks = gathered[near.start : near.stop, width:]
            if not facts_of_ranks.eq(facts_of_ranks[0]).all():
                raise_disagreement(list(compared), facts_of_ranks.tolist(), near.start)
        return loads

    def check(self) -> None:
        """Raise errors of :meth:`gather_loads` that the host has not read, and those of isoload.ops.check_device."""
        first, device = self.take_unread(), self.traffic.rows.device
        if first is not None and first.device.type == "cpu":
            _raise_gathered(first.tolist(), first.device)
            first = None
        device = device if first is None else first.device
        if device.type == "cuda":  # the host waits once for both
            errors = error_word(device).view(1)
            *codes, broken = (errors if first is None else torch.cat([first, errors])).tolist()
            self.traffic.host_syncs += 1
            _raise_gathered(codes, device)
            raise_broken(broken, device)

    def take_unread(self) -> Tensor | None:
        """Return [R] the smallest first counts that the host has not read yet, and clear them."""
        first, self._unread = self._unread, None
        if self._captures:
            assert self._replayed is not None
            replayed = self._replayed.clone()
            self._replayed.zero_()
            first = replayed if first is None else torch.minimum(first, replayed)
        return first

    def agree_new(
        self, stage: str, names: tuple[str, ...], facts: list[tuple[int, ...]], device: torch.device
    ) -> None:
        """Run :meth:`Call.agree` if these facts are new; the same facts are not compared again."""
        if (names, *facts) in self._agreed:
            return
        if capturing(device):
            raise ValueError(
                f"stage {stage} must run once before it is captured in a CUDA graph: ranks agree on "
                f"{', '.join(names)} first, which the host waits for"
            )
        Call(self, stage, device).agree(stage, names, facts)
        self.note_agreed(names, facts)

    def note_agreed(self, names: tuple[str, ...], facts: list[tuple[int, ...]]) -> None:
        self._agreed.add((names, *facts))

    @contextmanager
    def agreeing(self, stage: str) -> Iterator[dict[str, Any]]:
        """Context in which a failure or a differing fact (put into the dict) raises on all ranks. Slow: uses pickle."""
        call = Call(self, stage)
        with call:
            yield call.facts
        error = call.failure
        failure = None if error is None else f"{type(error).__name__}: {error}"
        gathered = self.gather_objects(stage, call.facts if failure is None else failure)
        if error is not None:
            raise error
        for rank, answer in enumerate(gathered):
            if isinstance(answer, str):
                raise ValueError(f"{rank_failed(rank, stage)}: {answer}")
        for name in gathered[0]:
            raise_unlike(name, [answer[name] for answer in gathered])


def _raise_gathered(first: Sequence[int], device: torch.device) -> None:
    """Raise for the first rank that failed, by the smallest first counts [R] of gathers on a device."""
    if min(first, default=0) < 0 and device.type == "cuda":
        device_errors(device)  # clears the bits that ops set for counts that are error codes
    raise_failure([max(-count, 0) for count in first])


class Call:
    """One call of all ranks: the failure in this process, if any, and the facts that must be equal on all ranks.

    As a context it catches every exception inside, KeyboardInterrupt included, because the other ranks must not wait
    for this one. The next exchange transmits the failure and raises: the failure here, and on the other ranks an error
    that names the rank and the stage. `later` runs the other ranks' next exchange, in which they raise if the gather of
    loads did not transmit the failure. `limit` [] int32 bounds counts, so that a captured gather transmits a failure.
    """

    __slots__ = ("device", "facts", "failure", "group", "in_gather", "later", "limit", "stage")

    def __init__(
        self,
        group: Group,
        stage: str = "count",
        device: torch.device | None = None,
        facts: Mapping[str, Any] | None = None,
        failure: BaseException | None = None,
        later: Callable[[Call], object] | None = None,
        limit: Tensor | None = None,
    ) -> None:
        self.limit = limit
        self.group, self.stage, self.device, self.failure, self.later = group, stage, device, failure, later
        self.facts: dict[str, Any] = {} if facts is None else dict(facts)
        self.in_gather: dict[str, int] = {}  # further facts, which travel only with the loads

    def __enter__(self) -> Call:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is not None and self.failure is None:
            self.failure = error
        return error is not None

    def at(self, stage: str) -> Call:
        """Return this context for a later stage; an earlier failure keeps its stage."""
        if self.failure is None:
            self.stage = stage
        return self

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def stop(self) -> NoReturn:
        """Raise the failure after the other ranks have received it in their current exchange."""
        assert self.failure is not None
        if self.later is not None:
            self.later(self)
        raise self.failure

    def gather_loads(self, counts: Owned, width: int, in_node: bool = False) -> Tensor:
        """Run :meth:`Group.gather_loads` on counts [width] each, which are not read if this process has failed."""
        group, errors, failed = self.group, None, self.failure is not None
        if failed:
            nothing = torch.zeros(width, dtype=torch.int32, device=self.device)
            counts, errors = [nothing] * len(group.ranks), [error_code(self.stage)] * len(group.ranks)
        elif self.limit is not None:
            counts = [torch.minimum(row, self.limit) for row in counts]
        try:
            loads = group.gather_loads(counts, errors, {**self.facts, **self.in_gather}, in_node)
        except ValueError as error:
            if in_node:  # other nodes have not received the failure
                self.failure = error if self.failure is None else self.failure
                self.stop()
            self.raise_failure()
            raise
        if failed:  # on a device, whose errors the host reads later
            self.stop()
        return loads

    def swap_counts(
        self, stage: str, counts: Owned, names: Sequence[str], facts: Sequence[Sequence[int]], kinds: int = 2
    ) -> tuple[list[PerRank], list[PerRank]]:
        """Exchange row counts: sent and got [kinds][R] of every owned rank, to every destination and from every source.
        The host waits once and raises all failures, also those from the gather of loads. `counts` are [kinds, R] int64;
        `facts` [F] must be equal on all ranks. Counts and facts of a process that has failed are not read.
        """
        group, code = self.group, 0
        if self.failure is not None:
            num_ranks, code = group.topology.num_ranks, error_code(self.stage)
            counts = [torch.zeros(kinds, num_ranks, dtype=torch.int64, device=self.device)] * len(group.ranks)
        names, facts = self._with_own(names, facts)
        headers = [
            torch.cat([c.t(), put_on(c.device, [code, *f]).expand(c.shape[1], -1)], dim=1)
            for c, f in zip(counts, facts, strict=True)
        ]
        ones = [[1] * counts[0].shape[1]] * len(counts)
        arrived = group.swap(stage, headers, ones, ones)()
        first = group.take_unread()
        carried = [] if first is None else [first.unsqueeze(1)]
        table = [torch.cat([c.t(), a, *carried], dim=1) for c, a in zip(counts, arrived, strict=True)]
        group.traffic.host_syncs += 1
        joined = torch.stack(table) if len(table) > 1 else table[0].unsqueeze(0)
        # Per owned rank and peer: counts sent; counts got, error, facts; the gather's first count.
        host, kinds = joined.tolist(), len(counts[0])
        try:
            if carried:
                _raise_gathered([peer[-1] for peer in host[0]], joined.device)
            raise_failure([peer[2 * kinds] for peer in host[0]])
        except ValueError:
            self.raise_failure()
            raise
        at = 2 * kinds + 1
        raise_disagreement(names, [peer[at : at + len(names)] for peer in host[0]])
        by_kind = [[list(column) for column in zip(*rank, strict=True)] for rank in host]
        return [rank[:kinds] for rank in by_kind], [rank[kinds : 2 * kinds] for rank in by_kind]

    def agree(
        self, stage: str, names: Sequence[str] = (), facts: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Compare the call's facts and these [F] of every owned rank between all ranks, each time. The host waits."""
        code = 0 if self.failure is None else error_code(self.stage)
        names, facts = self._with_own(names, facts)
        rows = [torch.tensor([code, *f], dtype=torch.int64, device=self.device) for f in facts]
        gathered = self.group.gather(f"{stage} agreement", rows).tolist()
        self.raise_failure()
        raise_failure([row[0] for row in gathered])
        raise_disagreement(names, [row[1:] for row in gathered])

    def _with_own(
        self, names: Sequence[str], facts: Sequence[Sequence[int]] | None
    ) -> tuple[Sequence[str], Sequence[Sequence[int]]]:
        """Return names and every owned rank's facts, then the shared facts; zeros if this process has failed."""
        names, own = (*names, *self.facts), tuple(self.facts.values())
        if self.failure is not None:
            return names, [(0,) * len(names)] * len(self.group.ranks)
        return names, [(*f, *own) for f in ([()] * len(self.group.ranks) if facts is None else facts)]
