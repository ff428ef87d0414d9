"""Build the recorded traces that have no licence to be copied, each from a checkout of the repository that has it.

Usage: python bench/fetch_traces.py                            # the files, and for each missing one what to clone
       git clone https://github.com/OWNER/REPOSITORY FOLDER
       python bench/fetch_traces.py NAME --checkout FOLDER     # writes bench/traces/NAME.npz

A file is read at a fixed commit (`git show COMMIT:PATH`, so that a bare clone will do), and written if its arrays have
the checksum below. Nothing is downloaded here. bench/traces/README.md has the licences of the traces in a clone.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoload.traces import Trace, read_trace, write_trace
from lib.harness import command
from lib.trace_files import CLONE

DSV3 = (
    *("prefill_in1024", "prefill_in2048", "prefill_in4096"),
    *("prefill_in1000out1000", "prefill_in1800out100", "prefill_in2000out100"),
    *("decode_in1800out100", "decode_in2000out100"),
)
THEMES = (
    *("agent_orchestration", "code_testing", "coding", "debugging", "factual_knowledge", "io_uring_writing"),
    *("machine_learning", "math", "moe_training", "psychology", "relationship_help", "tool_calling"),
    "website_building",
)
Files = Callable[[str], bytes]


def dsv3(file: Files) -> dict[str, Any]:
    """Totals of eight workloads; a letter marks those that are near-copies."""
    read = [json.loads(file(f"attachment_ep_statistics/{label}.json"))["logical_count"][3:] for label in DSV3]
    return {
        "counts": np.array(read).astype(np.int64),
        "cluster": tuple("abcabbdd"),
        "layer_ids": tuple(range(3, 61)),
        "provenance": {"batch_labels": list(DSV3)},
    }


def glm52(file: Files) -> dict[str, Any]:
    """48 batches: eight shards of each text domain."""
    domains = ("books", "chat", "code_instruct", "math", "web", "wiki")
    labels = [(domain, shard) for domain in domains for shard in range(8)]
    read = [json.loads(file(f"saliency/sal_{domain}_calib_{shard:02}.json")) for domain, shard in labels]
    layers = tuple(range(3, 78))
    return {
        "counts": np.array([[one["layers"][str(layer)]["cnt"] for layer in layers] for one in read]),
        "tokens_per_batch": np.array([one["tokens"] for one in read]),
        "cluster": tuple(domain for domain, _ in labels),
        "layer_ids": layers,
    }


def gemma4(file: Files) -> dict[str, Any]:
    """A batch for each theme, without and with reasoning."""
    labels = [(theme, reasoning) for theme in THEMES for reasoning in ("off", "on")]
    read = []
    for theme, reasoning in labels:
        path = f"public/data/theme_traces/routing_trace_{theme}_reasoning_{reasoning}.json"
        read.append([layer["counts"] for layer in json.loads(file(path))["layers"]])
    counts = np.array(read).astype(np.int64)
    return {
        "counts": counts,
        "tokens_per_batch": counts[:, 0].sum(-1) // 8,
        "cluster": tuple(f"theme:{theme}" for theme, _ in labels),
    }


def switch128(kind: str, file: Files) -> dict[str, Any]:
    folder = f"outputs/mgblcks/{kind}_mgblcks_128_experts_1_gpus_normalrun_get_tokens_per_exp/0"
    layers, read = (1, 3, 5, 7, 9, 11), []
    for layer in layers:
        rows = csv.DictReader(io.StringIO(file(f"{folder}/moe_l{layer}.csv").decode()))
        read.append([json.loads(row["tokens per expert"]) for row in rows])
    return {"counts": np.array(read).swapaxes(0, 1), "layer_ids": layers}


class TensorsOnly(pickle.Unpickler):
    """Reads a pickle of tensors, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return torch._utils._rebuild_tensor_v2
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda stored: torch.load(io.BytesIO(stored), weights_only=True)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"the file names {module}.{name}, which is no tensor")


def olmoe(file: Files) -> dict[str, Any]:
    """Five prompts; the top 8 of each token's logits."""
    logits = TensorsOnly(io.BytesIO(file("logit_analysis/mmlu_router_logits_10.pkl"))).load()["router_logits"]
    ids, sequences = [], []
    for number, layers in logits.items():
        gates = torch.stack([layers[f"model.layers.{layer}.mlp.gate"] for layer in range(16)], 1).float()
        ids.append((-gates.numpy()).argsort(-1, kind="stable")[..., :8])  # equal logits: the lowest expert
        sequences += [number] * len(gates)
    return {"topk_ids": np.concatenate(ids).astype(np.int32), "seq_id": np.array(sequences)}


