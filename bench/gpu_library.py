"""The compiled ops for the GPU here, in python/isoload: those of build/gpu-library where they run, else built anew.

--carry ARCHITECTURE makes build/gpu-library on a machine that needs no GPU, e.g. sm_90: with nvcc, and with a Python,
torch and C library no newer than where it goes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "isoload"
LIBRARY = ROOT / "build" / "gpu-library"
ONE_OP = """
import torch, isoload
assert isoload.count(torch.tensor([[0, 2], [2, -1]], device="cuda"), 3).tolist() == [1, 0, 2]
isoload.ops.check_device("cuda")
print("count:", torch.cuda.get_device_name())
"""


def sources() -> str:
    """Of which sources a library is."""
    digest = hashlib.sha256()
    for path in [ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*"))]:
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def build(architecture: str) -> None:
    made_of = sources()
    shutil.rmtree(LIBRARY, ignore_errors=True)
    folders = ["--build-lib", str(LIBRARY), "--build-temp", str(ROOT / "build" / "gpu-objects")]
    asked = {"ISOLOAD_CUDA": "1", "ISOLOAD_CUDA_ARCH": architecture}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force", *folders]
    subprocess.run(command, cwd=ROOT, env=os.environ | asked, check=True)
    (LIBRARY / "sources").write_text(made_of)


def carried() -> bool:
    """Whether build/gpu-library is of the sources here."""
    stamp = LIBRARY / "sources"
    return stamp.exists() and stamp.read_text() == sources()


def install() -> None:
    for path in (LIBRARY / "isoload").glob("*.so"):
        new = PACKAGE / f"{path.name}.new"
        shutil.copy(path, new)
        new.replace(PACKAGE / path.name)


def runs() -> bool:
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-c", ONE_OP], env=environment).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--carry", metavar="ARCHITECTURE")
    options = parser.parse_args()
    if options.carry:
        return build(options.carry)
    if carried():
        install()
        if runs():
            return print("the library that was there runs")
        print("the library that was there does not run here: building")
    import torch

    major, minor = torch.cuda.get_device_capability()
    build(f"sm_{major}{minor}")
    install()
    sys.exit(not runs())


if __name__ == "__main__":
    main()
