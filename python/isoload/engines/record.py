"""EngineRecord: shadow mode, in which the engine chooses replicas and isoload counts its choice on the device.

A background thread writes the counts to files and logs them with the loads of isoload's plan for the same copies.
"""

from __future__ import annotations

import atexit
import logging
import operator
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoload.analysis.judge import Floats, exact_imbalance, routed_imbalance
from isoload.analysis.rank_loads import RankLoads
from isoload.balancing.counting import count, without_padding
from isoload.balancing.planning import refill
from isoload.engines.settings import Settings
from isoload.engines.tables import fill_spare_slots, in_order, only_spare, placement_of
from isoload.online import Recorder
from isoload.online.metrics import Metrics
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies import Policy
from isoload.topology import Topology
from isoload.traces.identity import Identity, Numbering

log = logging.getLogger("isoload")
Bools = NDArray[np.bool_]
NUMBERING: dict[str, Numbering] = {"SGLang": "hidden", "vLLM": "moe"}  # of the rows of the engine's tables
KEPT = 64  # passes in memory; a file has at most as many
OWN = "this rank's copies alone: isoload report joins all ranks"


class EngineRecord:
    """Record of one model's layers on one rank.

    Nothing is exchanged between ranks: one of record_every passes is kept, selected by its number. All ranks must run
    the same number of passes, as where every pass contains an all-to-all. `tables` is [L, P] on the host. With tokens
    "same" only the first rank writes. `decode_tokens`: a pass with more tokens on this process counts as prefill, where
    the engine does not set :attr:`phase`.
    """

    def __init__(
        self,
        settings: Settings,
        engine: str,
        model: str,
        rank: int,
        tables: Tensor,
        num_experts: int,
        topology: Topology,
        tokens: str,
        device: torch.device,
        decode_tokens: int | None = None,
    ) -> None:
        self.settings, self.engine, self.model, self.rank = settings, engine, model, rank
        self.tables, self.num_experts, self.topology = tables.clone(), num_experts, topology
        self.tokens, self.started, self.decode_tokens = tokens, int(time.time()), decode_tokens
        self.recorder = Recorder(tables.shape[0], tables.shape[1], KEPT, device)
        self.metrics = Metrics()
        self.slot_bytes: dict[int, int] = {}  # by layer the weights and scales of one expert
        self._travel: Travel | None = None  # used in the background thread alone
        self.phase = "decode"  # of the current pass
        self.passes = 0  # forward passes so far
        self._ended = False  # whether the current pass is counted already
        self._recorded: list[tuple[int, str]] = []  # number and phase of the recorder's batches
        self._since = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="isoload-record")
        atexit.register(self.close)

    def add(self, layer: int, slots: Tensor, num_valid: Tensor | None = None) -> None:
        """Count slots [T, K] of a layer's batch, in a captured graph too; -1 and rows from num_valid on are skipped."""
        ids = slots if slots.dtype in (torch.int32, torch.int64) else slots.to(torch.int32)
        copies = count(without_padding(ids, num_valid), self.tables.shape[1])
        self.recorder.add(layer, [copies], self, slots.shape[1])

    def summary(self, layers: int | None = None) -> str:
        number = self.recorder.num_layers if layers is None else layers
        return f"1 of {self.settings.record_every} passes is recorded, in {number} layers"

    def begin(self) -> None:
        """Begin a pass; before the first pass, drop the counts of graph captures and warm-ups."""
        if not self.passes:
            self.recorder.skip()

    def clear(self) -> None:
        self.recorder.clear()
        self._recorded = []

    def step_ended(self) -> None:
        self._end()
        self._ended = False
        due = self.settings.report_seconds and time.monotonic() - self._since > self.settings.report_seconds
        if due or self.recorder.num_batches == KEPT:
            self.flush()

    def moved(self, tables: Tensor) -> None:
        """Set the experts [L, P] in each slot after the engine has moved them."""
        self._end()
        if torch.equal(tables, self.tables):
            return
        self.flush()
        self.tables = tables.clone()

    def flush(self) -> None:
        """Pass the recorded passes to the thread; the host waits for the device."""
        self._since = time.monotonic()
        if rank_loads := self._take():
            self._thread.submit(self._publish, rank_loads)

    def close(self) -> None:
        """Write the recorded passes at the end of the process; an engine that is killed loses them."""
        atexit.unregister(self.close)
        self._thread.shutdown()
        if rank_loads := self._take():
            self._publish(rank_loads)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended, self.passes = True, self.passes + 1
        if self.passes % self.settings.record_every:
            self.recorder.skip()
            return
        self.recorder.step()
        self._recorded.append((self.passes, self.phase))

    def _take(self) -> RankLoads | None:
        if not self._recorded:
            return None
        copies = self.recorder.counts().numpy()
        recorded = self._recorded
        self.clear()
        passes, phases = zip(*recorded, strict=True)
        if self.decode_tokens is not None:
            tokens = copies.sum(-1).max(1) / max(self.recorder.top_k, 1)  # [B]
            phases = tuple("prefill" if n > self.decode_tokens else "decode" for n in tokens)
        table = self.tables.numpy().astype(np.int32)
        facts = self.num_experts, self.recorder.top_k, self.rank, self.topology, self.tokens, self.started
        identity = Identity(NUMBERING.get(self.engine, "order"), model=self.model)
        return RankLoads(copies, table, passes, phases, *facts, self.model, identity)

    def _publish(self, rank_loads: RankLoads) -> None:
        """Run in the background thread. Exceptions are logged and never reach the engine."""
        try:
            if self.settings.record is not None and (self.tokens == "own" or self.rank == 0):
                rank_loads.save(self.settings.record)
            if self.settings.report_seconds and self.rank == 0:
                self._report(rank_loads)
        except Exception:
            log.exception(f"isoload {self.engine}: the counts of shadow mode are lost")

    def _report(self, rank_loads: RankLoads) -> None:
        if not rank_loads.slot_copies.any():
            passes = f"{len(rank_loads.passes)} passes of {self.model or 'the model'}"
            log.warning(
                f"isoload {self.engine}: shadow mode has counted no copy in {passes}: they are not recorded"
            )
            return
        before, after, routed = before_and_after(rank_loads)
        alone = f"; {OWN}" if self.tokens == "own" else ""
        for phase in sorted(set(rank_loads.phases)):
            batches = [i for i, name in enumerate(rank_loads.phases) if name == phase and routed[i].any()]
            if batches:
                self._log(phase, before[batches].mean(0), after[batches].mean(0), len(batches), alone)
                self._measure(phase, before[batches], after[batches], routed[batches])
        if self.settings.spare_slots and "prefill" in rank_loads.phases:
            self._report_travel(rank_loads)

    def _report_travel(self, rank_loads: RankLoads) -> None:
        spare = self.settings.spare_slots
        name = f"isoload {self.engine} in shadow, prefill, {spare} spare slot{'s' * (spare > 1)} on each rank"
        if self.tokens == "own":
            record = self.settings.record or "RECORD"
            log.info(
                f"{name}: what would travel depends on the copies of all ranks: isoload replay {record} --spare-slots "
                f"{spare} --policies exact,llep:within=node plans their record"
            )
            return
        if self._travel is None or not np.array_equal(self._travel.table, rank_loads.slot_to_expert):
            self._travel = Travel(rank_loads, self.settings.policies_for(shared=False)["prefill"], spare)
        rows = self._travel.add(rank_loads)
        if not rows:
            return
        layers, batches, fills, moves, arrivals, last, filled = zip(*rows, strict=True)
        sizes = [self.slot_bytes.get(layer, 0) for layer in layers]
        size, received = (sum(map(operator.mul, numbers, sizes)) for numbers in (moves, arrivals))
        self.metrics.add("fills_total", sum(fills))
        self.metrics.add("experts_travelled_total", sum(arrivals))
        self.metrics.add("bytes_travelled_total", received)
        self.metrics.set_imbalance("prefill", "last_fill", last)
        self.metrics.set_imbalance("prefill", "filled", filled)
        weights = f" ({size / 2**30:.2f} GiB)" if size else ""
        log.info(
            f"{name}: {sum(moves)} experts{weights} would have travelled in {sum(fills)} of {sum(batches)} batches of "
            f"a layer; imbalance {np.mean(last):.3f} over the last fill, {np.mean(filled):.3f} filled"
        )

    def _measure(self, phase: str, before: Floats, after: Floats, routed: Bools) -> None:
        some = routed.any(0)
        for plan, imbalance in (("engine", before), ("isoload", after)):
            means = np.nanmean(np.where(routed, imbalance, np.nan)[:, some], axis=0)
            self.metrics.set_imbalance(phase, plan, means)

    def _log(self, phase: str, before: Floats, after: Floats, passes: int, alone: str) -> None:
        text = ", ".join(
            f"{name} {np.quantile(before, part):.3f} -> {np.quantile(after, part):.3f}"
            for name, part in (("half of the layers up to", 0.5), ("nine in ten", 0.9), ("worst", 1.0))
        )
        log.info(
            f"isoload {self.engine} in shadow, {phase}: {passes} passes of {len(before)} layers; imbalance "
            f"{before.mean():.3f} as routed, {after.mean():.3f} as isoload would plan; {text}{alone}"
        )