@dataclass(frozen=True)
class Source:
    repository: str  # on GitHub
    commit: str
    model: str
    experts: int
    top_k: int
    build: Callable[[Files], dict[str, Any]]
    checksum: str  # sha256 of the counts, or of the token's ids, as little-endian int64


SOURCES = {
    "dsv3_sglang_longin": Source(
        "GeneratedRandomly/SGLang-reproduce",
        "c79682c8cf0f4de9b642dbd99ad12cef60fcfb32",
        "DeepSeek-V3",
        256,
        8,
        dsv3,
        "08fc97c303aca47b3fcddaba8138c9498d1a5e0266455ee782cb3cfcc9933fff",
    ),
    "glm52_domains_a": Source(
        "Dorijan10/glm-expert-pruning",
        "6cb44696e32be61e53482ade3dad90dfbb6cca44",
        "GLM-5.2",
        256,
        8,
        glm52,
        "038d84c055cb03cabc2463823f08fe0ff3c2f166cd629f00c377a4ad42895b69",
    ),
    "gemma4_26b_themes": Source(
        "avifenesh/gemma-expert-atlas",
        "4929f64b99b04de8372e4edd0c23783b59402934",
        "Gemma 4 26B-A4B",
        128,
        8,
        gemma4,
        "7ffda246233d21566ccd2a1ee1a7cd01c6b0a1b32964ae2cec01dfb9e1e35dbc",
    ),
    "olmoe_mmlu_small": Source(
        "danielfang001/moe-profiler",
        "3123ae55303b45f100a35b8a5da459a59e0710f9",
        "allenai/OLMoE-1B-7B-0924-Instruct",
        64,
        8,
        olmoe,
        "4903efe1d145bfac7d0728c1f77846cd17ef25897692e8c446825974f7e0fa3d",
    ),
    **{
        f"switch128_{name}": Source(
            "sacs-epfl/moe-inference",
            "322b414722ae1adce3046cef2f4f02dc3e0f5108",
            "google/switch-base-128",
            128,
            1,
            lambda file, kind=kind: switch128(kind, file),
            checksum,
        )
        for name, kind, checksum in (
            (
                "bookcorpus",
                "encoder-decoder",
                "11f513bbdd0ff13f51218d6363caf8e9fba947c170184d8c3d9f5edb02f0a924",
            ),
            ("cocktail", "encoder", "945b679affa9bb69c0fbd1651c1050119cd9919b35526bfb17daca434cd54b9a"),
        )
    },
}


def checksum(arrays: dict[str, Any]) -> str:
    main = arrays.get("counts", arrays.get("topk_ids"))
    return hashlib.sha256(np.ascontiguousarray(main, "<i8").tobytes()).hexdigest()


def build(name: str, checkout: Path) -> Trace:
    """The trace of a source, from a clone of its repository."""
    source = SOURCES[name]

    def file(path: str) -> bytes:
        command = ["git", "-C", str(checkout), "show", f"{source.commit}:{path}"]
        done = subprocess.run(command, capture_output=True)
        if done.returncode:
            raise SystemExit(
                f"{checkout} must be a clone of github.com/{source.repository} with commit {source.commit}, but "
                f"git show {path} failed: {done.stderr.decode().strip()}"
            )
        return done.stdout

    arrays = source.build(file)
    if (found := checksum(arrays)) != source.checksum:
        raise SystemExit(f"{name} must have the checksum {source.checksum}, got {found}: it is not written")
    about = {"model": source.model, "source_repo": f"https://github.com/{source.repository}"}
    about |= {"source_commit": source.commit, "license": "none stated", **arrays.pop("provenance", {})}
    return Trace(name, source.experts, source.top_k, provenance=about, **arrays)


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("name", nargs="?", choices=SOURCES, help="the trace to build")
    parser.add_argument("--checkout", type=Path, metavar="FOLDER", help="a clone of its repository")
    parser.add_argument("--to", type=Path, default=CLONE, metavar="FOLDER", help="[default: bench/traces]")
    asked = parser.parse_args()
    if (asked.name is None) != (asked.checkout is None):
        parser.error("NAME and --checkout belong together")
    if asked.name is None:
        for name, source in SOURCES.items():
            path = asked.to / f"{name}.npz"
            clone = f"git clone https://github.com/{source.repository}, commit {source.commit}"
            print(f"{name}: {path if path.exists() else clone}")
        return 0
    trace = build(asked.name, asked.checkout)
    path = asked.to / f"{asked.name}.npz"
    write_trace(trace, path)
    again = read_trace(path)
    print(f"{path}: {again.num_layers} layers, {again.num_experts} experts, checksum right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
