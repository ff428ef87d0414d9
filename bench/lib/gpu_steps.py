"""What gpu_run does on a machine with a GPU: every step, its part, its time; the most telling first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PARTS = {
    1: "does it run, are the bits right, what does a batch cost",
    2: "every time, the layer",
    3: "the ops' own tests, races",
}


# Without the whole sweeps of planners: on a GPU each call of an op copies its arguments and waits.
SHORT = ("-k", "plan_waterfill or 1-4 or not (test_optimum or integral_optimum or joint_optimum)")


@dataclass(frozen=True)
class Step:
    """A command; in a dry run `dry` instead, or nothing.

    seconds  at most
    env      beside what all steps have
    fails    it is to end with status 1
    needed   without it no other step can run
    """

    name: str
    part: int
    seconds: int
    command: Sequence[str | Path]
    env: dict[str, str] = field(default_factory=dict)
    dry: Sequence[str | Path] | None = None
    fails: bool = False
    needed: bool = False


IMPORTS = """
import numpy, pytest, rich, torch
import isoload, isoload.kernels, bench_cuda, bench_dispatch, bench_kernels, bench_stack
print("torch", torch.__version__, "CUDA", torch.version.cuda, isoload.__file__)
print("Triton kernels:", isoload.kernels.why_not() or "on")
"""
SIMT = """
import pathlib, shutil, sys
from support import simt_build
folder = pathlib.Path(sys.argv[1])
shutil.rmtree(folder, ignore_errors=True)
print(simt_build.build(folder))
"""
# What only a GPU runs: name, part, seconds. A CUDA error, or a test that hangs, takes the rest of its file along.
GPU_ONLY = {
    "tests/ops/test_cuda.py": ("cuda", 1, 45),
    "tests/ops/test_device_errors.py": ("device_errors", 1, 15),
    "tests/balancing/test_cuda_captured.py": ("captured", 1, 20),
    "tests/layer/test_cuda_layer.py": ("layer", 1, 45),
    "tests/layer/test_cuda_deep_ep.py": ("deep_ep", 1, 90),
    "tests/weights/test_kernels_cuda.py": ("kernels_cuda", 2, 40),
    "tests/layer/test_cuda_forward.py": ("forward", 2, 25),
    "tests/layer/test_cuda_gradients.py": ("gradients", 2, 15),
    "tests/layer/test_cuda_symmetric.py": ("symmetric", 2, 35),
    "tests/layer/test_cuda_stack.py": ("stack", 3, 35),
    "tests/weights/test_cuda_pages.py": ("pages", 3, 15),
    "tests/engines/test_cuda_engine.py": ("engine", 3, 15),
}


def steps(python: str, logs: Path, xdist: bool = True) -> list[Step]:
    """Part by part, in their order; `logs` has a folder for each."""

    def bench(name: str, part: int, seconds: int, script: str, *options: str | Path) -> Step:
        return Step(name, part, seconds, (python, f"bench/{script}.py", *options))

    def library(part: int) -> Step:
        return Step("library", part, 150, (python, "bench/gpu_library.py"), needed=True)

    def tests(name: str, part: int, seconds: int, *chosen: str) -> Step:
        """Of the tests chosen those that need a GPU. One that hangs ends after a minute, with its process."""
        command = (python, "-m", "pytest", "-m", "cuda", "-o", "faulthandler_timeout=60", *chosen)
        shown = ("-vv", "-rfE", "--tb=short", "-p", "support.at_once")
        dry = (*command, "--collect-only", "-qq")  # status 5 if there is none
        return Step(name, part, seconds, (*command, *shown), {}, dry)

    def only(part: int) -> list[Step]:
        found = [(path, *of) for path, of in GPU_ONLY.items() if of[1] == part]
        return [tests(name, part, seconds, path, "-s") for path, name, _, seconds in found]

    def sanitizer(tool: str, part: int, seconds: int) -> Step:
        """memcheck without torch's caching allocator, with which a tensor's end is not its memory's; what it finds
        ends that kernel alone."""
        options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        env = {}
        if tool == "memcheck":
            options += ["--destroy-on-device-error", "kernel"]
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        check = (python, "bench/bench_cuda.py", "--check", "--one-process")
        return Step(tool, part, seconds, ("compute-sanitizer", *options, *check), env)

    profile = ("ncu", "--clock-control", "none", "--profile-from-start", "off", "--set", "full", "-f")
    report = logs / "part2" / "ncu"
    ops = ["tests/ops", "tests/weights/test_fp8.py", *(f"--ignore={path}" for path in GPU_ONLY)]
    two_layers = ("--shapes", "DeepSeek-V3", "gpt-oss-20b", "--batches", "1", "--rounds", "2")
    one_stack = ("--shapes", "Qwen3-235B", "--batches", "2", "--rounds", "1")
    imports = (python, "-c", IMPORTS)
    first = [
        Step("machine", 1, 10, ("nvidia-smi",)),
        library(1),
        Step("imports", 1, 30, imports, {"PYTHONPATH": "bench"}, imports, needed=True),
        bench("memset", 1, 20, "gpu_memset"),
        bench("check", 1, 30, "bench_cuda", "--check"),
        bench("headline", 1, 30, "bench_cuda", "--quick", "--results", logs / "part1"),
        *only(1),
        sanitizer("memcheck", 1, 40),
    ]
    second = [
        library(2),
        bench("bench", 2, 120, "bench_cuda", "--results", logs / "part2"),
        Step("ncu", 2, 40, (*profile, "-o", report, python, "bench/bench_cuda.py", "--profile")),
        Step("ncu_details", 2, 10, ("ncu", "--import", f"{report}.ncu-rep", "--page", "details")),
        bench("kernels", 2, 40, "bench_kernels", "--rounds", "5", "--results", logs / "part2"),
        bench("dispatch", 2, 55, "bench_dispatch", *two_layers, "--results", logs / "part2"),
        *only(2),
    ]
    third = [
        library(3),
        *only(3),
        bench("stages", 3, 45, "bench_stack", *one_stack, "--results", logs / "part3"),
        tests("ops", 3, 130, *ops, *SHORT, *(("-n", "4") if xdist else ())),
        sanitizer("racecheck", 3, 110),
        sanitizer("synccheck", 3, 30),
    ]
    return [*first, *second, *third]


def on_a_cpu(python: str, logs: Path) -> list[Step]:
    """What a dry run does besides: the CUDA sources give a CPU's bits, and one wrong op leaves the others' rows."""
    simt, own = logs / "simt", logs / "part0"
    check = (python, "bench/bench_cuda.py", "--check", "--device", "cpu")
    commands: dict[str, Sequence[str | Path]] = {
        "simt_build": (python, "-c", SIMT, simt),
        "check_cpu": check,
        "check_simt": check,
        "same_bits": ("diff", own / "check_cpu.log", own / "check_simt.log"),
        "one_wrong": (*check, "--spoil", "plan_lp"),
    }
    env = {"check_simt": {"PYTHONPATH": str(simt / "python")}}
    return [Step(n, 0, 900, c, env.get(n, {}), c, fails=n == "one_wrong") for n, c in commands.items()]
