"""The layers and the model to which the rows of a record or a placement belong.

Engines number layers differently: by the model's own numbers, or by position among the MoE layers. Joins and
conversions use an :class:`Identity`, so that rows are never matched by position without a statement that allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from isoload.files import MAX_LAYERS, MAX_NOTES, check_keys, parse_json, read_text
from isoload.wording import shown

Numbering = Literal["model", "moe", "hidden", "order"]
NUMBERINGS = {  # how layer_ids are named in messages and by `isoload inspect`
    "model": "the model's own layer numbers",
    "moe": "positions among the MoE layers",
    "hidden": "the model's own layer numbers, with a row for dense layers too",
    "order": "positions in the order recorded; which layers of the model they are is not known",
}
HOW = "pass --first-moe-layer N (DeepSeek-V3: 3) or --model config.json"


Record = TypeVar("Record", bound="Identified")


@dataclass(frozen=True)
class Identity:
    """Meaning of ``layer_ids`` [L].

    Args:
        numbering: "model": the model's own layer numbers, MoE layers only. "moe": positions among the MoE layers.
            "hidden": the model's own numbers with rows for dense layers too, as in SGLang's placement files. "order":
            unknown; such rows can be joined only with rows of the same kind.
        moe_layers: the model's own numbers of all its MoE layers, ascending; () = unknown. Needed to convert between
            "moe" and the other numberings.
        model: name of the model, "" = unknown.
    """

    numbering: Numbering = "order"
    moe_layers: tuple[int, ...] = ()
    model: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.numbering, str) or self.numbering not in get_args(Numbering):
            raise ValueError(f"numbering must be one of {', '.join(NUMBERINGS)}, got {shown(self.numbering)}")
        layers = self.moe_layers
        numbers = isinstance(layers, tuple) and all(type(n) is int and 0 <= n < 2**31 for n in layers)
        if not numbers or list(layers) != sorted(set(layers)):
            raise ValueError(f"moe_layers must be ascending layer numbers from 0 on, got {shown(layers)}")
        if not isinstance(self.model, str):
            raise ValueError(f"model must be a string, got {shown(self.model)}")

    def describe(self, layer_ids: Sequence[int]) -> str:
        known = f", MoE layers {spans(self.moe_layers)} of the model" if self.moe_layers else ""
        return f"{spans(layer_ids)} ({NUMBERINGS[self.numbering]}{known})"

    def stated(
        self,
        layer_ids: Sequence[int],
        what: str,
        first_moe_layer: int | None = None,
        moe_layers: Sequence[int] = (),
        model: str = "",
    ) -> Identity:
        """Return the identity with what :meth:`Identified.with_moe_layers` adds; what: of the record, for messages."""
        numbering: Numbering = "moe" if self.numbering == "order" else self.numbering
        if first_moe_layer is not None:
            if moe_layers:
                raise ValueError(f"first_moe_layer must come without moe_layers, got {first_moe_layer}")
            if not 0 <= first_moe_layer < MAX_LAYERS:
                raise ValueError(f"first_moe_layer must be in 0..{MAX_LAYERS - 1}, got {first_moe_layer}")
            last = max(layer_ids) + (first_moe_layer if numbering == "moe" else 0)
            if last < first_moe_layer:
                raise ValueError(
                    f"first_moe_layer must be at most {last}, the last layer of {what}, got {first_moe_layer}"
                )
            moe_layers = range(first_moe_layer, last + 1)
        moe_layers = moe_layers or self.moe_layers
        named = replace(self, model=model or self.model)
        if not moe_layers:
            return named
        if numbering == "moe" and max(layer_ids) >= len(moe_layers):
            raise ValueError(
                f"{what} has MoE layers up to position {max(layer_ids)}, but the model has {len(moe_layers)} MoE "
                f"layers ({spans(moe_layers)}): check --first-moe-layer and --model"
            )
        # Layers beyond the last are draft (MTP) layers, which a config does not count among its hidden layers.
        extra = [n for n in layer_ids if n > moe_layers[-1]] if numbering != "moe" else []
        layers = (*moe_layers, *sorted(extra))
        dense = sorted(set(layer_ids) - set(layers))
        if numbering == "model" and dense:
            raise ValueError(
                f"{what} has layer {dense[0]}, which is dense in the model (MoE layers {spans(moe_layers)}): "
                "check --first-moe-layer and --model"
            )
        return joined(replace(named, numbering=numbering), Identity(numbering, layers), what, "the options")

    def moe_rows(self, layer_ids: Sequence[int], what: str, numbering: Numbering) -> dict[int, int]:
        """Return {layer: row of layer_ids} of the MoE layers, with layers numbered "model" or "moe"."""
        if self.numbering == "hidden" and not self.moe_layers:
            raise ValueError(
                f"{what} has a row for each of the model's {len(layer_ids)} layers and does not state which are dense: "
                f"{HOW}"
            )
        rows = {layer: row for row, layer in enumerate(layer_ids)}
        if self.numbering == "hidden":
            rows = {layer: rows[layer] for layer in self.moe_layers if layer in rows}
        current = "model" if self.numbering == "hidden" else self.numbering
        if current == numbering:
            return rows
        if current == "order":
            raise ValueError(
                f"{what} does not state which layers of the model its {len(rows)} rows are: {HOW}"
            )
        if not self.moe_layers:
            # Layers 0 .. n-1 of the model without a gap: no dense layer precedes any of them.
            if current == "model" and sorted(rows) == list(range(len(rows))):
                return rows
            which = (
                "numbers MoE layers from 0"
                if current == "moe"
                else f"numbers layers as the model does ({spans(layer_ids)})"
            )
            raise ValueError(f"{what} {which} and does not state which layers of the model are dense: {HOW}")
        if current == "moe":
            if max(rows) >= len(self.moe_layers):
                raise ValueError(
                    f"{what} has MoE layers up to position {max(rows)}, but the model has {len(self.moe_layers)}"
                )
            return {self.moe_layers[position]: row for position, row in rows.items()}
        return {self.moe_layers.index(layer): row for layer, row in rows.items()}


def identity_to_json(identity: Identity) -> dict[str, Any]:
    return asdict(identity) | {"moe_layers": list(identity.moe_layers)}


def identity_from_json(content: Any) -> Identity:
    if not isinstance(content, dict):
        raise ValueError(f"identity must be an object, got {shown(content)}")
    check_keys(content, {field.name for field in fields(Identity)}, "identity")
    layers = content["moe_layers"]
    if not isinstance(layers, list):
        raise ValueError(f"moe_layers must be a list of layer numbers, got {shown(layers)}")
    return Identity(content["numbering"], tuple(layers), content["model"])


class Identified:
    """Base of recorded traces and placements: layers, and the meaning of their numbers."""

    layer_ids: tuple[int, ...]
    identity: Identity

    def with_moe_layers(
        self: Record, first_moe_layer: int | None = None, *, moe_layers: Sequence[int] = (), model: str = ""
    ) -> Record:
        """Return the trace or placement with a statement about its model, which conversions between engines need.

        Args:
            first_moe_layer: number of dense layers before the first MoE layer, after which all layers are MoE layers.
            moe_layers: in place of first_moe_layer: the model's own numbers of all its MoE layers.
            model: the model's name, "" = not stated.
        """
        what = f"trace {self.name}" if hasattr(self, "name") else "placement"
        identity = self.identity.stated(self.layer_ids, what, first_moe_layer, moe_layers, model)
        return replace(self, identity=identity)  # type: ignore[type-var]


def joined(first: Identity, second: Identity, what: str, other_what: str) -> Identity:
    """Return what two identities of one model state together, with the numbering of the first."""
    if len({model.rpartition("/")[2].lower() for model in (first.model, second.model) if model}) > 1:
        raise ValueError(
            f"{what} is of the model {first.model}, but {other_what} of {second.model}: if they are the same, "
            "pass --model"
        )
    if first.moe_layers and second.moe_layers and first.moe_layers != second.moe_layers:
        raise ValueError(
            f"{what} is of a model with MoE layers {spans(first.moe_layers)}, but {other_what} states "
            f"{spans(second.moe_layers)}"
        )
    return replace(first, moe_layers=first.moe_layers or second.moe_layers, model=first.model or second.model)


def matching_rows(
    wanted: Identity,
    layer_ids: Sequence[int],
    what: str,
    source: Identity,
    others: Sequence[int],
    other_what: str,
) -> list[int]:
    """Return for each layer [L] of a record the row of another one (source, others) for the same layer of the model."""
    agreed = joined(wanted, source, what, other_what)
    kinds = wanted.numbering, source.numbering
    mine, theirs = ("model" if kind == "hidden" else kind for kind in kinds)
    if mine == theirs:
        rows = {layer: row for row, layer in enumerate(others)}
    elif "order" in (mine, theirs):
        vague, ids = (what, layer_ids) if mine == "order" else (other_what, others)
        raise ValueError(f"{vague} does not state which layers of the model its {len(ids)} rows are: {HOW}")
    else:
        known = replace(source, moe_layers=agreed.moe_layers)
        rows = known.moe_rows(others, other_what, wanted.numbering if wanted.numbering == "moe" else "model")
    if missing := [layer for layer in layer_ids if layer not in rows]:
        raise ValueError(
            f"{other_what} has layers {source.describe(others)} and no layer {missing[0]}, which {what} has: "
            f"{wanted.describe(layer_ids)}"
        )
    return [rows[layer] for layer in layer_ids]


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: ``3..60, 62``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    texts = ["..".join(map(str, part)) for part in parts]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:7], f"... {texts[-1]}"])


# The first existing key counts.
EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.json, of its text model if it describes several; {} if it holds no object."""
    content = parse_json(read_text(path, MAX_NOTES), infinities=True)  # as in Mamba's time_step_limit
    if not isinstance(content, dict):
        return {}
    text = content.get("text_config") or content.get("llm_config") or content
    return text if isinstance(text, dict) else {}