class Travel:
    """The spare slots that a policy would have had in recorded prefills, kept from one to the next. If an expert of the
    engine's table is in spare slots alone, the experts are in order, as isoload starts."""

    def __init__(self, rank_loads: RankLoads, policy: Policy, spare: int) -> None:
        self.table, self.policy, self.spare = rank_loads.slot_to_expert, policy, spare
        tables, experts = torch.from_numpy(self.table).long(), rank_loads.num_experts
        topology, layers = rank_loads.topology, len(tables)
        if len(only_spare(tables, experts, topology.num_ranks, spare)):
            placement = in_order(tables, experts, topology, spare)
            tables = fill_spare_slots(placement, torch.ones(layers, experts))
        else:
            placement = placement_of(tables, experts, topology, spare_slots=spare)
        placed = placement.layers("cpu")
        self._layers = [placed[i] for i in range(layers)]
        self._last: list[PlacedLayers] = [self._layers[i].fill(tables[i].int()) for i in range(layers)]

    def add(self, rank_loads: RankLoads) -> list[tuple[int, int, int, int, int, float, float]]:
        """Return what would have travelled in these passes, for each layer with copies in a prefill: its row in the
        table, batches with copies, those that would have filled spare slots, experts that would have travelled, those
        to the first rank, and the mean imbalance over the last fill and over the slots that the batches would use."""
        counts, phases = rank_loads.counts, np.array(rank_loads.phases)
        ranks, size = rank_loads.topology.num_ranks, self.table.shape[1] // rank_loads.topology.num_ranks
        travelled = []
        for i, placed in enumerate(self._layers):
            rows = []
            for batch in counts[phases == "prefill", i]:
                if not batch.any():
                    continue
                loads = torch.zeros(ranks, len(batch), dtype=torch.int32)
                loads[0] = torch.from_numpy(batch)
                new = refill(self.policy, loads, placed, self._last[i])
                changed = new.filled.slot_to_expert != self._last[i].slot_to_expert
                mean = int(batch.sum()) / ranks
                peaks = int(new.before) / mean, int(new.after) / mean
                rows.append((int(new.refilled), int(changed.sum()), int(changed[:size].sum()), *peaks))
                self._last[i] = new.filled
            if rows:
                fills, moves, arrivals, last, filled = zip(*rows, strict=True)
                means = float(np.mean(last)), float(np.mean(filled))
                travelled.append((i, len(rows), sum(fills), sum(moves), sum(arrivals), *means))
        return travelled


def before_and_after(rank_loads: RankLoads) -> tuple[Floats, Floats, Bools]:
    """Return [B, L] imbalance as routed and as planned, and [B, L] whether a pass has copies in a layer."""
    layers = np.flatnonzero(rank_loads.slot_copies.any((0, 2)))
    copies, table = rank_loads.slot_copies[:, layers], torch.from_numpy(rank_loads.slot_to_expert[layers])
    placement = Placement(table, rank_loads.topology, rank_loads.num_experts)
    after = exact_imbalance(placement, rank_loads.counts[:, layers])
    return routed_imbalance(placement, copies), after, np.asarray(copies.any(-1))
