"""What a user builds: in place, and from an sdist. Neither may lean on the checkout or on an install beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "setup.py").exists())

IMPORT = """
import isoload, isoload.kernels, torch
print(isoload.__file__, isoload.kernels.__file__, sep="\\n")
assert isoload.count(torch.tensor([[0, 2], [2, -1]]), 3).tolist() == [1, 0, 2]
"""


def imported(folder: Path, cwd: Path) -> list[Path]:
    """Where isoload and isoload.kernels come from with ``folder`` first on the path.

    -S: no .pth file is read, so an editable install of the same interpreter adds nothing.
    """
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    command = [sys.executable, "-S", "-c", IMPORT]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [Path(name).parent for name in done.stdout.splitlines()]


def sources(folder: Path) -> set[str]:
    """The files below a folder, as git lists them: no build products. Links are followed."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in names if (folder / name).is_file()}


def modules() -> set[str]:
    """The package's files as an installation has them."""
    own = {f"isoload/{name}" for name in sources(ROOT / "python" / "isoload")}
    traces = sources(ROOT / "examples" / "traces")
    own |= {f"isoload/shipped_traces/{name}" for name in traces if name.endswith((".npz", ".json"))}
    return own | {f"isoload/kernels/{name}" for name in sources(ROOT / "kernels")}


def test_an_in_place_build_needs_the_python_folder_alone(tmp_path: Path) -> None:
    package = ROOT / "python" / "isoload"
    assert imported(ROOT / "python", tmp_path) == [package, package / "kernels"]


def test_the_library_calls_nothing_of_python() -> None:
    """So one wheel serves every version of it, whatever torch was built for."""
    command = ["readelf", "--dyn-syms", "--wide", ROOT / "python" / "isoload" / "_C.abi3.so"]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "isoload_place_scenario" in symbols
    assert [
        line for line in symbols.splitlines() if " _Py" in line or " Py" in line or "pybind" in line
    ] == []


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            "import setuptools; setuptools.__version__ = '65.5.0'; import build_backend",
            "is built by setuptools >= 77",
        ),
        (
            "import os; os.environ['CXX'] = 'no-g++ -O1'; import build_backend",
            "compiles C++, and there is no no-g++",
        ),
        (
            "import sys; sys.modules['torch'] = None; exec(open('setup.py').read())",
            "builds against torch, which is",
        ),
    ],
)
def test_the_first_line_says_what_a_build_misses(first: str, said: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "csrc")}
    done = subprocess.run(
        [sys.executable, "-c", first], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith(f"isoload {said}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_isolated_build_finds_the_torch_of_its_environment(tmp_path: Path) -> None:
    """Setuptools alone on the path, as under pip's isolation. Without a torch the hooks ask for one."""
    found = next(Path(path) for path in sys.path if (Path(path) / "setuptools").is_dir())
    for part in (*found.glob("setuptools*"), found / "_distutils_hack"):
        (tmp_path / part.name).symlink_to(part)
    isolate = "import sys, sysconfig; sys.path = [x for x in sys.path if 'site-packages' not in x]; "
    code = "import build_backend as b, importlib.util as i; print(b.needed(), bool(i.find_spec('torch')))"
    path = os.pathsep.join([str(ROOT / "csrc"), str(tmp_path)])
    for there, said in (("", "[] True"), ("sysconfig.get_path = str; ", "['torch>=2.11'] False")):
        command = [sys.executable, "-c", isolate + there + code]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert done.stdout.strip() == said, done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in a copy of the checkout: what an earlier build left beside it would be packed too."""
    folder = tmp_path_factory.mktemp("sdist")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")[:-1]:
        source, copy = ROOT / os.fsdecode(name), folder / "checkout" / os.fsdecode(name)
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    (folder / "checkout" / "python" / "isoload" / "_C.stale.so").touch()
    # The hook that `python -m build --no-isolation --sdist` calls.
    code = f"import setuptools.build_meta as hooks; hooks.build_sdist({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder / "checkout", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.tar.gz")
    return made


def test_the_sdist_holds_every_source(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members), "a link ends at the archive's edge"
    held = {member.name.partition("/")[2] for member in members if member.isfile()}
    wanted = {f"python/{name}" for name in modules()} | {f"csrc/{name}" for name in sources(ROOT / "csrc")}
    wanted |= {"setup.py", "pyproject.toml", "LICENSE", "README.md"}
    assert wanted - held == set()
    assert [name for name in held if name.endswith((".so", ".pyc")) or name.startswith("tests/")] == []


@pytest.mark.slow
def test_a_build_from_the_sdist(sdist: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    flags = {"ISOLOAD_CUDA": "0", "ISOLOAD_CXXFLAGS": "-O0"}
    command = [*pip, "--wheel-dir", str(tmp_path), str(sdist)]
    done = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    package = tmp_path / "installed" / "isoload"
    held = {str(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file()}
    assert held == modules() | {"isoload/_C.abi3.so"}
    assert "-cp310-abi3-" in wheel.name, "one wheel for every Python"
    assert imported(package.parent, tmp_path) == [package, package / "kernels"]
    dynamic = subprocess.run(
        ["readelf", "--dynamic", package / "_C.abi3.so"], capture_output=True, text=True, check=True
    )
    assert "[libtorch.so]" in dynamic.stdout, "only libtorch brings libtorch_cuda"
