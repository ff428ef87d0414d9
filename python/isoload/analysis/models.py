"""Models by name or config.json (bytes of an expert, MoE layers), and shipped constants of engines' kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isoload.times import AllToAllTime, ExpertTime, LayerTime, Times, available
from isoload.topology import Topology, as_topology
from isoload.traces.identity import EXPERT_KEYS, moe_layers_of, read_config
from isoload.wording import not_one_of

# By the names of the measured kernels. Scales: a byte for 32 of mxfp4 and for 16 of nvfp4, two for 128 of int4.
WEIGHT_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8_block": 1.0,
    "fp8": 1.0,
    "w4a16_mxfp4": 0.53125,
    "w4a8_mxfp4_mxfp8": 0.53125,
    "nvfp4": 0.5625,
    "int4_wo": 0.515625,
}
PUBLISHED = {"fp8": "fp8_block", "mxfp4": "w4a16_mxfp4"}  # a checkpoint's quant_method, and the kernels' name


@dataclass(frozen=True)
class Model:
    """The properties of a model that advise uses."""

    name: str
    hidden: int  # width of a token
    intermediate: int  # of a routed expert, which has three matrices (gate, up, down)
    experts: int
    top_k: int
    layers: int  # those with experts
    dtype: str  # of the experts' weights
    kv_bytes: int  # of a token in all layers' KV cache, in bfloat16
    is_deepseek: bool = False  # DeepSeek's family, the only one for which SGLang gathers loads (`lp`)

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert's weights in one layer."""
        return 3 * self.hidden * self.intermediate * WEIGHT_BYTES[self.dtype]


MODELS = {
    model.name: model
    for model in (
        Model("deepseek-v3", 7168, 2048, 256, 8, 58, "fp8_block", 70_272, is_deepseek=True),
        Model("deepseek-v3.2", 7168, 2048, 256, 8, 58, "fp8_block", 70_272, is_deepseek=True),
        Model("kimi-k2", 7168, 2048, 384, 8, 60, "fp8_block", 70_272, is_deepseek=True),
        Model("qwen3-235b", 4096, 1536, 128, 8, 94, "bfloat16", 192_512),
        Model("qwen3-30b", 2048, 768, 128, 8, 48, "bfloat16", 98_304),
        Model("glm-4.5", 5120, 1536, 160, 8, 89, "bfloat16", 376_832),
        Model("glm-4.6", 5120, 1536, 160, 8, 89, "bfloat16", 376_832),
        Model("glm-5", 6144, 2048, 256, 8, 75, "bfloat16", 89_856),
        Model("minimax-m2", 3072, 1536, 256, 8, 62, "fp8_block", 253_952),
        Model("qwen3-next-80b", 2048, 512, 512, 10, 48, "bfloat16", 24_576),
        Model("gpt-oss-120b", 2880, 2880, 128, 4, 36, "w4a16_mxfp4", 73_728),
        Model("gpt-oss-20b", 2880, 2880, 32, 4, 24, "w4a16_mxfp4", 49_152),
    )
}

# All other models have no dense layers first.
FIRST_MOE_LAYER = {"deepseek-v3": 3, "deepseek-v3.2": 3, "kimi-k2": 1, "glm-4.5": 3, "glm-4.6": 3, "glm-5": 3}

