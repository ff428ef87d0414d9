"""Times files: measurements of one machine by ``isoload measure``, for the commands that model milliseconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoload.files import check_keys, is_number, parse_json, read_text
from isoload.times.exchanges import STEPS, AllToAllTime, Curve, LayerTime, other_size
from isoload.times.experts import ExpertTime
from isoload.wording import shown

FORMAT, VERSION, UNIT = "isoload times", 1, "microseconds"
MOST_BYTES = 16 * 2**20
NEW = "isoload measure writes a new one"
PLANS = ("exact", "own", "node")  # names of the choice of replicas, as in isoload.analysis.advice.Candidate
LEAST_SPREAD = 1.01  # of measured speeds: smaller differences are noise


@dataclass(frozen=True)
class Times:
    """Times that were measured on one group of GPUs (or CPU processes)."""

    device: str  # description of the machine
    software: dict[str, str]
    ranks: int
    nodes: int
    experts: ExpertTime  # constants of a rank's grouped GEMMs
    dispatch: AllToAllTime | None  # of the whole group; None: measured on one rank
    combine: AllToAllTime | None
    move_us: float | None  # microseconds in which an expert of one layer arrives from another rank
    plan_us: dict[str, float]  # by choice of replicas: gather, plan and route of a layer
    speeds: tuple[float, ...]  # [R] of each rank's experts over the slowest rank's
    points: dict[str, list[list[float]]]  # raw measurements, by kind
    gpus: tuple[str, ...] = ()  # [R] UUID of each rank's GPU, if ranks have one
    source: str = "given"

    @property
    def rank_speeds(self) -> tuple[float, ...] | None:
        """Speeds of the ranks, or None if they differ by less than 1 %, which is noise."""
        return self.speeds if max(self.speeds) / min(self.speeds) >= LEAST_SPREAD else None

    def layer(self, ranks: int, nodes: int, top_k: int) -> tuple[LayerTime, list[str]]:
        """Return the constants of a layer over a group, and sentences about those of another measured group."""
        if ranks == 1:
            return LayerTime(None, self.experts, None), []
        if self.dispatch is None or self.combine is None:
            raise ValueError(
                f"{self.source} has no times of dispatch and combine: run isoload measure on the ranks that will "
                f"serve, torchrun --nproc-per-node {ranks // nodes} -m isoload measure ..."
            )
        if (ranks, nodes) == (self.ranks, self.nodes):
            return LayerTime(self.dispatch, self.experts, self.combine), []
        if nodes != 1 or self.nodes != 1:
            raise ValueError(
                f"{self.source} was measured on {self.ranks} ranks and {self.nodes} nodes, from which times of "
                f"{ranks} ranks and {nodes} nodes cannot be derived: run isoload measure on those"
            )
        steps = [other_size(step, top_k, ranks) for step in (self.dispatch, self.combine)]
        note = f"the all-to-all of {ranks} ranks is extrapolated; measured were {self.ranks} ranks"
        return LayerTime(steps[0], self.experts, steps[1]), [note]

    @property
    def copy_us(self) -> float:
        """Microseconds of one copy in a large GEMM."""
        return self.experts.c_us + self.experts.rho_us

    @property
    def break_even(self) -> int | None:
        """Copies from which borrowing an expert pays, if nothing hides the transfer; None: no transfer was measured."""
        return None if self.move_us is None else ceil(self.move_us / self.copy_us)

    def moves_in_time(self, copies: int, slots: int) -> int:
        """Return how many experts' weights reach a rank while it computes copies, spread evenly over slots (papers/004,
        3.2).
        """
        for name, value in (("copies", copies), ("slots", slots)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a number of at least 1, got {value!r}")
        if not self.move_us:
            raise ValueError(
                f"{self.source} has no time of moving an expert's weights: run isoload measure on at least two ranks"
            )
        quota = np.full(slots, copies // slots)
        quota[: copies % slots] += 1
        return int(self.experts.seconds(quota) * 1e6 / self.move_us)

    def to_json(self) -> dict[str, Any]:
        steps = {name: getattr(self, name) for name in STEPS}
        exchange: dict[str, Any] | None = None
        if self.dispatch is not None:
            exchange = {name: [*step.low, step.tokens_to, step.fit_error] for name, step in steps.items()}
            exchange |= {"kernel": self.dispatch.kernel}
        experts = {key: value for key, value in asdict(self.experts).items() if key not in LEFT_OUT}
        plain = {name: getattr(self, name) for name in ("device", "software", "ranks", "nodes")}
        head = {"format": FORMAT, "version": VERSION, "unit": UNIT, **plain}
        times = {"experts": experts, "exchange": exchange, "move_us": self.move_us, "plan_us": self.plan_us}
        return head | times | {"speeds": list(self.speeds), "points": self.points, "gpus": list(self.gpus)}


LEFT_OUT = ("source", "version", "gpu")
KEYS = {"format", "version", "unit", "device", "software", "ranks", "nodes", "experts", "exchange", "move_us"}
KEYS |= {"plan_us", "speeds", "points", "gpus"}
CONSTANTS = {field.name for field in fields(ExpertTime)} - set(LEFT_OUT)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, "" for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def load(path: str | Path) -> Times:
    """Read a times file; an error names the file and the key."""
    try:
        content = parse_json(read_text(Path(path), MOST_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"times file {path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a times file: {NEW}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"times file {path} has version {shown(content.get('version'))}, and this isoload reads version {VERSION}: "
            f"{NEW}"
        )
    if content.get("unit") != UNIT:
        raise ValueError(f"times file {path} must be in {UNIT}, got {shown(content.get('unit'))}: {NEW}")
    try:
        return _times(content, str(path))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"times file {path}: {error}") from None


def _times(content: dict[str, Any], path: str) -> Times:
    check_keys(content, KEYS, "keys")
    check_keys(content["experts"], CONSTANTS, "constants of experts")
    device = str(content["device"])
    ranks, nodes = _whole(content, "ranks"), _whole(content, "nodes")
    experts = ExpertTime(gpu=device, source=path, **content["experts"])
    steps: dict[str, AllToAllTime | None] = dict.fromkeys(STEPS)
    if (exchange := content["exchange"]) is not None:
        check_keys(exchange, {*STEPS, "kernel"}, "keys of exchange")
        for name in STEPS:
            a, s, q, tokens_to, error = (_number(f"exchange.{name}", value) for value in exchange[name])
            if not (a > 0 and q > 0):
                raise ValueError(f"exchange.{name} must have a positive call and power, got {a:g} and {q:g}")
            curve = Curve(a, s, q)
            at = device, str(exchange["kernel"]), name, ranks, nodes, curve, curve, tokens_to, error
            steps[name] = AllToAllTime(*at, source=path)
    plan_us = {name: _number(f"plan_us.{name}", value) for name, value in content["plan_us"].items()}
    if unknown := [name for name in plan_us if name not in PLANS]:
        raise ValueError(f"plan_us must have keys of {', '.join(PLANS)}, got {shown(unknown[0])}")
    if lacking := [name for name in ("exact", "own") if name not in plan_us]:  # a plan would cost nothing
        raise ValueError(f"plan_us must have exact and own, got no {lacking[0]}")
    speeds = tuple(_number("speeds", value) for value in content["speeds"])
    if len(speeds) != ranks or not all(speeds):
        raise ValueError(f"speeds must be {ranks} positive numbers, one for each rank, got {len(speeds)}")
    gpus = tuple(map(str, content["gpus"]))
    if gpus and (len(gpus) != ranks or len(set(gpus)) < ranks):
        raise ValueError(f"gpus must be {ranks} different UUIDs, one for each rank, got {shown(list(gpus))}")
    move = content["move_us"]
    move_us = None if move is None else _number("move_us", move)
    software = {str(key): str(value) for key, value in content["software"].items()}
    group = device, software, ranks, nodes, experts, steps["dispatch"], steps["combine"]
    return Times(*group, move_us, plan_us, speeds, content["points"], gpus, path)


def _whole(content: dict[str, Any], key: str) -> int:
    value = content[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} must be a whole number from 1 on, got {shown(value)}")
    return value


def _number(key: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value < float("inf"):
        raise ValueError(f"{key} must be a number from 0 on, got {shown(value)}")
    return float(value)
