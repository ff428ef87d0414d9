"""The tables of the wheel aiconfigurator-core (Apache-2.0) that bench/fit_times.py fits: timed rows, grouped."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WHEEL = "aiconfigurator-core"
GPUS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200", "gb300")
MODELS = {  # (hidden, intermediate, experts, top-k)
    (7168, 2048, 256, 8): "deepseek-v3",
    (7168, 2048, 384, 8): "kimi-k2",
    (6144, 2048, 256, 8): "glm-5",
    (6144, 2560, 160, 8): "qwen3-coder-480b",
    (4096, 1536, 128, 8): "qwen3-235b",
    (2048, 768, 128, 8): "qwen3-30b",
    (2880, 2880, 128, 4): "gpt-oss-120b",
    (2880, 2880, 32, 4): "gpt-oss-20b",
}
FUSED = {(7168, 3072, 384, 6): "deepseek-v4", (3584, 3072, 896, 16): "kimi-k3"}
# Tokens up to a rank's limit are dispatched in one call by so many SMs, SGLang's and vLLM's default.
DEEPEP_SMS = 20
# Within one node all GPUs take part: 4 of a GB200's compute tray, else 8.
NODE = {"gb200": 4, "gb300": 4}
Row = dict[str, Any]


@dataclass
class Group:
    """Rows of one kernel: same GPU, version, number type and shape. What they are is in `is_`."""

    is_: Row
    rows: list[Row] = field(default_factory=list)

    def find(self, even: bool) -> list[Row]:
        return [row for row in self.rows if (row["distribution"] in ("balanced", "uniform")) == even]


def folder() -> Path:
    """Of the installed wheel's tables.

    Raises:
        SystemExit: it is not installed.
    """
    for module in ("aiconfigurator_core", "pyarrow"):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(f"{module} is not there: pip install 'isoload[times]'")
    found = importlib.util.find_spec("aiconfigurator_core")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "systems" / "data"


def version() -> str:
    return importlib.metadata.version(WHEEL)


def read(path: Path) -> list[Row]:
    from pyarrow import parquet  # type: ignore[import-not-found]

    rows: list[Row] = parquet.read_table(path).to_pylist()
    return rows


def newest_first(path: Path) -> list[int]:
    """A key by which 0.5.14 comes before 0.5.6.post2."""
    return [
        -int("".join(filter(str.isdigit, part)) or 0)
        for part in path.parent.name.replace("rc", ".").split(".")
    ]


def named(framework: str, kernel: str) -> str:
    prefix = {"SGLang": "sglang", "VLLM": "vllm", "TRTLLM": "trtllm"}[framework]
    return kernel if kernel.startswith(prefix) else f"{prefix}_{kernel}"


def shape(row: Row) -> tuple[int, int, int, int]:
    return row["hidden_size"], row["inter_size"], row["num_experts"], row["topk"]


def grouped(
    gpu: str, rows: list[Row], version: str, kernel: str | None = None, models: dict[Any, str] | None = None
) -> Iterator[Group]:
    """Rows of known models without tensor parallelism, by kernel, number type and shape; kernel overrides the name."""
    found: dict[tuple[Any, ...], Group] = {}
    for row in rows:
        model = (models or MODELS).get(shape(row))
        if model is None or row["moe_tp_size"] != 1 or row["num_experts"] % row["moe_ep_size"]:
            continue
        name = kernel or named(row["framework"], row["kernel_source"])
        keys = ("hidden", "intermediate", "experts", "top_k")
        what = {"gpu": gpu.removesuffix("_sxm"), "kernel": name, "dtype": row["moe_dtype"]} | dict(
            zip(keys, shape(row), strict=True)
        )
        group = found.setdefault(tuple(what.values()), Group(what | {"model": model, "version": version}))
        group.rows.append(row)
    yield from found.values()


def moe_groups(data: Path) -> Iterator[Group]:
    """Of moe_perf, of each combination the newest version that has it."""
    for gpu in GPUS:
        for framework in ("sglang", "vllm", "trtllm"):
            seen: set[tuple[Any, ...]] = set()
            for path in sorted((data / gpu / "moe" / framework).glob("*/moe_perf.parquet"), key=newest_first):
                for group in grouped(gpu, read(path), f"{framework} {path.parent.name}"):
                    key = tuple(
                        group.is_[k] for k in ("kernel", "dtype", "hidden", "intermediate", "experts")
                    )
                    if key not in seen:
                        seen.add(key)
                        yield group


def deepep_groups(data: Path, phase: str, name: str) -> Iterator[Group]:
    """SGLang's DeepEP layers (wideep): phase context, which is prefill, or generation. All versions, newest first."""
    for gpu in GPUS:
        paths = (data / gpu / "moe" / "sglang").glob(f"*/wideep_{phase}_moe_perf.parquet")
        for path in sorted(paths, key=newest_first):
            yield from grouped(gpu, read(path), f"sglang {path.parent.name}", f"sglang_deepep_{name}")


