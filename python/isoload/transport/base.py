"""The protocol of a transport, and all that does not depend on how bytes move between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from isoload.ops import check_device
from isoload.topology import Topology
from isoload.transport.agreement import (
    FACTS,
    dispatch_facts,
    error_code,
    raise_disagreement,
    raise_failure,
    rank_failed,
)
from isoload.transport.exchange import Combine, Dispatch, anchor
from isoload.transport.peers import Peers
from isoload.transport.records import Handle, Received, Traffic, num_bytes
from isoload.transport.rows import Splits, find_destinations, map_rows


class Transport(ABC):
    """Moves loads and rows between the ranks of a group; lists run over ``ranks``, those that this process owns.

    Every rank makes the same calls in the same order, T = 0 included. Where gradients are recorded, backward enters
    its exchanges on every rank whose combined result takes part in the loss, whatever else requires a gradient.

    Args:
        topology: R ranks.
        ranks: the ranks that this process owns.
        max_tokens_per_rank: C. Every pair of ranks exchanges C rows, so shapes are fixed and the host never waits;
            None: exactly the rows there are, and the host waits once per dispatch.
    """

    def __init__(
        self, topology: Topology, ranks: Sequence[int], max_tokens_per_rank: int | None = None
    ) -> None:
        if max_tokens_per_rank is not None and max_tokens_per_rank < 1:
            raise ValueError(f"max_tokens_per_rank must be at least 1, got {max_tokens_per_rank}")
        self.topology = topology
        self.ranks = tuple(ranks)
        self.max_tokens_per_rank = max_tokens_per_rank
        self.reset_traffic()
        self._errors: Tensor | None = None  # [R] codes that the host has not read yet
        self._agreed: set[tuple[Any, ...]] = set()
        self._shared: dict[tuple[Any, ...], Any] = {}

    @abstractmethod
    def _gather(self, stage: str, rows: list[Tensor]) -> Tensor:
        """[R, F]: the row [F] of every rank."""

    @abstractmethod
    def _swap(
        self, stage: str, buffers: list[Tensor], sent: list[list[int]], got: list[list[int]]
    ) -> list[Tensor]:
        """Per owned rank [sum(got), F], its sources' parts in order, from buffers [sum(sent), F] by destination."""

    @abstractmethod
    def _gather_objects(self, stage: str, given: object) -> list[Any]:
        """The object of every process of the group."""

    def _start_swap(
        self, stage: str, buffers: list[Tensor], sent: list[list[int]], got: list[list[int]]
    ) -> Callable[[], list[Tensor]]:
        """:meth:`_swap`, begun."""
        arrived = self._swap(stage, buffers, sent, got)
        return lambda: arrived

    def gather_loads(self, counts: list[Tensor], errors: list[int] | None = None) -> Tensor:
        """Every rank's counts and, in one more column, whether it failed.

        Args:
            counts: [E] int32 each, see :func:`isoload.count`.
            errors: :func:`error_code` of the stage that failed on each rank, 0 = none.

        Returns:
            loads [R, E] int32, the same on all ranks.

        Raises:
            ValueError: the same on all ranks, naming rank and stage, if any rank has an error. At once on CPU; on a
                GPU at the next dispatch or, where that does not wait, at the next :meth:`check`.
        """
        self._check_list("counts", counts)
        self._check_list("errors", errors := [0] * len(counts) if errors is None else errors)
        for rank, row in zip(self.ranks, counts, strict=True):
            if row.dim() != 1 or row.dtype != torch.int32:
                raise ValueError(
                    f"counts of rank {rank} must be [E] int32, got {list(row.shape)} {row.dtype}"
                )
        self._agree("gather", ("length of counts",), [(len(row),) for row in counts], counts[0].device)
        rows = [torch.cat([row, row.new_full((1,), code)]) for row, code in zip(counts, errors, strict=True)]
        gathered = self._gather_counted("gather", rows)
        codes = gathered.select(1, -1)
        self._errors = codes if self._errors is None else torch.maximum(self._errors, codes)
        if codes.device.type == "cpu":
            self.check()
        return gathered.narrow(1, 0, len(counts[0]))

    def check(self) -> None:
        """Raises the errors that :meth:`gather_loads` carried and the host has not looked at yet.

        Then, on a GPU, what ops found wrong in this rank's values: :func:`isoload.check_device`.
        """
        if self._errors is not None:
            codes, self._errors = self._errors, None
            self.traffic.host_syncs += codes.device.type != "cpu"
            raise_failure(codes.tolist())
        if self.traffic.rows.is_cuda:
            check_device(self.traffic.rows.device)

    def dispatch(
        self, x: list[Tensor], slots: list[Tensor], weights: list[Tensor], slots_per_rank: int
    ) -> list[Received]:
        """Sends every token once to each rank that holds one of its slots. Differentiable in x and weights.

        Args:
            x: [T, H] float64, float32, bfloat16 or float16 each; T may differ and be 0.
            slots: [T, K] int32 or int64 each, global: what :func:`isoload.route` returns; -1 = absent.
            weights: [T, K] float32 each; beside float64 x also float64, which keeps their gradients exact.
            slots_per_rank: S; slot p lives on rank p // S.

        Raises:
            ValueError: naming the argument, the rule and the value. The other ranks raise, too, naming rank and stage;
                with max_tokens_per_rank they do not, unless the caller has told them by gather_loads.
            RuntimeError: naming the stage, if a rank is gone.
        """
        for name, given in (("x", x), ("slots", slots), ("weights", weights)):
            self._check_list(name, given)
        num_ranks, capacity = self.topology.num_ranks, self.max_tokens_per_rank
        try:
            self._check_tokens(x)
            facts = [
                dispatch_facts(*given, slots_per_rank, num_ranks)
                for given in zip(self.ranks, x, slots, weights, strict=True)
            ]
        except ValueError:
            self.tell_failure("dispatch", x[0].device)
            raise
        destinations = [find_destinations(s, slots_per_rank, num_ranks) for s in slots]
        if capacity is None:
            sent, got = self._swap_row_counts([d.counts for d in destinations], facts)
        else:
            self._agree("dispatch", FACTS, facts, x[0].device)
            sent = got = [[capacity] * num_ranks] * len(self.ranks)
        self.traffic.rows = self.traffic.rows.to(x[0].device)
        for rank, d in zip(self.ranks, destinations, strict=True):
            self.traffic.rows.select(0, rank).add_(d.counts)
        maps = [map_rows(*args, capacity) for args in zip(destinations, sent, got, strict=True)]
        link, *values = Dispatch.apply(self, maps, slots_per_rank, slots, anchor(), *x, *weights)
        owned = len(self.ranks)
        handles = [Handle(row_map, link) for row_map in maps]
        received = (values[:owned], values[owned : 2 * owned], values[2 * owned :], handles)
        return [Received(*fields) for fields in zip(*received, strict=True)]

    def combine(self, y: list[Tensor], received: list[Received]) -> list[Tensor]:
        """Returns every row to its token and adds up. Differentiable in y.

        Args:
            y: [N, H] each, in the dtype of the received rows: weighted and summed over the row's local copies.
            received: what dispatch returned.

        Returns:
            [T, H] each: the plain sum by ascending rank, accumulated in max(float32, dtype); 0 for a token without
            copies.

        Raises:
            ValueError: naming the argument, the rule and the value.
            RuntimeError: naming the stage, if a rank is gone.
        """
        self._check_list("y", y)
        self._check_list("received", received)
        for rank, rows, got in zip(self.ranks, y, received, strict=True):
            if rows.shape != got.rows.shape or rows.dtype != got.rows.dtype:
                raise ValueError(
                    f"y of rank {rank} must be {list(got.rows.shape)} {got.rows.dtype} as the received rows, "
                    f"got {list(rows.shape)} {rows.dtype}"
                )
        link = received[0].handle.link
        link = link if link.requires_grad else anchor()
        return list(Combine.apply(self, [r.handle.row_map for r in received], link, *y))

    def agree(
        self,
        stage: str,
        names: Sequence[str],
        facts: Sequence[Sequence[int]],
        device: torch.device,
        failure: Exception | None = None,
    ) -> None:
        """Compares facts between all ranks, on each call; the host waits for them.

        Args:
            stage: in whose name the ranks agree.
            names: [F] what the facts are.
            facts: [F] integers each; not read on a rank with a failure.
            device: that the group exchanges on.
            failure: why this process cannot go on.

        Raises:
            ValueError: on all ranks alike, naming the first fact that differs, or the rank that failed and the stage.
            Exception: the failure, on the rank that has it.
        """
        code = 0 if failure is None else error_code(stage)
        told = facts if failure is None else [[0] * len(names)] * len(self.ranks)
        rows = [torch.tensor([code, *f], dtype=torch.int64, device=device) for f in told]
        gathered = self._gather_counted(f"{stage} agreement", rows).tolist()
        if failure is not None:
            raise failure
        raise_failure([row[0] for row in gathered])
        raise_disagreement(names, [row[1:] for row in gathered])

    def peers(self, device: torch.device) -> Peers | None:
        """The other ranks' memory on a device, where kernels can read it; None elsewhere. All ranks ask together."""
        return None

    def shared(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What all layers on this transport have in common, made once."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    @contextmanager
    def agreeing(self, stage: str) -> Iterator[dict[str, object]]:
        """What fails inside fails on all ranks, and so do facts (put into the dict) that differ: :meth:`agree_once`."""
        facts: dict[str, object] = {}
        failure = None
        try:
            yield facts
        except Exception as error:
            failure = error
        self.agree_once(stage, facts, failure)

    def agree_once(self, stage: str, facts: dict[str, object], failure: Exception | None = None) -> None:
        """Compares facts of any kind between all processes, as when something is made. Slow, and the host waits.

        Args:
            stage: in whose name the ranks agree.
            facts: by name; not read where there is a failure.
            failure: why this process cannot go on.

        Raises:
            ValueError: on all ranks alike, naming the first fact that differs, or the rank that failed and the stage.
            Exception: the failure, on the process that has it.
        """
        gathered = self._gather_objects(stage, None if failure is not None else facts)
        if failure is not None:
            raise failure
        for rank, given in enumerate(gathered):
            if given is None:
                raise ValueError(rank_failed(rank, stage))
        for name, value in gathered[0].items():
            for rank, given in enumerate(gathered):
                if given[name] != value:
                    raise ValueError(
                        f"{name} must be the same on all ranks, got {value} on rank 0 and {given[name]} on rank {rank}"
                    )

    def start(
        self, stage: str, buffers: list[Tensor], splits: Sequence[Splits]
    ) -> Callable[[], list[Tensor]]:
        """:meth:`send`, begun: what it returns waits for the rows; other exchanges may come before that."""
        self.traffic.bytes[stage] += sum(map(num_bytes, buffers))
        return self._start_swap(stage, buffers, [s.sent for s in splits], [s.got for s in splits])

    def send(self, stage: str, buffers: list[Tensor], splits: Sequence[Splits]) -> list[Tensor]:
        """Token side to expert side: buffers [sum(sent), F] -> [sum(got), F]."""
        return self._swap_counted(stage, buffers, [s.sent for s in splits], [s.got for s in splits])

    def send_back(self, stage: str, buffers: list[Tensor], splits: Sequence[Splits]) -> list[Tensor]:
        """Expert side to token side: buffers [sum(got), F] -> [sum(sent), F]."""
        return self._swap_counted(stage, buffers, [s.got for s in splits], [s.sent for s in splits])

    def tell_failure(self, stage: str, device: torch.device) -> None:
        """Takes part in the exchange of row counts that the other ranks are in or come to, so that they raise.

        With max_tokens_per_rank there is none: nothing is told.
        """
        if self.max_tokens_per_rank is not None:
            return
        nothing = [torch.zeros(self.topology.num_ranks, dtype=torch.int64, device=device) for _ in self.ranks]
        with suppress(ValueError):  # it is this rank's own failure, which the caller raises in full
            self._swap_row_counts(nothing, [(0,) * len(FACTS)] * len(nothing), error_code(stage))

    def reset_traffic(self) -> None:
        num_ranks = self.topology.num_ranks
        self.traffic = Traffic(torch.zeros(num_ranks, num_ranks, dtype=torch.int64))

    def _swap_row_counts(
        self, counts: list[Tensor], facts: list[tuple[int, ...]], code: int = 0
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Rows to every destination and from every source; the facts travel along and are compared, at no cost."""
        headers = [
            torch.cat([c.unsqueeze(1), c.new_tensor([code, *f]).expand(len(c), -1)], dim=1)
            for c, f in zip(counts, facts, strict=True)
        ]
        ones = [[1] * len(counts[0])] * len(counts)
        arrived = self._swap_counted("dispatch row counts", headers, ones, ones)
        errors = self._errors if self._errors is not None else torch.zeros_like(counts[0])
        self._errors = None
        table = [
            torch.cat([c.unsqueeze(1), errors.unsqueeze(1), a], dim=1)
            for c, a in zip(counts, arrived, strict=True)
        ]
        self.traffic.host_syncs += 1
        host = torch.stack(table).tolist()  # per owned rank and peer: sent, gather's error, got, error, facts
        raise_failure([peer[1] for peer in host[0]])
        raise_failure([peer[3] for peer in host[0]])
        raise_disagreement(FACTS, [peer[4:] for peer in host[0]])
        return [[peer[0] for peer in rank] for rank in host], [[peer[2] for peer in rank] for rank in host]

    def _agree(
        self, stage: str, names: tuple[str, ...], facts: list[tuple[int, ...]], device: torch.device
    ) -> None:
        """Compares facts between all ranks when they are new; the same facts are not compared again."""
        if (names, *facts) in self._agreed:
            return
        self.agree(stage, names, facts, device)
        self._agreed.add((names, *facts))

    def _check_list(self, name: str, given: Sequence[object]) -> None:
        if len(given) != len(self.ranks):
            raise ValueError(
                f"{name} must have one entry per owned rank ({len(self.ranks)}), got {len(given)}"
            )

    def _check_tokens(self, x: list[Tensor]) -> None:
        limit = self.max_tokens_per_rank
        for rank, tokens in zip(self.ranks, map(len, x), strict=True):
            if limit is not None and tokens > limit:
                raise ValueError(
                    f"x of rank {rank} must have at most max_tokens_per_rank={limit} tokens, got {tokens}"
                )

    def _gather_counted(self, stage: str, rows: list[Tensor]) -> Tensor:
        self.traffic.bytes[stage] += sum(map(num_bytes, rows))
        return self._gather(stage, rows)

    def _swap_counted(
        self, stage: str, buffers: list[Tensor], sent: list[list[int]], got: list[list[int]]
    ) -> list[Tensor]:
        self.traffic.bytes[stage] += sum(map(num_bytes, buffers))
        return self._swap(stage, buffers, sent, got)
