"""What every plug-in does when its engine loads it: it attaches, or one line says why not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from isoload.integrations.seams import Seam, faults
from isoload.integrations.settings import Settings, Variable, is_on

log = logging.getLogger("isoload")


def attach_or_leave(engine: str, switch: Variable, attach: Callable[[Settings], list[str]]) -> None:
    """What an entry point calls. Engines log an Exception of a plug-in and go on, so a refusal leaves the process.

    Args:
        engine: its name in messages.
        switch: the variable that turns the plug-in on.
        attach: hooks everything and returns [], or hooks nothing and returns what is not as expected, a line each.

    Raises:
        SystemExit: a variable has a value that it must not have; or, with ISOLOAD_STRICT=1, the engine is not as
            expected.
    """
    try:
        if not is_on(switch, os.environ):
            return
        settings = Settings.read()
        found = attach(settings)
    except ValueError as error:
        raise SystemExit(f"isoload: {error}") from None
    if found:
        reason = f"isoload: not attached to {engine}, which is not as isoload expects: {'; '.join(found)}"
        if settings.strict:
            raise SystemExit(f"{reason} (ISOLOAD_STRICT=1 refuses to start)")
        log.error(f"{reason}. {engine} runs as without isoload")


def not_as_expected(
    seams: Sequence[Seam],
    start: Callable[[Settings], None],
    self_check: Callable[[], list[str]],
    settings: Settings,
) -> list[str]:
    """What keeps a plug-in from attaching, a line each; empty: it may, and the settings are in force.

    Args:
        seams: of the engine.
        start: puts settings in force.
        self_check: what does not come out right of a known batch, under the defaults: a placer's options are those of
            the model, and need not fit this batch.
        settings: what the environment says.
    """
    if found := faults(seams):
        return found
    start(Settings.read({}))
    found = self_check()
    start(settings)
    return found