# A field of Model, and the keys of config.json that give it; the first existing key counts.
KEYS = {
    "hidden": ("hidden_size",),
    "intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "experts": EXPERT_KEYS,
    "top_k": (
        *("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
        *("moe_topk", "moe_k", "top_k_experts"),
    ),
}
OPTIONS = {"experts": "--experts", "top_k": "--top-k", "layers": "--moe-layers"}


def find_model(
    name_or_path: str,
    dtype: str | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    layers: int | None = None,
) -> Model:
    """Return a model of MODELS, or one described by a config.json.

    dtype: of its experts, if another one is served. experts, top_k, layers: replace the file's.
    """
    options: dict[str, Any] = {"experts": experts, "top_k": top_k, "layers": layers}
    stated = {name: value for name, value in options.items() if value is not None}
    if plain_name(name_or_path) in MODELS:
        model = replace(MODELS[plain_name(name_or_path)], **stated)
    elif Path(name_or_path).is_file():
        model = _read(Path(name_or_path), dtype, stated)
    else:
        raise ValueError(not_one_of("model", MODELS, name_or_path, ", or a config.json"))
    if dtype is not None and dtype not in WEIGHT_BYTES:
        raise ValueError(not_one_of("dtype", WEIGHT_BYTES, dtype))
    return replace(model, dtype=dtype or model.dtype)


def plain_name(name: str) -> str:
    """Return the name as in MODELS, from ``deepseek-ai/DeepSeek-V3`` or ``DeepSeek-V3``."""
    return name.rpartition("/")[2].lower()


def find_moe_layers(name_or_path: str) -> tuple[str, tuple[int, ...]]:
    """Return the name of a model of MODELS, or of a config.json, and the numbers of its MoE layers."""
    if Path(name_or_path).is_file():
        path = Path(name_or_path)
        try:
            return _name(path), moe_layers_of(read_config(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    name = plain_name(name_or_path)
    if name not in MODELS:
        raise ValueError(not_one_of("model", MODELS, name_or_path, ", or a config.json"))
    first = FIRST_MOE_LAYER.get(name, 0)
    return name, tuple(range(first, first + MODELS[name].layers))


def _name(path: Path) -> str:
    return path.stem if path.stem != "config" else path.parent.name or "config"


def _read(path: Path, dtype: str | None, stated: dict[str, int]) -> Model:
    config = read_config(path)
    if config.get("num_hidden_layers") is None and config.get("num_layers") is not None:  # LongCat
        config = config | {"num_hidden_layers": config["num_layers"]}

    def number(*keys: str, default: int | None = None, option: str = "") -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if keys[0] == KEYS["intermediate"][0] and config.get(keys[0], 0) is None:
            value = None  # intermediate_size is that of the model's dense layers
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            more = f": pass {option} N" if option else ""
            raise ValueError(f"{path}: {keys[0]} must be a whole number, got {value!r:.40}{more}")
        return value

    layers = number("num_hidden_layers")
    sizes = {
        name: stated[name] if name in stated else number(*keys, option=OPTIONS.get(name, ""))
        for name, keys in KEYS.items()
    }
    if config.get("kv_lora_rank"):  # multi-head latent attention
        per_layer = number("kv_lora_rank") + number("qk_rope_head_dim", default=0)
    else:
        heads = number("num_attention_heads")
        size = number("head_dim", default=sizes["hidden"] // max(heads, 1))
        per_layer = 2 * number("num_key_value_heads", default=heads) * size
    quantised = config.get("quantization_config") or {}
    method = str(quantised.get("quant_method", "bfloat16"))
    if dtype is None and method not in WEIGHT_BYTES | PUBLISHED:
        raise ValueError(f"dtype must be given for {path}, whose quant_method is {method!r:.40}")
    try:
        moe_layers = stated["layers"] if "layers" in stated else len(moe_layers_of(config))
    except ValueError as error:
        raise ValueError(f"{path}: {error}: pass {OPTIONS['layers']} N") from None
    return Model(
        _name(path),
        **sizes,
        layers=moe_layers,
        dtype=dtype or PUBLISHED.get(method, method),
        kv_bytes=2 * layers * per_layer,
        is_deepseek=str(config.get("model_type")).startswith(("deepseek", "kimi")),
    )


PHASES = ("prefill", "decode")
MEASURE = "isoload measure times the kernels of your GPUs, and --times takes its file in place of --gpu"
ALL_TO_ALL = {  # DeepEP's normal mode and its low-latency one
    "sglang": {"prefill": "sglang_deepep_normal", "decode": "sglang_deepep_low_latency"},
    "vllm": {"prefill": "vllm_deepep_ht", "decode": "vllm_deepep_ll"},
}


def layer_time(
    gpu: str,
    engine: str,
    phase: str,
    model: Model,
    topology: Topology | int,
    kernel: str | None = None,
    exchange_phase: str | None = None,
) -> tuple[LayerTime, list[str]]:
    """Return a layer's constants, and sentences about constants that were taken from another setting.

    Args:
        gpu: "h200" or "h200_sxm".
        kernel: of the experts, as in the tables; None: DeepEP's of this phase if it was measured, else the best fit.
        exchange_phase: phase of the all-to-all; None: that of `phase`.
    """
    if engine not in ALL_TO_ALL:
        raise ValueError(not_one_of("engine", ALL_TO_ALL, engine))
    if phase not in PHASES:
        raise ValueError(not_one_of("phase", PHASES, phase))
    rows = [row for row in available() if row["table"] == "experts"]
    gpus = sorted({row["gpu"] for row in rows})
    full = next((name for name in gpus if gpu in (name, name.removesuffix("_sxm"))), None)
    if full is None:
        raise ValueError(not_one_of("gpu", gpus, gpu, " (or --times FILE, which isoload measure writes)"))
    shape: dict[str, Any] = {"hidden": model.hidden, "intermediate": model.intermediate, "dtype": model.dtype}
    other = f"_{PHASES[phase == 'prefill']}"
    usable = [row for row in rows if row["gpu"] == full and row["kernel"].startswith(f"{engine}_")]
    usable = [row for row in usable if not row["kernel"].endswith(other)]
    fitting = [row for row in usable if shape.items() <= row.items()]
    if not fitting:
        raise ValueError(_no_experts(f"{engine} was measured with on {full} for {phase}", usable, model))
    names = sorted({row["kernel"] for row in fitting})
    if kernel is not None and kernel not in names:
        raise ValueError(not_one_of("kernel", names, kernel))
    best = min(fitting, key=lambda row: (not row["kernel"].endswith(f"_{phase}"), row["fit_error"]))
    experts = ExpertTime.load(full, kernel or best["kernel"], **shape)
    steps, notes = _exchange(full, ALL_TO_ALL[engine][exchange_phase or phase], model, as_topology(topology))
    return LayerTime(steps[0], experts, steps[1]), notes


def measured_layer(times: Times, model: Model, topology: Topology) -> tuple[LayerTime, list[str]]:
    measured = times.experts
    shape = measured.hidden, measured.intermediate, measured.dtype
    if shape != (model.hidden, model.intermediate, model.dtype):
        raise ValueError(
            f"times of {times.source} are of experts {shape[0]} x {shape[1]} {shape[2]}, and {model.name} has "
            f"{model.hidden} x {model.intermediate} {model.dtype}: run isoload measure --model {model.name}"
        )
    return times.layer(topology.num_ranks, topology.num_nodes, model.top_k)


def _no_experts(where: str, usable: list[dict[str, Any]], model: Model) -> str:
    shape = model.hidden, model.intermediate
    shapes = sorted({(row["hidden"], row["intermediate"]) for row in usable if row["dtype"] == model.dtype})
    dtypes = sorted({row["dtype"] for row in usable if (row["hidden"], row["intermediate"]) == shape})
    listed = ", ".join(f"{hidden} x {inner}" for hidden, inner in shapes) or "none"
    also = (
        f"; {shape[0]} x {shape[1]} was measured in {', '.join(dtypes)}: --dtype {dtypes[0]}"
        if dtypes
        else ""
    )
    return (
        f"model must have experts that {where} in {model.dtype} ({listed}), got {model.name}, {shape[0]} x {shape[1]} "
        f"{model.dtype}{also}. {MEASURE}"
    )


def layer_times(
    gpu: str, engine: str, phase: str, model: Model, topology: Topology | int, kernel: str | None = None
) -> tuple[dict[str, LayerTime], list[str]]:
    """Return constants by phase, with the kernel of the requested phase; a phase without constants gets a sentence."""
    times, gaps = {}, []
    for name in PHASES:
        try:
            chosen = kernel if name == phase else None
            times[name] = layer_time(gpu, engine, name, model, topology, chosen)[0]
        except ValueError as error:
            gaps.append(f"Kernels of {name} are skipped: {error}.")
    return times, gaps


def _exchange(
    gpu: str, kernel: str, model: Model, topology: Topology
) -> tuple[tuple[AllToAllTime | None, AllToAllTime | None], list[str]]:
    """Return dispatch and combine. Rows of a width that was not measured take the time of the nearest one's bytes."""
    ranks, nodes = topology.num_ranks, topology.num_nodes
    if ranks == 1:
        return (None, None), []
    rows = [row for row in available() if row["table"] == "exchanges" and row["kernel"] == kernel]
    widths = sorted({row["hidden"] for row in rows if row["gpu"] == gpu})
    if not widths:
        raise ValueError(f"gpu must have measured times of {kernel}, got {gpu}")
    hidden = min(widths, key=lambda width: (abs(width - model.hidden), width))
    counts = sorted({row["top_k"] for row in rows if row["gpu"] == gpu and row["hidden"] == hidden})
    top_k = min(counts, key=lambda count: (abs(count - model.top_k), count))
    ends, notes = [], []
    for step in ("dispatch", "combine"):
        time = AllToAllTime.load(gpu, kernel, step, hidden=hidden, top_k=top_k, ranks=ranks, nodes=nodes)
        part = model.hidden * model.top_k / (hidden * top_k)
        low, high = (curve._replace(s_us=curve.s_us * part) for curve in (time.low, time.high))
        ends.append(replace(time, low=low, high=high))
    if part != 1:
        measured = f"{hidden}, top-{top_k}, by bytes"
        notes.append(f"the all-to-all of rows of {model.hidden}, top-{model.top_k}, is that of {measured}")
    if ends[0].note:
        notes.append(f"the upper end of the all-to-all's range was measured on {ends[0].note}")
    if sizes := ends[0].extrapolated_from:
        size = f"{ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}"
        notes.append(f"the all-to-all of {size} is extrapolated; measured were {sizes}")
    return (ends[0], ends[1]), notes
