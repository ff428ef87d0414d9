"""bench/cuda.sh without a GPU: what it would run, in which order, within which time; and what of it a CPU can run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import gpu_library
import gpu_run
from gpu_run import nvcc
from lib.gpu_steps import GPU_ONLY, Step, steps
from support.sweeps import slow

ROOT = next(folder for folder in Path(__file__).parents if (folder / "setup.py").exists())
STEPS = {
    1: [
        *("machine", "library", "imports", "memset", "check", "headline"),
        *("cuda", "device_errors", "captured", "layer", "deep_ep", "memcheck"),
    ],
    2: [
        *("library", "bench", "ncu", "ncu_details", "kernels", "dispatch"),
        *("kernels_cuda", "forward", "gradients", "symmetric"),
    ],
    3: ["library", "stack", "pages", "engine", "stages", "ops", "racecheck", "synccheck"],
}
ON_A_CPU = ["simt_build", "check_cpu", "check_simt", "same_bits", "one_wrong"]
BY_NAME = {step.name: step for step in steps("python", Path("logs"))}


def test_parts() -> None:
    """A borrowed machine: a command ends at 600 s, eight files come back. A part writes one."""
    found: dict[int, list[Step]] = {}
    for step in steps("python", Path("logs")):
        found.setdefault(step.part, []).append(step)
    assert {part: [step.name for step in own] for part, own in found.items()} == STEPS
    assert all(sum(step.seconds for step in own) <= gpu_run.LIMIT - gpu_run.GRACE for own in found.values())
    assert gpu_run.LIMIT <= 540


def test_what_only_a_gpu_runs_is_run_by_file() -> None:
    """Alone, and before the ops' own tests: an error of CUDA would end all behind it in the same process."""
    marked = {p for p in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in p.read_text()}
    assert marked - {Path(__file__)} == {ROOT / path for path in (*GPU_ONLY, "tests/weights/test_fp8.py")}
    for path, (name, part, seconds) in GPU_ONLY.items():
        step = BY_NAME[name]
        assert path in step.command and (step.part, step.seconds) == (part, seconds)
        assert f"--ignore={path}" in BY_NAME["ops"].command
    assert "-n 4" in " ".join(map(str, BY_NAME["ops"].command))
    assert "-n" not in next(s for s in steps("python", Path("logs"), xdist=False) if s.name == "ops").command


def test_tools_that_watch() -> None:
    """Each in the process that makes the calls; the caching allocator is off for memcheck alone."""
    for tool in ("memcheck", "racecheck", "synccheck"):
        assert "--one-process" in BY_NAME[tool].command
        assert BY_NAME[tool].env == ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})
    assert " ".join(map(str, BY_NAME["ncu"].command)).startswith("ncu --clock-control none ")


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_tools_are_found_where_torch_looks(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    tool.touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv(variable, str(tool.parent if variable == "PATH" else tmp_path))
    assert nvcc.find("ncu") == str(tool)


def test_tools_are_found_in_usr_local_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc.shutil, "which", lambda tool, path: f"{path.split(':')[-1]}/{tool}")
    assert nvcc.find() == "/usr/local/cuda/bin/nvcc"


def test_code_runs_on_every_gpu_of_its_generation() -> None:
    """That for sm_90a or sm_100a would not; newer ones compile the newest PTX, whose kernels start early too."""
    code = [flag.rpartition("code=")[2] for flag in nvcc.FLAGS if "gencode" in flag]
    assert code == ["sm_80", "sm_90", "sm_100", "compute_100"]


