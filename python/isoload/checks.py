"""Value checks of tensors, and options of policies and placers (``name:option=value:option=value``).

Values of a tensor are checked if that costs no wait: on CPU always, on CUDA under ISOLOAD_CHECK=1, never while a graph
is captured or a model is traced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isfinite
from numbers import Integral, Real
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from isoload.wording import nearest, not_one_of, shown

Made = TypeVar("Made")
# Policies, placers and predictions that were removed, with their replacements.
REMOVED = {
    "policy lp_affine": "policy lp_sampled with method affine, or policy lp",
    "policy grace_sampled": "policy grace",
    "placer graph": "placer eplb or scenario",
    "predict path": "predict linear",
}
_TYPES: dict[type, dict[str, tuple[Any, ...]]] = {}  # by class, read once


def make(kind: str, classes: Mapping[str, type[Made]], name: str, options: Mapping[str, Any]) -> Made:
    return _find(kind, classes, name, options)(**options)


def parse(kind: str, classes: Mapping[str, type[Made]], text: str) -> tuple[str, dict[str, Any]]:
    name, *pairs = text.split(":")
    texts: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{kind} must be written name:option=value, got {text!r}")
        if key in texts:
            raise ValueError(f"option {key} must be given once, got {text!r}")
        texts[key] = value
    types = types_of(_find(kind, classes, name, texts))
    for key, value in texts.items():
        _refuse_removed(classes[name], key, value)
    options = {key: _read(key, value, types[key]) for key, value in texts.items()}
    make(kind, classes, name, options)
    return name, options


def check_options(options: Any) -> None:
    """Raise ValueError for an option whose value is not of its type, before any batch uses it."""
    for name, types in types_of(type(options)).items():
        value = getattr(options, name)
        if not any(_is(value, kind) for kind in types):
            _refuse_removed(type(options), name, value)
            raise ValueError(f"{name} must be {_listed(types)}, got {value!r}{_nearest(value, types)}")
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


def _refuse_removed(cls: type, name: str, value: Any) -> None:
    """Raise ValueError for a value that an option had in an earlier version; names the replacement."""
    if use := getattr(cls, "removed", {}).get(f"{name}={value}"):
        raise ValueError(f"{name}={value} was removed: {use}")


def check_range(name: str, value: float | None, low: int, high: int, unit: str = "") -> None:
    """Raise ValueError for an option that is outside of low..high; None is an option that is not set."""
    if value is not None and not low <= value <= high:
        limit = "2^31-1" if high == 2**31 - 1 else high
        raise ValueError(f"{name} must be in {low}..{limit}{unit}, got {value}")


def types_of(cls: type) -> dict[str, tuple[Any, ...]]:
    """Return by option the types that it may have, or their values if it is a choice."""
    if cls not in _TYPES:
        hints = get_type_hints(cls)
        _TYPES[cls] = {f.name: get_args(hints[f.name]) or (hints[f.name],) for f in fields(cls)}
    return _TYPES[cls]


def refuse_removed(kind: str, name: str) -> None:
    """Raise ValueError for a name that an earlier version had; names the replacement."""
    if use := REMOVED.get(f"{kind} {name}"):
        raise ValueError(f"{kind} {name} was removed: use {use}")


def _find(kind: str, classes: Mapping[str, type[Made]], name: str, options: Mapping[str, Any]) -> type[Made]:
    if name not in classes:
        refuse_removed(kind, name)
        raise ValueError(not_one_of(kind, classes, name))
    known = types_of(classes[name])
    if unknown := [key for key in options if key not in known]:
        if use := getattr(classes[name], "removed", {}).get(unknown[0]):
            raise ValueError(f"option {unknown[0]} of {kind} {name} was removed: {use}")
        raise ValueError(not_one_of("option", known or ["(none)"], unknown[0], f" for {kind} {name}"))
    return classes[name]


def _read(name: str, text: str, types: tuple[Any, ...]) -> Any:
    words = {"True": True, "False": False, "None": None}
    if text in types or (text in words and type(words[text]) in types):
        return words.get(text, text)
    for kind in (int, float, str):
        try:
            if kind in types:
                return kind(text)
        except ValueError:
            continue
    raise ValueError(f"option {name} must be {_listed(types)}, got {text!r}{_nearest(text, types)}")


def _is(value: Any, kind: Any) -> bool:
    if not isinstance(kind, type):
        return bool(value == kind)  # one of a Literal's values
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _nearest(value: Any, types: tuple[Any, ...]) -> str:
    return nearest(value, [kind for kind in types if not isinstance(kind, type)])


def _listed(types: tuple[Any, ...]) -> str:
    if not isinstance(types[0], type):
        return f"one of {', '.join(map(str, types))}"
    return f"of type {', '.join('None' if kind is NoneType else kind.__name__ for kind in types)}"


def parse_layers(text: str, num_layers: int) -> list[int]:
    """Return positions of layers from a list of numbers and ranges: "0-3,7" -> [0, 1, 2, 3, 7]."""
    ends = [part.split("-") for part in text.replace(" ", "").split(",")]
    if not all(len(pair) <= 2 and all(map(str.isdecimal, pair)) for pair in ends):
        raise ValueError(f"layers must be numbers and ranges such as 0-3,7, got {shown(text)}")
    # Before a range is expanded, and before int() rejects too many digits.
    if any(len(end) > 9 or int(end) >= num_layers for pair in ends for end in pair):
        raise ValueError(f"layers must be some of 0..{num_layers - 1}, got {shown(text)}")
    layers = {layer: None for pair in ends for layer in range(int(pair[0]), int(pair[-1]) + 1)}
    if not layers or len(layers) < sum(int(pair[-1]) + 1 - int(pair[0]) for pair in ends):
        raise ValueError(f"layers must be distinct and at least one, got {shown(text)}")
    return list(layers)


def values_readable(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return False
    return tensor.device.type == "cpu" or os.environ.get("ISOLOAD_CHECK") == "1"


def parse_amount(name: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0, got {shown(text)}")
    return amount


def check_whole_number(name: str, value: object) -> None:
    """Raise ValueError unless a value is an integer on the host; a bool is not."""
    if isinstance(value, bool) or not isinstance(value, Integral | torch.SymInt):
        raise ValueError(f"{name} must be an integer, got {_named(value)}")


def check_whole(name: str, value: object) -> None:
    """Raise ValueError unless a value is an integer, or a tensor [] of one."""
    if not isinstance(value, Tensor):
        check_whole_number(name, value)
    elif value.dim() or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} must be an integer or a tensor [] of one, got {_named(value)}")


def _named(value: object) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)


def capturing(device: torch.device) -> bool:
    """Return whether the device's current stream is being captured in a CUDA graph: the host can read nothing then."""
    on_gpu = device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_initialized()
    return on_gpu and torch.cuda.is_current_stream_capturing()


def may_be_kept(tensor: Tensor) -> bool:
    """Return whether a cache may hold the tensor: tracing's FakeTensors must not outlive their mode."""
    return type(tensor) is Tensor


def put_on(device: torch.device, values: Sequence[int]) -> Tensor:
    """Return [len(values)] int64, copied from pinned memory: a copy from a list would make the host wait for a GPU."""
    on_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=on_cuda).to(device, non_blocking=on_cuda)
