"""Real servers over two CPU processes, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_runs import SECONDS, environment, free_port, vllm_environment
from prometheus_client.parser import text_string_to_metric_families

from isoload.online.metrics import METRICS

Samples = dict[tuple[str, str], dict[frozenset[tuple[str, str]], float]]


def ask(url: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        text: str = answer.read().decode()
        return text


@dataclass(frozen=True)
class Server:
    """An engine's, of a model served as "tiny"; body: a request to path."""

    engine: str
    address: str
    log: Path
    path: str
    body: Any

    def scrape(self) -> Samples:
        """isoload's samples, by name and rank, with their other labels."""
        found: Samples = {}
        for family in text_string_to_metric_families(ask(f"{self.address}/metrics")):
            for sample in family.samples:
                if sample.name.startswith("isoload_"):
                    labels = dict(sample.labels)
                    assert (labels.pop("model"), labels.pop("engine")) == ("tiny", self.engine)
                    of_rank = found.setdefault((sample.name, labels.pop("rank")), {})
                    of_rank[frozenset(labels.items())] = sample.value
        return found

    def serve_until(self, done: Callable[[Samples], bool], seconds: float = 120) -> Samples:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ask(self.address + self.path, self.body)
            if done(samples := self.scrape()):
                return samples
        raise AssertionError(f"{samples}\n{self.log.read_text()[-4000:]}")

    def on_and_off(self, switch: Path) -> tuple[Samples, Samples]:
        """While isoload chooses replicas, past two rebalances, and once the file of ISOLOAD_SWITCH says off."""
        on = self.serve_until(
            lambda of: one(of, "rebalances_total") >= 2 and one(of, "rebalance_thread_dead", "1") == 0
        )
        switch.write_text("off")
        return on, self.serve_until(lambda of: all(one(of, "fallbacks_total", rank) > 0 for rank in "01"))


def one(samples: Samples, name: str, rank: str = "0") -> float:
    """Of a metric without labels of its own; nan: it is not there yet."""
    (value,) = samples.get((f"isoload_{name}", rank), {frozenset(): float("nan")}).values()
    return value


def check_all_there(samples: Samples) -> None:
    """Every metric, of both ranks, with its labels; what the first says for all of them of that one alone."""
    for name, metric in METRICS.items():
        scraped_as = f"isoload_{name}" + "_count" * (metric.kind == "histogram")
        ranks = {rank for of, rank in samples if of == scraped_as}
        assert ranks == ({"0"} if name in ("imbalance", "balancedness") else {"0", "1"}), name
        for rank in ranks:
            labels = {frozenset(key for key, _ in of) for of in samples[scraped_as, rank]}
            assert labels == {frozenset(metric.labels)}, name


def sglang_server(folder: Path, variables: dict[str, str], body: Any, **options: Any) -> Any:
    """Of folder's model; options are launch_server's, with underscores."""
    given = environment(folder, "sglang.srt.plugins", "cpu_engine", {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "model")]
    options = options | {"skip_server_warmup": True, "served_model_name": "tiny"}
    return server("SGLang", folder, command, given | variables, options, "/generate", body)


def vllm_server(folder: Path, variables: dict[str, str], body: Any, **options: Any) -> Any:
    """The same of vLLM, whose processes meet in a folder for their metrics."""
    (folder / "prometheus").mkdir()
    given = vllm_environment(folder, {"PROMETHEUS_MULTIPROC_DIR": str(folder / "prometheus")})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    options = options | {"served_model_name": "tiny"}
    return server("vLLM", folder, command, given | variables, options, "/v1/completions", body)


@contextmanager
def server(
    engine: str,
    folder: Path,
    command: list[str],
    environ: dict[str, str],
    options: dict[str, Any],
    path: str,
    body: Any,
) -> Iterator[Server]:
    port, log = free_port(), folder / "server.log"
    for key, value in (options | {"port": port}).items():
        command += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
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
        yield Server(engine, address, log, path, body)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
