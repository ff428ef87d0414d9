"""Engines with isoload plug-ins: which are installed, whether they are as expected, and what would attach now."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from isoload.engines.seams import version_ranges
from isoload.engines.settings import MODE, PLACEMENT, PLACER, POLICY, SGLANG, VLLM, Variable

SAID = "isoload: "  # prefix of the probe's lines, because engines print too


@dataclass(frozen=True)
class Engine:
    """An engine, and how to test it."""

    name: str
    module: str
    # Python code that prints a line after SAID for every difference from the expected engine. It runs in a process of
    # its own, because it imports the engine and attaches to it.
    probe: str
    use: str  # description if there is no difference
    switch: Variable | None = None  # turns the plug-in on; None: a program calls isoload
    group: str = ""  # of the entry points by which the engine finds it
    plugins: str = ""  # the engine's own variable that lists the plug-ins it loads
    start: Variable | None = None  # names a placement file from which the engine starts


def _attaches(plug_in: str, first: str = "") -> str:
    return f"""{first}
from isoload.engines.settings import Settings
from isoload.engines.{plug_in} import attach
for fault in attach(Settings.read()): print({SAID!r} + fault)
"""


HOOKS = "its functions are as isoload expects and a known batch comes out right"
SCHEDULER = "import sglang.srt.managers.scheduler"
HUGGING_FACE = "from isoload.engines import huggingface; huggingface.register()"
EXPERTS = "ep_implementation='isoload' after isoload.engines.huggingface.register()"


def _probe(engine: str, then: str = "") -> str:
    return f"""
from isoload.engines.seams import read_seams
faults = [fault for seam in read_seams({engine!r}) if (fault := seam.fault())]
for fault in faults: print({SAID!r} + fault)
if not faults: {then or f"import isoload.engines.{engine}"}
"""


ENGINES = (
    Engine("SGLang", "sglang", _attaches("sglang", SCHEDULER), HOOKS, SGLANG, "sglang.srt.plugins"),
    Engine("vLLM", "vllm", _attaches("vllm"), HOOKS, VLLM, "vllm.general_plugins", "VLLM_PLUGINS", PLACEMENT),
    Engine("transformers", "transformers", _probe("transformers", HUGGING_FACE), EXPERTS),
    Engine("Megatron-Core", "megatron.core", _probe("megatron"), "isoload.engines.megatron.balance(model)"),
    Engine("torchtitan", "torchtitan", _probe("torchtitan"), "isoload.engines.torchtitan.balance(model)"),
)


def look(engine: Engine, environ: Mapping[str, str]) -> tuple[bool, str, bool]:
    """Return whether isoload can be in this engine, details or the reason, and whether the environment requires it."""
    from importlib import metadata  # imported here: it would add a seventh to the time of --help

    on = engine.switch is not None and environ.get(engine.switch.name, "").strip() not in ("", "0")
    start = "" if engine.start is None else environ.get(engine.start.name, "").strip()
    asked = on or bool(start)
    if not is_here(engine.module):
        return False, "not installed", asked
    name = metadata.packages_distributions().get(engine.module.split(".")[0], [engine.module])[0]
    version = metadata.version(name)
    if wrong := faults(engine, environ):
        return False, f"{name} {version}, and isoload does not attach: {'; '.join(wrong)}", asked
    if engine.switch is None:
        return True, f"{name} {version}: {engine.use}", asked
    if not asked:
        return False, f"{name} {version}: {engine.use}; attaches with {engine.switch.name}=1", asked
    starts = f"; starts from {start}" if start else ""
    mode = environ.get(MODE.name, "").strip() or MODE.default
    if mode == "off":
        return False, f"{name} {version}: {engine.use}; {MODE.name}=off attaches to nothing", False
    if not on:
        chooses = f"chooses replicas with {engine.switch.name}=1"
        return True, f"{name} {version}: {engine.use}{starts}; {chooses}", asked
    if mode == "shadow":
        return True, f"{name} {version}: {engine.use}; counts in shadow mode, changes nothing{starts}", asked
    chosen = [environ.get(variable.name, "").strip() or variable.default for variable in (POLICY, PLACER)]
    attaches = f"attaches, policy {chosen[0] or 'exact'}, placer {chosen[1]}"
    return True, f"{name} {version}: {engine.use}; {attaches}{starts}", asked


def hook_versions(engine: str) -> str:
    """Return the versions of an engine to which each hook attaches, and the reasons for the other versions."""
    hooks = []
    for hook, ranges in version_ranges(engine).items():
        missing = [f"{versions}: {reason}" for reason, versions in ranges.items() if reason]
        reasons = f" (not {', '.join(missing)})" if missing else ""
        hooks.append(f"{hook}: {ranges[''] or 'no version'}{reasons}".replace("`", ""))
    return "; ".join(hooks)


def is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent folder
        return False


def faults(engine: Engine, environ: Mapping[str, str]) -> list[str]:
    from importlib import metadata

    if engine.group and not metadata.entry_points(group=engine.group, name="isoload"):
        return ["isoload is not installed as a package, so the engine does not see its entry point"]
    if engine.plugins in environ and "isoload" not in environ[engine.plugins].split(","):
        return [f"{engine.plugins} lists other plug-ins only, got {environ[engine.plugins]!r}"]
    command = [sys.executable, "-c", engine.probe]
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True)
    if done.returncode:
        kind, colon, reason = done.stderr.strip().rpartition("\n")[2].partition(": ")
        if kind in ("ImportError", "ModuleNotFoundError"):
            return [f"importing {engine.module} failed: {reason}"]
        ended = f"importing {engine.module} ended with {kind}{colon}{reason}"
        return [reason if kind == "ValueError" else ended]
    return [line.removeprefix(SAID) for line in done.stdout.splitlines() if line.startswith(SAID)]
