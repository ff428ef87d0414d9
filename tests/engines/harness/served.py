"""A real SGLang server over two CPU processes, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine_runs import SECONDS, environment, free_port
from run_engine import COMMON


def ask(url: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        text: str = answer.read().decode()
        return text


@contextmanager
def sglang_server(
    checkpoint: Path, folder: Path, variables: dict[str, str], **options: Any
) -> Iterator[tuple[str, Path]]:
    """(address, log); options are launch_server's, with underscores."""
    folder.mkdir()
    port, log = free_port(), folder / "server.log"
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(checkpoint),
        "--port",
        str(port),
    ]
    for key, value in (COMMON | {"skip_server_warmup": True} | options).items():
        command += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    given = environment(folder, "sglang.srt.plugins", "cpu_engine", {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=given | variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
    try:
        while True:
            with suppress(urllib.error.URLError, ConnectionError):
                ask(f"{address}/health")
                break
            text = log.read_text()
            assert process.poll() is None and time.monotonic() < end, f"no server:\n{text[-4000:]}"
            time.sleep(0.5)
        yield address, log
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
