"""Seams: the functions of an engine that a plug-in replaces, wraps, calls or reads; it attaches where they are as
expected.

An engine's seams stand in one JSON file: each with its signature and the version that it was read from. They are
compared with the engine that runs, whatever its version is called.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import resources
from typing import Any, Literal

from isoload.integrations.settings import Settings, Variable, is_on

log = logging.getLogger("isoload")
Kind = Literal["replace", "around", "call", "fields"]


@dataclass(frozen=True)
class Seam:
    """One place where a plug-in touches an engine.

    target      dotted path
    kind        "replace" and "around": hooked; "call": called by the plug-in; "fields": a record that it reads
    signatures  those that the plug-in can work with; of a record the fields that it needs
    read_from   the engine's version in which it was read
    why         what the plug-in does there
    """

    target: str
    kind: Kind
    signatures: tuple[str, ...]
    read_from: str
    why: str

    @property
    def name(self) -> str:
        """The last part of the target, unique among an engine's seams."""
        return self.target.rsplit(".", 1)[-1]

    def fault(self) -> str | None:
        """What is not as expected, in one line; None if nothing is."""
        try:
            found = pkgutil.resolve_name(self.target)
        except Exception as error:
            return f"{self.target} cannot be found ({type(error).__name__}: {error})"
        if self.kind == "fields":
            missing = [name for name in self.signatures if name not in field_names(found)]
            return f"{self.target} has no field {missing[0]}" if missing else None
        if (got := signature_of(found)) in self.signatures:
            return None
        wanted = " or ".join(self.signatures)
        return f"{self.target} must take {wanted} (as in {self.read_from}), got {got}"


def read_seams(engine: str) -> list[Seam]:
    """The seams of an engine, from ``<engine>_seams.json`` beside this file."""
    text = resources.files(__package__).joinpath(f"{engine}_seams.json").read_text()
    return [Seam(**(given | {"signatures": tuple(given["signatures"])})) for given in json.loads(text)]


def faults(seams: Sequence[Seam]) -> list[str]:
    """One line for every seam that is not as expected."""
    return [fault for seam in seams if (fault := seam.fault()) is not None]


def signature_of(function: Any) -> str:
    """Names, kinds and defaults of the parameters, without annotations; of a class those of its constructor."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def field_names(record: type) -> set[str]:
    """Fields and properties of a dataclass or NamedTuple."""
    own = [field.name for field in fields(record)] if is_dataclass(record) else getattr(record, "_fields", ())
    return {*own, *(name for name, value in vars(record).items() if isinstance(value, property))}


@dataclass(frozen=True)
class PlugIn:
    """What isoload puts into one engine: all hooks, or none.

    engine  its name in messages; in lower case that of its seams
    switch  the variable that turns the plug-in on
    start   puts settings in force
    checks  whether a known batch comes out right, by the hook that it passes
    hook    puts the hooks of these seams in place
    seams   of an engine without a JSON file here
    """

    engine: str
    switch: Variable
    start: Callable[[Settings], None]
    checks: Mapping[str, Callable[[], bool]]
    hook: Callable[[list[Seam], Settings], None]
    seams: Sequence[Seam] = ()

    def attach_or_leave(self) -> None:
        """What an entry point calls. Engines log an Exception of a plug-in and go on, so a refusal leaves the process.

        Raises:
            SystemExit: a variable has a value that it must not have; or, with ISOLOAD_STRICT=1, the engine is not as
                expected.
        """
        try:
            if not is_on(self.switch, os.environ):
                return
            settings = Settings.read()
            found = self.attach(settings)
        except ValueError as error:
            raise SystemExit(f"isoload: {error}") from None
        if found:
            reason = (
                f"isoload: not attached to {self.engine}, which is not as isoload expects: {'; '.join(found)}"
            )
            if settings.strict:
                raise SystemExit(f"{reason} (ISOLOAD_STRICT=1 refuses to start)")
            log.error(f"{reason}. {self.engine} runs as without isoload")

    def attach(self, settings: Settings) -> list[str]:
        """Hooks everything and returns []; or hooks nothing and returns what is not as expected, a line each."""
        seams = self.seams or read_seams(self.engine.lower())
        if found := faults(seams):
            return found
        self.start(Settings.read({}))  # options for the model need not fit the known batch
        found = wrong_checks(self.checks)
        self.start(settings)
        if not found:
            self.hook([seam for seam in seams if seam.kind in ("replace", "around")], settings)
        return found


def wrong_checks(checks: Mapping[str, Callable[[], bool]]) -> list[str]:
    """One line for every check of a known batch that fails or raises."""
    found = []
    for name, check in checks.items():
        try:
            if not check():
                found.append(f"a known batch comes out wrong behind {name}")
        except Exception as error:
            found.append(f"a known batch fails behind {name} ({type(error).__name__}: {error})")
    return found