KINDS = ("mlp_layer_types", "moe_layer_freq", "hybrid_override_pattern")  # one entry per layer
LISTS = ("moe_layers", "moe_layers_enum")  # the numbers of the MoE layers
SPARSE = (1, "sparse", "moe", "hash_moe", "E")
# Every step-th layer has experts: the last of each step layers, except for Jamba, which names an offset, and for
# DeepSeek's moe_layer_freq, which counts from layer 0.
STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
FIRSTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def moe_layers_of(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the MoE layers in a config.json, by the keys of Hugging Face's configs, ascending.

    Draft (MTP) layers are not among them. A model without any of the keys has experts in every layer.
    """
    num_layers = _number(config, "num_hidden_layers", None)
    if not 0 < num_layers <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be in 1..{MAX_LAYERS}, got {num_layers}")
    for key in KINDS:
        if isinstance(kinds := config.get(key), list | str):
            if len(kinds) != num_layers:
                raise ValueError(f"{key} must describe {num_layers} layers, got {len(kinds)}")
            return _some(key, [layer for layer, kind in enumerate(kinds) if kind in SPARSE])
    for key in LISTS:
        if (listed := config.get(key)) is not None:
            return _some(key, _listed(key, listed, num_layers))
    step, offset = _step(config)
    first = max(_number(config, key, 0) for key in FIRSTS)
    last = _number(config, "moe_layer_end_index", -1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers must be a list of layer numbers, got {shown(dense)}")
    layers = range(first, num_layers if last < 0 else min(last + 1, num_layers))
    return _some("num_hidden_layers", [n for n in layers if (n - offset) % step == 0 and n not in dense])


def _step(config: dict[str, Any]) -> tuple[int, int]:
    """Return (step, offset): layers ``n`` with ``(n - offset) % step == 0`` have experts."""
    if config.get("expert_layer_period") is not None:
        return max(_number(config, "expert_layer_period", 1), 1), _number(config, "expert_layer_offset", 0)
    for key in STEPS:
        if config.get(key) is not None:
            step = max(_number(config, key, 1), 1)
            return step, step - 1
    return max(_number(config, "moe_layer_freq", 1), 1), 0


def _number(config: dict[str, Any], key: str, default: int | None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < -1:
        raise ValueError(f"{key} must be a whole number, got {shown(value)}")
    return value


def _listed(key: str, listed: Any, num_layers: int) -> Sequence[int]:
    if isinstance(listed, str):
        listed = [int(part) if part.strip().isdecimal() else part for part in listed.split(",")]
    if not isinstance(listed, list) or not all(type(n) is int and 0 <= n < num_layers for n in listed):
        raise ValueError(f"{key} must be layer numbers below {num_layers}, got {shown(listed)}")
    return sorted(set(listed))


def _some(key: str, layers: Sequence[int]) -> tuple[int, ...]:
    if not layers:
        raise ValueError(f"{key} must leave at least one MoE layer, got none")
    return tuple(layers)