def fused_groups(data: Path) -> Iterator[Group]:
    """Whole layers in one kernel, in prefill, the slowest rank of a real group."""
    for gpu in GPUS:
        for path in sorted((data / gpu / "moe" / "sglang").glob("*/dsv4_megamoe_module_perf.parquet")):
            rows = [row for row in read(path) if row["phase"] == "context"]
            for row in rows:
                row["num_tokens"] = row["global_num_tokens"]
            yield from grouped(gpu, rows, f"sglang {path.parent.name}", models=FUSED)


def exchange_groups(data: Path) -> Iterator[Group]:
    """All-to-alls: rows with tokens, and microseconds of dispatch and combine."""
    for gpu in GPUS:
        seen: set[tuple[Any, ...]] = set()
        for path in sorted((data / gpu / "comm").glob("*/*/*.parquet"), key=newest_first):
            name, framework = path.name.removesuffix("_perf.parquet"), path.parent.parent.name
            found: dict[tuple[Any, ...], Group] = {}
            steps: dict[tuple[Any, ...], dict[int, Row]] = defaultdict(dict)
            for row in read(path) if name in EXCHANGES else ():
                if (told := EXCHANGES[name](gpu, framework, row)) is None:
                    continue
                what, tokens, times = told
                key = tuple(what.values())
                found.setdefault(key, Group(what | {"version": f"{framework} {path.parent.name}"}))
                for step, us in times.items():
                    point = steps[key].setdefault(tokens, {"tokens": tokens, "dispatch": 0.0, "combine": 0.0})
                    point[step] += us
            for key, group in found.items():
                if key not in seen:
                    seen.add(key)
                    group.rows = [
                        row for _, row in sorted(steps[key].items()) if row["dispatch"] and row["combine"]
                    ]
                    yield group


Told = tuple[Row, int, dict[str, float]] | None


def _exchange(gpu: str, kernel: str, row: Row, ranks: int, nodes: int) -> Row | None:
    """What an exchange's rows are of; None for shapes of no known model."""
    hidden, experts = row["hidden_size"], row["num_experts"]
    top_k = row.get("num_topk", row.get("topk"))
    if (hidden, experts, top_k) not in {(h, e, k) for h, _, e, k in MODELS}:
        return None
    what = {
        "gpu": gpu.removesuffix("_sxm"),
        "kernel": kernel,
        "hidden": hidden,
        "top_k": top_k,
        "experts": experts,
    }
    return what | {"ranks": ranks, "nodes": nodes}


def _copied(gpu: str, row: Row) -> bool:
    """H200's DeepEP rows of SGLang 0.5.0, the only ones over several nodes, equal those of H100 in every figure; part
    of them say so (`device`)."""
    return gpu == "h200_sxm" and row["version"] == "0.5.0"


def _deepep(gpu: str, framework: str, row: Row) -> Told:
    nodes, normal = row["node_num"], row["op_name"] == "normal"
    kernel = f"sglang_deepep_{'normal' if normal else 'low_latency'}"
    what = _exchange(gpu, kernel, row, nodes * NODE.get(gpu, 8), nodes)
    if (
        what is None
        or _copied(gpu, row)
        or (normal and (row["dispatch_sms"], row["combine_sms"]) != (DEEPEP_SMS,) * 2)
    ):
        return None
    if not normal:
        return (
            what,
            row["num_token"],
            {step: row[f"{step}_avg_t_us"] or 0.0 for step in ("dispatch", "combine")},
        )
    times = {
        step: (row[f"{step}_transmit_us"] or 0.0) + (row[f"{step}_notify_us"] or 0.0)
        for step in ("dispatch", "combine")
    }
    return what, row["num_token"], times


def _a2a(gpu: str, framework: str, row: Row) -> Told:
    dtype = "" if row["comm_dtype"] == "default" else f"_{row['comm_dtype']}"
    kernel = f"{framework}_{row['comm_backend'].removeprefix('trtllm_')}{dtype}"
    what = _exchange(gpu, kernel, row, row["ep_size"], row["node_num"])
    return what and (what, row["num_tokens"], {row["phase"]: row["latency"] or 0.0})


def _nvlink(gpu: str, framework: str, row: Row) -> Told:
    step = row["op_name"].removeprefix("alltoall_")
    if step == "combine_low_precision":
        return None
    kernel = f"trtllm_{row['kernel_source']}_{row['moe_dtype']}"
    what = _exchange(gpu, kernel, row, row["moe_ep_size"], 1)
    return what and (
        what,
        row["num_tokens"],
        {"combine" if step == "combine" else "dispatch": 1e3 * (row["latency"] or 0.0)},
    )


EXCHANGES = {
    "wideep_deepep_normal": _deepep,
    "wideep_deepep_ll": _deepep,
    "moe_a2a": _a2a,
    "trtllm_alltoall": _nvlink,
}
