"""What a user builds: in place, and from an sdist. Neither may lean on the checkout or on an install beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "setup.py").exists())

IMPORT = """
import isoload, isoload.kernels, isoload._place, torch
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
    own |= {f"isoload/traces/{name}" for name in traces if name.endswith((".npz", ".json"))}
    return own | {f"isoload/kernels/{name}" for name in sources(ROOT / "kernels")}


def test_an_in_place_build_needs_the_python_folder_alone(tmp_path: Path) -> None:
    package = ROOT / "python" / "isoload"
    assert imported(ROOT / "python", tmp_path) == [package, package / "kernels"]


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
    place = f"isoload/_place{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert held == modules() | {"isoload/_C.abi3.so", place}
    assert f"-cp{sys.version_info.major}{sys.version_info.minor}-" in wheel.name, (
        "_place is of one Python version"
    )
    assert imported(package.parent, tmp_path) == [package, package / "kernels"]
    dynamic = subprocess.run(
        ["readelf", "--dynamic", package / "_C.abi3.so"], capture_output=True, text=True, check=True
    )
    assert "[libtorch.so]" in dynamic.stdout, "only libtorch brings libtorch_cuda"
