"""The environment variables of the plug-ins: the options of isoload inside of an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from isoload.checks import parse_amount
from isoload.engines.worth import RebalanceRule
from isoload.placers import make_placer, parse_placer
from isoload.policies import Policy, make_policy, parse_policy
from isoload.policies.borrowing import IN_ENGINES
from isoload.policies.shared import SharedPolicy
from isoload.times.file import load
from isoload.wording import not_one_of


class Variable(NamedTuple):
    """One environment variable. docs/environment.md has a table of all, made from these fields."""

    name: str
    default: str = ""
    values: str = "0 or 1"
    meaning: str = ""


SGLANG = Variable("ISOLOAD_SGLANG", "0", meaning="attach to SGLang; with 0 isoload is not imported")
VLLM = Variable("ISOLOAD_VLLM", "0", meaning="attach to vLLM; with 0 isoload is not imported")
MODE = Variable(
    "ISOLOAD_MODE", "on", "on, off or shadow",
    "on: isoload chooses the replicas; off: isoload attaches to nothing; shadow: the engine chooses, isoload counts",
)  # fmt: skip
STRICT = Variable(
    "ISOLOAD_STRICT", "0",
    meaning="1: do not start where the engine differs from what isoload expects; 0: leave what differs to the engine",
)  # fmt: skip
PLACEMENT = Variable(
    "ISOLOAD_PLACEMENT", "", "file",
    "placement file that vLLM starts from, also without ISOLOAD_VLLM=1; SGLang does not start with it, since it has "
    "--init-expert-location; empty: the engine's own start",
)  # fmt: skip
POLICY = Variable(
    "ISOLOAD_POLICY", "", "name, name:option=value or, in SGLang, prefill=name,decode=name",
    "how copies are split over replicas; empty: exact:tolerance=0.001, whose busiest rank has at most 0.1 % more "
    "copies than the proved minimum, and joint:tolerance=0.001 with SGLang's Waterfill",
)  # fmt: skip
LOADS = Variable(
    "ISOLOAD_LOADS", "", "gathered, own or node",
    "whose counts plan a batch where each rank has its own tokens; empty: the default of the engine's option",
)  # fmt: skip
PLACER = Variable(
    "ISOLOAD_PLACER", "eplb", "name or name:option=value", "placer that isoload uses when the engine rebalances"
)  # fmt: skip
REPORT = Variable(
    "ISOLOAD_REPORT_SECONDS", "0", "number",
    "seconds between two reports of imbalance, as a log line and as Prometheus metrics; 0: nothing is measured",
)  # fmt: skip
RECORD = Variable(
    "ISOLOAD_RECORD", "", "folder", "where each rank writes its counts in shadow mode; empty: no files"
)  # fmt: skip
RECORD_EVERY = Variable(
    "ISOLOAD_RECORD_EVERY", "64", "number", "shadow mode keeps the counts of one forward pass in so many"
)  # fmt: skip
SWITCH = Variable(
    "ISOLOAD_SWITCH", "", "file",
    "the first rank reads on or off from this file while the engine serves; empty: nothing is switched",
)  # fmt: skip
CHECK = Variable(
    "ISOLOAD_CHECK_WEIGHTS", "0",
    meaning="compare the weights of every slot with those of its expert, at load and after each rebalance; where they "
    "differ isoload detaches, and with ISOLOAD_STRICT=1 the process ends",
)  # fmt: skip
STALLED = Variable(
    "ISOLOAD_STALLED_SECONDS", "60", "number",
    "seconds without progress after which the log reports a stalled rebalance; 0: never",
)  # fmt: skip
REBALANCE = Variable(
    "ISOLOAD_REBALANCE", "", "gain_ms=NUMBER,move_ms=NUMBER or move_ms=auto",
    "apply a new map only if it saves gain_ms milliseconds in a forward pass and, until the next rebalance, more than "
    "the move takes (auto: the busiest rank's bytes over its link); empty: apply every new map",
)  # fmt: skip
TIMES = Variable(
    "ISOLOAD_TIMES", "", "file",
    "file of isoload measure: its speeds are those of the ranks if they differ by 1 % or more, its times those of "
    "ISOLOAD_REBALANCE; empty: equal ranks, an H100's times by arithmetic",
)  # fmt: skip
SPARE = Variable(
    "ISOLOAD_SPARE_SLOTS", "0", "number",
    "SGLang: so many redundant slots of each rank, its last, are spare; the policy of prefill, for example "
    "llep:within=node, fills them with experts of busy ranks; 0: no expert travels within a batch",
)  # fmt: skip
RAGGED = Variable(
    "ISOLOAD_RAGGED", "", "pages",
    "pages: SGLang starts from a file with absent slots (isoload place --holes) and gives back the memory of their "
    "weights before it sizes the KV cache; CPU only so far; empty: such a file is refused",
)  # fmt: skip
CHUNKS = "--eplb-rebalance-layers-per-chunk"  # SGLang's option
ROUTING = Variable(
    "ISOLOAD_ROUTING", "", "FILE, FILE:seed=N or FILE:phase=NAME",
    "trace by which SGLang routes every token, to measure without production traffic: tokens then have no meaning; "
    "vLLM's is VLLM_MOE_ROUTING_SIMULATION_STRATEGY=isoload:FILE; empty: the model's router",
)  # fmt: skip
COMMON = (
    MODE, STRICT, PLACEMENT, POLICY, LOADS, PLACER, REPORT, RECORD, RECORD_EVERY, SWITCH, CHECK, STALLED,
    REBALANCE, TIMES, SPARE, RAGGED,
)  # fmt: skip
MODES = ("on", "off", "shadow")
# Of the default policies. The last thousandth of a plan moves few copies, and a plan without it takes up to 9 % less
# time on a CPU: `tolerance` in bench/bench_plan.py.
TOLERANCE = 0.001
OPTIONS: dict[str, dict[str, Any]] = {"llep": IN_ENGINES}  # unless ISOLOAD_POLICY names others
ALL_LOADS = ("gathered", "own", "node")
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Settings:
    """Checked values of the variables that all engines have; None or 0: not set."""

    strict: bool
    policy: str | None  # as written
    loads: str | None  # as Balancer's
    placer: str
    report_seconds: float
    check_weights: bool  # whether slots are compared with their experts
    stalled_seconds: float  # of a rebalance without progress
    mode: str = "on"  # one of MODES
    record: str | None = None  # folder
    record_every: int = int(RECORD_EVERY.default)  # passes
    switch: str | None = None
    placement: str | None = None  # file from which vLLM starts
    rebalance: RebalanceRule | None = None  # when a new map is applied
    times: str | None = None  # file of isoload measure
    spare_slots: int = 0  # slots of each rank that prefill fills
    ragged: str = ""  # "pages", or empty: every slot has memory

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        environ = os.environ if environ is None else environ
        policy, loads = (_text(variable, environ) or None for variable in (POLICY, LOADS))
        placer = _text(PLACER, environ)
        _policies(policy)
        spare = _spare(_text(SPARE, environ), policy, environ)
        if loads is not None:
            _check_loads(loads, policy)
        ragged = _text(RAGGED, environ)
        _check_ragged(ragged, environ)
        _check_placer(placer, ragged)
        report, stalled = (parse_amount(v.name, _text(v, environ)) for v in (REPORT, STALLED))
        mode, record, switch = _text(MODE, environ), _text(RECORD, environ), _text(SWITCH, environ)
        phases = {phase: phase_policy.name for phase, phase_policy in _policies(policy).items()}
        free = bool(spare) and (mode == "on" or phases["decode"] == "exact")
        _check_mode(mode, record, report, None if free else policy, switch)
        if mode == "shadow" and is_on(CHECK, environ):
            raise ValueError(
                f"{CHECK.name} must be 0 if {MODE.name} is shadow, which checks no weights, got '1'"
            )
        every = _text(RECORD_EVERY, environ)
        if not (every.isdecimal() and 0 < len(every) < 10 and int(every)):
            raise ValueError(f"{RECORD_EVERY.name} must be a whole number of at least 1, got {every!r}")
        return cls(
            is_on(STRICT, environ), policy, loads, placer, report, is_on(CHECK, environ), stalled,
            mode, record or None, int(every), switch or None, _text(PLACEMENT, environ) or None,
            _rule(_text(REBALANCE, environ)), _times(_text(TIMES, environ)), spare, ragged,
        )  # fmt: skip

    @property
    def places_shared(self) -> bool:
        return any(isinstance(policy, SharedPolicy) for policy in _policies(self.policy).values())

    @property
    def phased(self) -> bool:
        return len(set(_policies(self.policy).values())) > 1

    def policies_for(self, shared: bool) -> dict[str, Policy]:
        """Return by phase the policy of layers with or without shared experts that the plan may move."""
        if not shared and self.places_shared:
            raise ValueError(
                f"{POLICY.name} must be a policy of routed experts if the engine computes shared experts on their "
                f"token's rank "
                f"(SGLang: without --enable-waterfill), got {self.policy!r}"
            )
        return _policies(self.policy) or default_policies(shared)

    def unused(self, reasons: Mapping[Variable, str]) -> list[str]:
        """Return a line for each variable that is set to another value than its default and has no effect. `reasons`:
        by variable without effect the reason, and what would give it one: "REASON. Pass THIS"."""
        lines = []
        for variable, reason in reasons.items():
            value = getattr(self, variable.name.removeprefix("ISOLOAD_").lower())
            if str(value or "") != variable.default:
                name = variable.name
                lines.append(f"isoload: {name}={value} has no effect: {reason}, or unset {name}")
        return lines

    def loads_for(self, default: str) -> str:
        loads = self.loads or default
        _check_loads(loads, self.policy)
        return loads


def default_policies(shared: bool) -> dict[str, Policy]:
    return dict.fromkeys(PHASES, make_policy("joint" if shared else "exact", {"tolerance": TOLERANCE}))


def _check_mode(mode: str, record: str, seconds: float, policy: str | None, switch: str) -> None:
    if mode not in MODES:
        raise ValueError(not_one_of(MODE.name, MODES, mode))
    if switch and mode != "on":
        raise ValueError(f"{SWITCH.name} must come with {MODE.name}=on, got {mode!r}")
    if record and mode != "shadow":
        raise ValueError(f"{RECORD.name} must come with {MODE.name}=shadow, got {mode!r}")
    if record and not os.path.isdir(record):
        raise ValueError(f"{RECORD.name} must be an existing folder, got {record!r}")
    if mode == "shadow" and not record and not seconds:
        raise ValueError(f"{MODE.name}=shadow must come with {RECORD.name} or {REPORT.name}, got neither")
    if (mode == "shadow" or switch) and policy not in (None, "exact"):
        where = f"{SWITCH.name} is given" if switch else f"{MODE.name} is shadow"
        raise ValueError(f"{POLICY.name} must be exact if {where}, got {policy!r}")


def _check_loads(loads: str, policy: str | None) -> None:
    if loads == "last":
        raise ValueError(f"{LOADS.name}=last was removed: use own")
    if loads not in ALL_LOADS:
        raise ValueError(not_one_of(LOADS.name, ALL_LOADS, loads))
    if loads != "gathered" and any(
        phase_policy.name != "exact" for phase_policy in _policies(policy).values()
    ):
        raise ValueError(
            f"{POLICY.name} must be exact if {LOADS.name} is {loads}: other policies need the counts of all ranks "
            f"({LOADS.name}=gathered), got {policy!r}"
        )


def _policies(text: str | None) -> dict[str, Policy]:
    """Return policies by phase, from one for both or ``prefill=name,decode=name`` with options; none for None."""
    if text is None:
        return {}
    if "=" not in text.partition(":")[0]:  # otherwise an option's
        return dict.fromkeys(PHASES, _usable(text))
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if sorted(phase for phase, *_ in pairs) != sorted(PHASES):
        raise ValueError(f"{POLICY.name} must name each of {' and '.join(PHASES)} once, got {text!r}")
    return {phase: _usable(policy) for phase, _, policy in pairs}


def _usable(text: str) -> Policy:
    try:
        name, options = parse_policy(text)
    except ValueError as error:
        raise ValueError(f"{POLICY.name}: {error}") from None
    policy = make_policy(name, OPTIONS.get(name, {}) | options)
    if policy.cpu_only:
        raise ValueError(
            f"{POLICY.name} must plan on the engine's device, this policy computes on the CPU only, got {text!r}"
        )
    return policy


def _spare(text: str, policy: str | None, environ: Mapping[str, str]) -> int:
    if not (text.isdecimal() and len(text) < 5):
        raise ValueError(f"{SPARE.name} must be a whole number of at least 0, got {text!r}")
    policies = _policies(policy)
    borrow = [phase for phase, phase_policy in policies.items() if phase_policy.borrows]
    if not int(text):
        if borrow:
            raise ValueError(f"{POLICY.name} must not borrow weights without {SPARE.name}, got {policy!r}")
        return 0
    prefill = policies.get("prefill")
    if borrow != ["prefill"] or getattr(prefill, "within", "all") != "node":
        raise ValueError(
            f"{SPARE.name} must come with a policy that borrows within the node in prefill alone "
            f"({POLICY.name}=prefill=llep:within=node:refill_above=1.1,decode=exact), got {policy!r}"
        )
    if _text(LOADS, environ) not in ("", "gathered"):
        raise ValueError(
            f"{SPARE.name} must come with {LOADS.name}=gathered, because all ranks must fill the same slots, "
            f"got {_text(LOADS, environ)!r}"
        )
    if times := _text(TIMES, environ):
        raise ValueError(
            f"{SPARE.name} cannot be combined with {TIMES.name}, got {times!r:.200}: unset one of them"
        )
    return int(text)


def _check_ragged(ragged: str, environ: Mapping[str, str]) -> None:
    if ragged not in ("", "pages"):
        raise ValueError(f"{RAGGED.name} must be pages or empty, got {ragged!r}")
    if ragged and _text(MODE, environ) == "off":
        raise ValueError(f"{MODE.name} must be on or shadow with {RAGGED.name}={ragged}, got 'off'")
    for name, reason in (
        (SPARE.name, "whose slots need memory in every layer"),
        (REBALANCE.name, "which compares maps of the same slots"),
    ):
        if ragged and environ.get(name, "").strip() not in ("", "0"):
            raise ValueError(
                f"{name} must be unset with {RAGGED.name}={ragged}, {reason}, got {environ[name]!r}"
            )


def _check_placer(text: str, ragged: str) -> None:
    try:
        placer = make_placer(*parse_placer(text))
    except ValueError as error:
        raise ValueError(f"{PLACER.name}: {error}") from None
    if placer.needs_tokens:
        raise ValueError(
            f"{PLACER.name} must place by counts, because an engine records no per-token choices, got {text!r}"
        )
    if ragged and not placer.takes_capacity:
        raise ValueError(
            f"{PLACER.name} must be a placer that keeps slots absent with {RAGGED.name}={ragged}, got {text!r}"
        )
    if placer.has_budget and not ragged:
        raise ValueError(
            f"{PLACER.name} must fill all slots of the engine, {placer.name} with these options leaves some empty, "
            f"got {text!r}"
        )


def _rule(text: str) -> RebalanceRule | None:
    try:
        return RebalanceRule.parse(text) if text else None
    except ValueError as error:
        raise ValueError(f"{REBALANCE.name} {error}") from None


def _times(path: str) -> str | None:
    if not path:
        return None
    try:
        load(path)
    except ValueError as error:
        raise ValueError(f"{TIMES.name}: {error}") from None
    return path


def is_on(variable: Variable, environ: Mapping[str, str]) -> bool:
    text = _text(variable, environ)
    if text not in ("0", "1"):
        raise ValueError(f"{variable.name} must be 0 or 1, got {text!r}")
    return text == "1"


def _text(variable: Variable, environ: Mapping[str, str]) -> str:
    return environ.get(variable.name, "").strip() or variable.default
