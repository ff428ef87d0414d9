"""Group: the ranks that share a layer, and every exchange between them that is not a dispatch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from isoload.ops import check_device
from isoload.topology import Topology
from isoload.transport.agreement import error_code, loads_of, raise_disagreement, raise_failure, rank_failed
from isoload.transport.peers import Peers
from isoload.transport.shared import Shared
from isoload.transport.traffic import Traffic, num_bytes
from isoload.value_checks import capturing, may_be_kept, put_on, values_readable

T = TypeVar("T")
FACT_RANGE = 2**31 - 1  # facts travel as int32 beside the loads: larger ones by their remainder
PerRank = list[list[int]]  # for every owned rank [R], by destination or by source


class SendCounts(Protocol):
    """How many rows a rank sends to every destination and gets from every source, [R] each."""

    @property
    def sent(self) -> list[int]: ...

    @property
    def got(self) -> list[int]: ...


class Group(Shared, ABC):
    """R ranks that exchange tensors; lists run over ``ranks``, those that this process owns.

    Every rank makes the same calls in the same order. Each exchange has a stage, which names it in errors and in
    ``traffic.bytes``. A subclass moves the bytes: ``_gather``, ``_swap``, where it can begin them ``_start_gather`` and
    ``_start_swap``, and ``gather_objects``.

    Args:
        topology: R ranks.
        ranks: the ranks that this process owns.
    """

    def __init__(self, topology: Topology, ranks: Sequence[int]) -> None:
        self.topology = topology
        self.ranks = tuple(ranks)
        self.traffic = Traffic.of(topology.num_ranks, torch.device("cpu"))
        self._errors: Tensor | None = None  # [R] codes that the host has not read yet
        self._replayed: Tensor | None = None  # [R] those of captured gathers, at an address that graphs hold
        self._captures = False  # whether there are captured gathers
        self._agreed: set[tuple[Any, ...]] = set()
        self._memo: dict[tuple[Any, ...], Any] = {}

    def __reduce__(self) -> Any:
        raise TypeError(
            "a layer over processes cannot be pickled (torch.save): save its state_dict() on every rank or its "
            "full_state_dict(), and load that into a layer made anew"
        )

    @property
    def owns_all(self) -> bool:
        """Whether this process owns every rank."""
        return len(self.ranks) == self.topology.num_ranks

    @abstractmethod
    def _gather(self, stage: str, rows: list[Tensor]) -> Tensor: ...

    @abstractmethod
    def _swap(self, stage: str, buffers: list[Tensor], sent: PerRank, got: PerRank) -> list[Tensor]: ...

    @abstractmethod
    def gather_objects(self, stage: str, given: object) -> list[Any]:
        """The object of every process of the group. Slow: by pickle."""

    def _start_swap(
        self, stage: str, buffers: list[Tensor], sent: PerRank, got: PerRank
    ) -> Callable[[], list[Tensor]]:
        arrived = self._swap(stage, buffers, sent, got)
        return lambda: arrived

    def _start_gather(self, stage: str, rows: list[Tensor]) -> Callable[[], Tensor]:
        gathered = self._gather(stage, rows)
        return lambda: gathered

    def join_node(self) -> None:
        """Makes what :meth:`gather_loads` needs inside nodes. All ranks call it together."""

    def _gather_node(self, stage: str, rows: list[Tensor]) -> Tensor:
        """[R, F] as :meth:`_gather`, from the ranks of the owned ones' nodes; 0 of the others."""
        return self._gather(stage, rows)

    def _gather_beside(
        self, rows: list[Tensor], told: list[list[int]], in_node: bool
    ) -> tuple[Tensor, Tensor]:
        """[R, E] int32 of every rank's row [E], and [R, F] of the integers that it tells beside it."""
        joined = [
            torch.cat([row, row.new_tensor(also) if len(also) > 1 else row.new_full((1,), also[0])])
            for row, also in zip(rows, told, strict=True)
        ]
        gather = self._gather_node if in_node else self._gather
        width, gathered = len(rows[0]), gather("gather", joined)
        return gathered.narrow(1, 0, width), gathered.narrow(1, width, len(told[0]))

    def gather(self, stage: str, rows: list[Tensor]) -> Tensor:
        """[R, F]: the row [F] of every rank, the same on all ranks."""
        self.traffic.bytes[stage] += sum(map(num_bytes, rows))
        return self._gather(stage, rows)

    def start_gather(self, stage: str, rows: list[Tensor]) -> Callable[[], Tensor]:
        """:meth:`gather`, begun: what it returns waits for the rows; other exchanges may come before that."""
        self.traffic.bytes[stage] += sum(map(num_bytes, rows))
        return self._start_gather(stage, rows)

    def swap(self, stage: str, buffers: list[Tensor], sent: PerRank, got: PerRank) -> list[Tensor]:
        """All-to-all of rows.

        Args:
            stage: see :class:`Group`.
            buffers: [sum(sent), F] each, by destination; F and dtype are the same on all ranks.
            sent: rows to every destination.
            got: rows from every source.

        Returns:
            [sum(got), F] each, by source.

        Raises:
            RuntimeError: naming the stage, if a rank is gone.
        """
        self.traffic.bytes[stage] += sum(map(num_bytes, buffers))
        return self._swap(stage, buffers, sent, got)

    def start_swap(
        self, stage: str, buffers: list[Tensor], sent: PerRank, got: PerRank
    ) -> Callable[[], list[Tensor]]:
        """:meth:`swap`, begun: what it returns waits for the rows; other exchanges may come before that."""
        self.traffic.bytes[stage] += sum(map(num_bytes, buffers))
        return self._start_swap(stage, buffers, sent, got)

    def send(self, stage: str, buffers: list[Tensor], counts: Sequence[SendCounts]) -> list[Tensor]:
        """Buffers [sum(sent), F] -> [sum(got), F]."""
        return self.swap(stage, buffers, [c.sent for c in counts], [c.got for c in counts])

    def start_send(
        self, stage: str, buffers: list[Tensor], counts: Sequence[SendCounts]
    ) -> Callable[[], list[Tensor]]:
        """:meth:`send`, begun, as :meth:`start_swap`."""
        return self.start_swap(stage, buffers, [c.sent for c in counts], [c.got for c in counts])

    def send_back(self, stage: str, buffers: list[Tensor], counts: Sequence[SendCounts]) -> list[Tensor]:
        """The other way: buffers [sum(got), F] -> [sum(sent), F]."""
        return self.swap(stage, buffers, [c.got for c in counts], [c.sent for c in counts])

    def gather_loads(
        self,
        counts: list[Tensor],
        errors: list[int] | None = None,
        facts: Mapping[str, int] | None = None,
        in_node: bool = False,
    ) -> Tensor:
        """Every rank's counts and, in more columns, whether it failed and the facts that must be equal.

        Args:
            counts: [E] int32 each, see :func:`isoload.count`.
            errors: :func:`error_code` of the stage that failed on each rank, 0 = none.
            facts: integers that all ranks must give alike, by name, the same names on all ranks. Compared where values
                are readable (on CPU; elsewhere under ISOLOAD_CHECK=1), else they stay here.
            in_node: only the ranks of a node meet, after :meth:`join_node`; rows of other nodes are 0, and their
                failures and facts not heard of. Their caller agrees on the length of counts.

        Returns:
            loads [R, E] int32, the same on all ranks.

        Raises:
            ValueError: the same on all ranks, naming rank and stage, if any rank has an error, or the first fact that
                differs. At once on CPU; errors on a GPU at the next :meth:`swap_counts` or, where a dispatcher makes
                none, at the next :meth:`check`. In a CUDA graph likewise, for every replay.
        """
        self.check_owned("counts", counts)
        self.check_owned("errors", errors := [0] * len(counts) if errors is None else errors)
        for rank, row in zip(self.ranks, counts, strict=True):
            if row.dim() != 1 or row.dtype != torch.int32:
                raise ValueError(
                    f"counts of rank {rank} must be [E] int32, got {list(row.shape)} {row.dtype}"
                )
        self.agree_new("gather", ("length of counts",), [(len(row),) for row in counts], counts[0].device)
        told = {k: v % FACT_RANGE for k, v in (facts or {}).items()} if values_readable(counts[0]) else {}
        beside = [[code, *told.values()] for code in errors]
        self.traffic.bytes["gather"] += sum(
            num_bytes(row) + 4 * len(also) for row, also in zip(counts, beside, strict=True)
        )
        loads, gathered = self._gather_beside(counts, beside, in_node)
        codes = gathered.select(1, 0)
        if torch.compiler.is_compiling() and loads.device.type == "cpu":
            checked: Tensor = loads_of(loads, codes)
            return checked
        if capturing(codes.device):
            assert self._replayed is not None, "made by the gather before"
            torch.maximum(self._replayed, codes, out=self._replayed)
            self._captures = True
            return loads
        self._errors = codes if self._errors is None else torch.maximum(self._errors, codes)
        if self._replayed is None and may_be_kept(codes):
            with torch.inference_mode(False):  # else only inference could write it
                self._replayed = torch.zeros(codes.shape, dtype=codes.dtype, device=codes.device)
        if told or codes.device.type == "cpu":  # a rank that failed has no facts to compare
            self.check()
        if told:
            met = self.topology.node_of(self.ranks[0]) if in_node else range(len(gathered))
            raise_disagreement(list(told), gathered[met.start : met.stop, 1:].tolist(), met.start)
        return loads

    def check(self) -> None:
        """Raises the errors that :meth:`gather_loads` carried and the host has not looked at yet.

        Then, on a GPU, what ops found wrong in this rank's values: :func:`isoload.check_device`.
        """
        if (codes := self._take_errors()) is not None:
            self.traffic.host_syncs += codes.device.type != "cpu"
            raise_failure(codes.tolist())
        if self.traffic.rows.is_cuda:
            check_device(self.traffic.rows.device)

    def _take_errors(self) -> Tensor | None:
        """[R] the codes that the host has not read yet, which are forgotten here."""
        codes, self._errors = self._errors, None
        if self._captures:
            assert self._replayed is not None
            replayed = self._replayed.clone()
            self._replayed.zero_()
            codes = replayed if codes is None else torch.maximum(codes, replayed)
        return codes

    def swap_counts(
        self,
        stage: str,
        counts: list[Tensor],
        names: Sequence[str],
        facts: Sequence[Sequence[int]],
        code: int = 0,
    ) -> tuple[PerRank, PerRank, list[int]]:
        """Tells every rank what will come to it; the host waits, once, and raises what it finds then.

        Args:
            stage: see :class:`Group`.
            counts: [2, R] int64 each: rows and copies to every destination.
            names: [F] of the facts that travel along, at no further cost; F is the same on all ranks.
            facts: [F] integers each, which all ranks must give alike.
            code: :func:`error_code` of the stage that failed in this process, 0 = none.

        Returns:
            For every owned rank: sent and got [R], the rows to every destination and from every source, and the
            number of copies that it gets.

        Raises:
            ValueError: on all ranks, naming the rank that failed and its stage (also if :meth:`gather_loads` carried
                it), or the first fact that differs.
        """
        headers = [
            torch.cat([c.t(), put_on(c.device, [code, *f]).expand(c.shape[1], -1)], dim=1)
            for c, f in zip(counts, facts, strict=True)
        ]
        ones = [[1] * counts[0].shape[1]] * len(counts)
        arrived = self.swap(stage, headers, ones, ones)
        codes = self._take_errors()
        told = [] if codes is None else [codes.unsqueeze(1)]
        table = [
            torch.cat([c.select(0, 0).unsqueeze(1), a, *told], dim=1)
            for c, a in zip(counts, arrived, strict=True)
        ]
        self.traffic.host_syncs += 1
        joined = torch.stack(table) if len(table) > 1 else table[0].unsqueeze(0)
        host = (
            joined.tolist()
        )  # per owned rank and peer: sent; rows and copies got, error, facts; gather's error
        if told:
            raise_failure([peer[-1] for peer in host[0]])
        raise_failure([peer[3] for peer in host[0]])
        raise_disagreement(names, [peer[4 : 4 + len(names)] for peer in host[0]])
        sent = [[peer[0] for peer in rank] for rank in host]
        got = [[peer[1] for peer in rank] for rank in host]
        return sent, got, [sum(peer[2] for peer in rank) for rank in host]

    def agree(
        self,
        stage: str,
        names: Sequence[str],
        facts: Sequence[Sequence[int]],
        device: torch.device,
        failure: BaseException | None = None,
        failed_in: str | None = None,
    ) -> None:
        """Compares facts between all ranks, on each call; the host waits for them.

        Args:
            stage: in whose name the ranks agree.
            names: [F] what the facts are.
            facts: [F] integers each; not read on a rank with a failure.
            device: that the group exchanges on.
            failure: why this process cannot go on.
            failed_in: the stage it failed in, where that was an earlier one.

        Raises:
            ValueError: on all ranks alike, naming the first fact that differs, or the rank that failed and the stage.
            BaseException: the failure, on the rank that has it.
        """
        code = 0 if failure is None else error_code(failed_in or stage)
        told = facts if failure is None else [[0] * len(names)] * len(self.ranks)
        rows = [torch.tensor([code, *f], dtype=torch.int64, device=device) for f in told]
        gathered = self.gather(f"{stage} agreement", rows).tolist()
        if failure is not None:
            raise failure
        raise_failure([row[0] for row in gathered])
        raise_disagreement(names, [row[1:] for row in gathered])

    def agree_new(
        self, stage: str, names: tuple[str, ...], facts: list[tuple[int, ...]], device: torch.device
    ) -> None:
        """:meth:`agree` if these facts are new; the same facts are not compared again."""
        if (names, *facts) in self._agreed:
            return
        if capturing(device):
            raise ValueError(
                f"stage {stage} must run once before it is captured in a CUDA graph: ranks agree on "
                f"{', '.join(names)} first, which the host waits for"
            )
        self.agree(stage, names, facts, device)
        self.note_agreed(names, facts)

    def note_agreed(self, names: tuple[str, ...], facts: list[tuple[int, ...]]) -> None:
        """These facts have been compared: :meth:`agree_new` need not do so again."""
        self._agreed.add((names, *facts))

    def agree_once(self, stage: str, facts: dict[str, object], failure: BaseException | None = None) -> None:
        """Compares facts of any kind between all processes, as when something is made. Slow, and the host waits.

        Args:
            stage: in whose name the ranks agree.
            facts: by name; not read where there is a failure.
            failure: why this process cannot go on.

        Raises:
            ValueError: on all ranks alike, naming the first fact that differs, or the rank that failed, the stage and
                the failure.
            BaseException: the failure, on the process that has it.
        """
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        gathered = self.gather_objects(stage, facts if said is None else said)
        if failure is not None:
            raise failure
        for rank, given in enumerate(gathered):
            if isinstance(given, str):
                raise ValueError(f"{rank_failed(rank, stage)}: {given}")
        for name, value in gathered[0].items():
            for rank, given in enumerate(gathered):
                if given[name] != value:
                    raise ValueError(
                        f"{name} must be the same on all ranks, got {value} on rank 0 and {given[name]} on rank {rank}"
                    )

    @contextmanager
    def agreeing(self, stage: str) -> Iterator[dict[str, object]]:
        """What fails inside fails on all ranks, and so do facts (put into the dict) that differ: :meth:`agree_once`."""
        facts: dict[str, object] = {}
        failure: BaseException | None = None
        try:
            yield facts
        except BaseException as error:  # the others must not wait for a rank that is interrupted either
            failure = error
        self.agree_once(stage, facts, failure)

    def peers(self, device: torch.device) -> Peers | None:
        """The other ranks' memory on a device, where kernels can read it, else None. All ranks call it together."""
        return None

    def memo(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What make() returned when the key was new, the same object from then on: for all layers of the group."""
        if key not in self._memo:
            self._memo[key] = make()
        made: T = self._memo[key]
        return made

    def reset_traffic(self) -> None:
        """Counts from zero. The rows stay where they were: a dispatch would move them, and the host wait for that."""
        self.traffic = Traffic.of(self.topology.num_ranks, self.traffic.rows.device)

    def check_owned(self, name: str, given: Sequence[object]) -> None:
        """Raises ValueError unless a list has an entry per owned rank."""
        if len(given) != len(self.ranks):
            raise ValueError(
                f"{name} must have one entry per owned rank ({len(self.ranks)}), got {len(given)}"
            )
