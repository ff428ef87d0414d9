"""Seams: the functions of an engine that a plug-in replaces, wraps, calls or reads.

Each engine has a JSON file of its seams, with their signatures in one version. The plug-in attaches if the running
engine has these signatures, independent of its version number.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module, resources
from itertools import groupby
from typing import Any, Literal

from isoload.engines.settings import RAGGED, SPARE, Settings, Variable, is_on
from isoload.online.metrics import set_refused

log = logging.getLogger("isoload")
Kind = Literal["replace", "around", "call", "fields"]
# Among the options that seams serve: shadow mode attaches alone or with PAGES, other options only without it.
SHADOW = "ISOLOAD_MODE=shadow"
PAGES = "ISOLOAD_RAGGED=pages"
EXTRA = (SPARE.name, PAGES)  # options that attach only where their variable is set


@dataclass(frozen=True)
class Seam:
    """One function or record of an engine that a plug-in uses."""

    target: str  # dotted path
    kind: Kind  # "replace", "around": hooked; "call": called by the plug-in; "fields": a record that it reads
    signatures: tuple[str, ...]  # those that the plug-in supports; of a record the fields that it needs
    read_from: str  # the engine's version in which it was read
    why: str  # what the plug-in does there
    serves: tuple[str, ...] = ()  # the engine's options that need it; empty: all of them
    older: str = ""  # its dotted path in older versions

    def located(self) -> Seam:
        """Return the seam with the path that the engine has, the present one or the older one."""
        moved = self.older and not is_there(self.target) and is_there(self.older)
        return replace(self, target=self.older) if moved else self

    @property
    def name(self) -> str:
        return self.target.rsplit(".", 1)[-1]

    def fault(self) -> str | None:
        """Return the difference from the expected function or record, in one line; None if there is none."""
        try:
            member = pkgutil.resolve_name(self.target)
        except Exception as error:
            return f"{self.target} cannot be found ({type(error).__name__}: {error})"
        if self.kind == "fields":
            field = self.missing_field(field_names(member))
            return f"{self.target} has no field {field}" if field else None
        signature = bare_signature(member)
        if self.takes(signature):
            return None
        wanted = " or ".join(self.signatures)
        return f"{self.target} must take {wanted} (as in {self.read_from}), got {signature}"

    def missing_field(self, names: set[str]) -> str:
        return next((name for name in self.signatures if name not in names), "")

    def takes(self, signature: inspect.Signature) -> bool:
        return any(str(part) in self.signatures for part in (signature, *shortened(signature, self.kind)))


def read_seams(engine: str) -> list[Seam]:
    text = resources.files(__package__).joinpath(f"{engine}_seams.json").read_text()
    file, lists = json.loads(text), ("signatures", "serves")
    rows = [row | {key: tuple(row[key]) for key in lists if key in row} for row in file["seams"]]
    return [Seam(read_from=file["read_from"], **row) for row in rows]


# By engine its lists of seams, each with the hook that is all of it; empty: options attach one by one.
ENGINE_SEAMS: Mapping[str, Mapping[str, str]] = {
    "SGLang": {"sglang": "", "sglang_routing": "ISOLOAD_ROUTING"},
    "vLLM": {"vllm": "ISOLOAD_VLLM=1", "vllm_start": "ISOLOAD_PLACEMENT", "vllm_routing": "isoload:FILE"},
    "Megatron-Core": {"megatron": "isoload.engines.megatron.balance"},
    "transformers": {"transformers": "ep_implementation='isoload'"},
    "torchtitan": {"torchtitan": "isoload.engines.torchtitan.balance"},
}


def hooks_of(engine: str) -> dict[str, list[Seam]]:
    hooks = {}
    for file, whole in ENGINE_SEAMS[engine].items():
        seams = read_seams(file)
        for hook in [*filter(None, [whole]), *options_of(seams)]:
            hooks[hook] = [seam for seam in seams if not seam.serves or hook in seam.serves]
    return hooks


def read_attached() -> dict[str, dict[str, dict[str, str]]]:
    """Return, by engine, version and hook, why the hook does not attach; empty: it attaches.
    ``tests/tools/attached.py`` writes the file from the engines' wheels."""
    text = resources.files(__package__).joinpath("attached.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]


def version_ranges(engine: str) -> dict[str, dict[str, str]]:
    """Return, by hook and reason, the engine's versions as text ("0.5.20 to 0.5.22"); no reason: the hook attaches."""
    versions = read_attached()[engine]
    ranges: dict[str, dict[str, str]] = {}
    for hook in hooks_of(engine):
        reasons = {version: row[hook] for version, row in versions.items()}
        runs: dict[str, list[str]] = {"": []}
        for reason, run in groupby(reasons, reasons.__getitem__):
            first, *more = run
            runs.setdefault(reason, []).append(f"{first} to {more[-1]}" if more else first)
        ranges[hook] = {reason: ", ".join(parts) for reason, parts in runs.items()}
    return ranges


def versions_with(engine: str, hooks: Sequence[str]) -> str:
    ranges = version_ranges(engine) if engine in ENGINE_SEAMS else {}
    known = {text for hook in hooks if (text := ranges.get(hook, {}).get("", ""))}
    return f"; {engine} {' and '.join(sorted(known))} has it" if known else ""


def missing_package(seams: Sequence[Seam]) -> str | None:
    """Return why an engine cannot be imported if a package it needs is not installed; else None. Without this check
    each seam would be reported as a missing function, because its module cannot be imported."""
    for target in (seam.target for seam in seams):
        parts = target.split(".")
        for end in range(1, len(parts)):
            try:
                import_module(".".join(parts[:end]))
            except ModuleNotFoundError as error:
                if error.name and not f"{target}.".startswith(f"{error.name}."):
                    return f"importing {parts[0]} failed: {error}"
                break  # the engine has moved the seam, which its fault reports
            except Exception:
                break
    return None


def is_there(target: str) -> bool:
    """Return whether the engine has the target, also where its import fails in another way, which its fault reports."""
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    except Exception:
        return True
    return True


def bare_signature(function: Any) -> inspect.Signature:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def shortened(signature: inspect.Signature, kind: Kind) -> Iterator[inspect.Signature]:
    """Yield the signature without its last parameters, which a newer version may have added, if they have defaults.
    Wrappers pass such parameters on and calls omit them; a replacement would drop them."""
    parameters = list(signature.parameters.values())
    while kind != "replace" and parameters and parameters[-1].default is not inspect.Parameter.empty:
        parameters.pop()
        yield signature.replace(parameters=parameters)


def field_names(record: type) -> set[str]:
    names = getattr(record, "_fields", ())
    if is_dataclass(record):
        names = [field.name for field in fields(record)]
    return {*names, *(name for name, value in vars(record).items() if isinstance(value, property))}


@dataclass(frozen=True)
class PlugIn:
    """isoload's plug-in for one engine: for each engine option that a seam serves, it attaches all hooks or none."""

    engine: str  # its name in messages; in lower case that of its seams
    switch: Variable  # turns the plug-in on
    start: Callable[[Settings], None]  # applies settings
    checks: Mapping[str, Callable[[], bool]]  # tests of a known batch, by the option or hook that needs them
    hook: Callable[
        [list[Seam], Settings], None
    ]  # installs hooks, which serve only the options that are attached
    seams: Sequence[Seam] = ()  # of an engine without a JSON file here

    def attach_or_leave(self) -> None:
        """Attach, from an entry point; every refusal is a SystemExit, because engines log an Exception and continue."""
        try:
            if not is_on(self.switch, os.environ):
                return
            settings = Settings.read()
            if settings.mode == "off":
                log.info(f"isoload: ISOLOAD_MODE=off, attached to nothing of {self.engine}")
                wrong, live = list[str](), list[str]()
            else:
                wrong, live = self.attach_options(settings)
        except ValueError as error:
            raise SystemExit(f"isoload: {error}") from None
        if settings.report_seconds and not live:
            set_refused(self.engine)
        if settings.ragged and PAGES not in live:
            reason = "; ".join(wrong) or f"isoload has no hooks for absent slots in {self.engine}"
            raise SystemExit(
                f"isoload: {RAGGED.name}={settings.ragged} cannot attach to {self.engine}: {reason}"
            )
        if wrong:
            whole = f"isoload: not attached to {self.engine}, which is not as isoload expects"
            reason = f"{f'isoload: {self.engine} is not as isoload expects' if live else whole}: {'; '.join(wrong)}"
            if settings.strict:
                raise SystemExit(f"{reason} (ISOLOAD_STRICT=1 refuses to start)")
            result = f"Attached to {', '.join(live)}" if live else f"{self.engine} runs as without isoload"
            log.error(f"{reason}. {result}")

    def attach(self, settings: Settings) -> list[str]:
        return self.attach_options(settings)[0]

    def attach_options(self, settings: Settings) -> tuple[list[str], list[str]]:
        """Hook every option whose seams and known batch are as expected; without options all hooks or none. Returns the
        differences, which name the options that are not attached, and the attached options."""
        all_seams = [seam.located() for seam in self.seams or read_seams(self.engine.lower())]
        if settings.spare_slots and SPARE.name not in options_of(all_seams):
            raise ValueError(
                f"{SPARE.name} must be 0 in {self.engine}: experts travel within a batch in SGLang only"
            )
        seams = of_mode(all_seams, settings.mode, extra_options(settings))
        other_options = set(options_of(all_seams)) - set(options_of(seams))
        checks = {name: check for name, check in self.checks.items() if name not in other_options}
        options = options_of(seams) or [self.engine]
        wrong: list[str] = []
        lost: set[str] = set()

        def lose(fault: str, serves: Sequence[str]) -> None:
            if serves:
                fault = f"{fault} (needed by {' and '.join(serves)}{versions_with(self.engine, serves)})"
            wrong.append(fault)
            lost.update(serves or options)

        if (fault := missing_package(seams)) is not None:
            return [fault], []
        for seam in seams:
            if (fault := seam.fault()) is not None:
                lose(fault, seam.serves)
        if lost.issuperset(options):
            return wrong, []
        self.start(Settings.read({}))  # options for the model need not fit the known batch
        for name, check in checks.items():
            if name not in lost and (fault := wrong_check(name, check)) is not None:
                lose(fault, [name] if name in options else [])
        self.start(settings)
        live = [option for option in options if option not in lost]
        served = [replace(seam, serves=tuple(o for o in seam.serves if o in live)) for seam in seams]
        hooks = [seam for seam, old in zip(served, seams, strict=True) if seam.serves or not old.serves]
        if live:
            self.hook([seam for seam in hooks if seam.kind in ("replace", "around")], settings)
        return wrong, live


def extra_options(settings: Settings) -> set[str]:
    on = {SPARE.name: settings.spare_slots > 0, PAGES: bool(settings.ragged)}
    return {option for option in EXTRA if on[option]}


def of_mode(seams: Sequence[Seam], mode: str, extra: Collection[str] = ()) -> list[Seam]:
    """Return the seams of shadow mode, or of the other options, with only these options named; PAGES counts in both."""
    needed = []
    for seam in seams:
        in_shadow = mode == "shadow"
        serves = tuple(o for o in seam.serves if o == PAGES or (o == SHADOW) == in_shadow)
        serves = tuple(option for option in serves if option not in EXTRA or option in extra)
        if serves or not seam.serves:
            needed.append(replace(seam, serves=serves))
    return needed


def options_of(seams: Sequence[Seam]) -> list[str]:
    return list(dict.fromkeys(option for seam in seams for option in seam.serves))


def wrong_check(name: str, check: Callable[[], bool]) -> str | None:
    try:
        return None if check() else f"a known batch gives wrong slots with {name}"
    except Exception as error:
        return f"a known batch fails with {name} ({type(error).__name__}: {error})"