LONG = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)
print("child of", os.getpid(), flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("found until now", flush=True)
    time.sleep(60 * (sys.argv[1] == "deaf"))
"""


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("kind", ["deaf", *slow("")])
def test_what_runs_too_long_says_what_it_has_and_leaves_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "GRACE", 0.5)
    log = tmp_path / "log"
    step = Step("long", 1, 1, ())
    assert gpu_run.run(step, [sys.executable, "-c", LONG, kind], 0.7, log) == 124
    first, *others = log.read_text().splitlines()
    assert others == ["found until now"]
    deadline = time.monotonic() + 10
    while alive(int(first.split()[-1])) and time.monotonic() < deadline:
        time.sleep(0.01)  # until init has taken the child
    assert not alive(int(first.split()[-1]))


def part(tmp_path: Path, limit: float = 540) -> gpu_run.Part:
    return gpu_run.Part(1, tmp_path / "logs", tmp_path, False, limit)


def packed(tmp_path: Path) -> dict[str, str]:
    with tarfile.open(tmp_path / "part1.tar.gz") as tar:
        return {name: tar.extractfile(name).read().decode() for name in tar.getnames()}


def said(name: str, code: str, **options: bool) -> Step:
    return Step(name, 1, 30, (sys.executable, "-c", code), **options)


def test_a_failed_step_does_not_keep_the_others_back(tmp_path: Path) -> None:
    todo = [said("a", "exit(3)"), said("b", "print('b')"), said("c", "exit(1)", fails=True)]
    assert part(tmp_path).do([*todo, Step("d", 1, 30, ("no-such-tool",))]) == ["a", "d (no no-such-tool)"]
    assert packed(tmp_path) == {"part1/a.log": "", "part1/b.log": "b\n", "part1/c.log": ""}


def test_without_what_is_needed_nothing_else_runs(tmp_path: Path) -> None:
    assert part(tmp_path).do([said("a", "exit(1)", needed=True), said("b", "print()")]) == ["a"]
    assert list(packed(tmp_path)) == ["part1/a.log"]


def test_what_no_time_is_left_for_is_named(tmp_path: Path) -> None:
    assert part(tmp_path, limit=20).do([said("a", "print()")]) == ["a (no time)"]


def test_what_is_too_large_to_bring_back_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "LARGEST", 100)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "small").write_text("x" * 100)
    (tmp_path / "logs" / "large").write_text("x" * 101)
    gpu_run.pack(tmp_path / "logs", tmp_path / "part1.tar.gz")
    assert list(packed(tmp_path)) == ["logs/small"]


def test_a_part_that_is_ended_early_has_its_archive(tmp_path: Path) -> None:
    """SIGTERM in the second step: the archive has the first one's log and what the second wrote."""
    own = f"""
import sys
sys.path.insert(0, {str(ROOT / "bench")!r})
import gpu_run
from gpu_run import Path, Step
command = lambda code: (sys.executable, "-c", code)
gpu_run.ROOT = Path({str(tmp_path)!r})
gpu_run.steps = lambda *_: [
    Step("first", 1, 30, command("print(1)")),
    Step("second", 1, 30, command("import time; print(2); open('ready', 'w'); time.sleep(60)")),
]
sys.argv[1:] = ["--part", "1", {str(tmp_path)!r}]
gpu_run.main()
"""
    process = subprocess.Popen([sys.executable, "-c", own], stdout=subprocess.DEVNULL)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert packed(tmp_path) == {"part1/first.log": "1\n", "part1/second.log": "2\n"}


@pytest.mark.parametrize("state", ["none", "of other sources", "runs", "does not run"])
def test_a_carried_library(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken if it is of these sources and runs on this GPU; else the ops are built."""
    package, library, built = tmp_path / "package", tmp_path / "library", list[str]()
    package.mkdir()

    def build(architecture: str) -> None:
        built.append(architecture)
        (library / "isoload").mkdir(parents=True, exist_ok=True)
        (library / "isoload" / "_C.abi3.so").write_text("built")

    if state != "none":
        build("")
        built.clear()
        (library / "isoload" / "_C.abi3.so").write_text("carried")
        (library / "sources").write_text("others" if "other" in state else gpu_library.sources())
    monkeypatch.setattr(gpu_library, "PACKAGE", package)
    monkeypatch.setattr(gpu_library, "LIBRARY", library)
    monkeypatch.setattr(gpu_library, "build", build)
    monkeypatch.setattr(gpu_library, "runs", lambda: bool(built) or "does not" not in state)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(sys, "argv", ["gpu_library.py"])
    if state == "runs":
        gpu_library.main()
    else:
        with pytest.raises(SystemExit) as end:
            gpu_library.main()
        assert not end.value.code
    assert built == ([] if state == "runs" else ["sm_90"])
    assert (package / "_C.abi3.so").read_text() == ("carried" if state == "runs" else "built")


def test_failures_are_told_as_they_come(tmp_path: Path) -> None:
    """By a run, too, that is killed in the next test."""
    (tmp_path / "test_two.py").write_text(
        "import os\n\ndef test_first():\n    assert 5 == 6\n\ndef test_second():\n    os._exit(9)\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "support.at_once", "-s", str(tmp_path / "test_two.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )
    assert done.returncode == 9 and "test_first failed in call:" in done.stdout and "5 == 6" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_dry_run(tmp_path: Path) -> None:
    """The CUDA sources on tests/native/simt give the CPU's bits of every op at every size that a GPU is checked at."""
    command = ["bench/cuda.sh", "--dry-run", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    found = re.findall(r"^== (\w+), at most", done.stdout, re.M)
    assert found == [*STEPS[1], *STEPS[2], *STEPS[3], *ON_A_CPU]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"part{n}.tar.gz" for n in range(4)]
    for archive in tmp_path.glob("*.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(tmp_path, filter="data")
    logs = {path.stem: path.read_text() for path in tmp_path.rglob("*.log")}
    for name in ("ops", *(name for name, *_ in GPU_ONLY.values())):
        collected = re.findall(r"(test_\w+)\.py: (\d+)", logs[name])
        assert collected and all(int(count) > 0 for _, count in collected), name
        if name == "ops":
            files = {file for file, _ in collected}
            assert {"test_count", "test_plan_exact", "test_route", "test_share", "test_fp8"} <= files
            assert "test_cuda" not in files
    right = logs["check_cpu"].splitlines()
    assert len(right) > 90 and right == logs["check_simt"].splitlines()
    # One op made wrong: all other rows come.
    rows = [line for line in logs["one_wrong"].splitlines() if line.startswith("R=")]
    wrong = [row for row in rows if row.endswith("plan_lp: WRONG")]
    assert len(wrong) == 5 and [row for row in rows if row not in wrong] == [
        row for row in right if " plan_lp:" not in row
    ]


@pytest.mark.slow
def test_a_hung_test_ends_with_its_process(tmp_path: Path) -> None:
    """Also one that holds the interpreter's lock, as a CUDA call may: no thread or signal handler of Python runs."""
    (tmp_path / "test_hang.py").write_text(
        "import ctypes\n\ndef test_hang():\n    ctypes.PyDLL(None).sleep(60)\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-o", "faulthandler_timeout=1", str(tmp_path / "test_hang.py")],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1 and "Timeout (0:00:01)!" in done.stderr and "test_hang.py" in done.stderr
