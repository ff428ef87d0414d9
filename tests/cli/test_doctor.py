"""Doctor: every item says on or off and why, whatever the machine has."""

import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isoload import kernels
from isoload.cli import doctor, engines
from isoload.cli.app import app
from isoload.engines.settings import PLACEMENT, SGLANG, VLLM
from isoload.transport import collective, deep_ep
from support import measured_times

NAMES = [
    "python", "torch", "isoload ops", "isoload CUDA ops", "CUDA device", "symmetric memory", "nvcc", "NCCL",
    "Triton", "Triton kernels", "DeepEP", "SGLang", "vLLM", "transformers", "Megatron-Core", "torchtitan",
    "SGLang versions", "vLLM versions", "transformers versions", "Megatron-Core versions", "torchtitan versions",
    "HiGHS (scipy)", "break-even",
]  # fmt: skip


@pytest.fixture(autouse=True)
def engines_are_not_asked(request, monkeypatch):
    """Each takes a process and seconds."""
    if request.node.name != "test_transformers_takes_isoload_here":
        monkeypatch.setattr(engines, "is_here", lambda module: False)


def item(name):
    return next(item for item in doctor.report() if item.name == name)


def test_report_on_this_machine():
    items = doctor.report()
    assert [item.name for item in items] == NAMES
    assert all(type(item.on) is bool and item.detail for item in items)
    assert all(item.on for item in items if item.name in ("python", "torch", "isoload ops", "HiGHS (scipy)"))
    assert item("CUDA device").on == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("version", "why"), [(None, "is built without CUDA"), ("13.0", "finds no device or driver")]
)
def test_why_there_is_no_device(monkeypatch, version, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    assert not item("CUDA device").on and why in item("CUDA device").detail


def test_a_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"card {i}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 << 30, 80 << 30))
    monkeypatch.setattr(collective, "gpu_of", str)
    monkeypatch.setattr(collective, "fabric_of", {"cuda:0": None, "cuda:1": "abc"}.get)
    monkeypatch.setattr(collective, "host_of", lambda: ("node7", "boot"))
    assert item("CUDA device") == doctor.Item(
        "CUDA device", True, "card 0, card 1; 30 of 80 GiB free on the first"
    )
    found = "host node7, NVLink fabric domain abc: borrow='pull' is tried where all ranks have the host or the domain"
    assert item("symmetric memory") == doctor.Item("symmetric memory", True, f"{found} in common")


def test_no_nvcc(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: None)
    assert not item("nvcc").on and "neither in CUDA_HOME, nor on PATH" in item("nvcc").detail


def test_nvcc_of_cuda_home(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path: f"{path.split(':')[0]}/{name}")
    said = subprocess.CompletedProcess([], 0, stdout="Cuda compilation tools, release 12.8, V12.8.93")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: said)
    assert item("nvcc") == doctor.Item("nvcc", True, "CUDA 12.8, /opt/cuda/bin/nvcc")


def test_an_nvcc_that_does_not_run_is_off(monkeypatch):
    def broken(*_, **__):
        raise subprocess.CalledProcessError(1, "nvcc")

    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: "/bin/nvcc")
    monkeypatch.setattr(doctor.subprocess, "run", broken)
    assert not item("nvcc").on and "/bin/nvcc does not run" in item("nvcc").detail


def test_missing_packages_say_how_to_get_them(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(deep_ep, "installed", list)
    for name, extra in (("Triton", "triton"), ("DeepEP", "deepep"), ("HiGHS (scipy)", "plan")):
        assert not item(name).on and f"pip install 'isoload[{extra}]'" in item(name).detail


def test_deep_ep_says_what_it_can_do(monkeypatch):
    new = deep_ep.Package("deep_ep_v25", "sgl-deep-ep-v25", "0.1.0rc0", ("EPBuffer",), True)
    old = deep_ep.Package("deep_ep", "sgl-deep-ep", "0.1.2", ("ElasticBuffer", "Buffer"), False)
    can = (
        "sgl-deep-ep-v25 0.1.0rc0: EPBuffer by DeepEPTransport, borrows (borrow='deep_ep'); "
        "sgl-deep-ep 0.1.2: ElasticBuffer, Buffer by DeepEPTransport, low latency"
    )
    monkeypatch.setattr(deep_ep, "installed", lambda: [new, old])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert item("DeepEP") == doctor.Item("DeepEP", False, f"{can}; needs a GPU, and torch finds none")
    monkeypatch.setattr(doctor, "_cuda_device", lambda: (True, "a card"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert item("DeepEP") == doctor.Item("DeepEP", True, can)
    monkeypatch.setattr(
        deep_ep, "installed", lambda: [deep_ep.Package("deep_ep", "deep-ep", "1.0.0", (), False)]
    )
    assert not item("DeepEP").on and "deep_ep is installed but not DeepSeek's" in item("DeepEP").detail


def test_triton_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "why_not", lambda: None)
    assert item("Triton kernels") == doctor.Item("Triton kernels", True, "permutation and activation of rows")
    monkeypatch.setattr(kernels, "why_not", lambda: "there is no device")
    detail = "plain torch computes: there is no device"
    assert item("Triton kernels") == doctor.Item("Triton kernels", False, detail)


def test_collectives_without_nccl(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert not item("NCCL").on and item("NCCL").detail.startswith("torch is built without NCCL")


def test_break_even():
    assert item("break-even").detail.startswith(
        "borrowing an expert pays from 749 tokens inside a node (400 GB/s)"
    )


def test_versions_of_an_engine_are_those_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
    for engine in engines.ENGINES:
        rows = [
            row.strip("| ").split(" | ")
            for row in page.splitlines()
            if row.startswith(f"| {engine.name} | `")
        ]
        said = item(f"{engine.name} versions").detail
        assert rows and len(said.split("; ")) >= len(rows)
        for _, hook, versions, *reasons in rows:
            assert f"{hook.strip('`')}: {versions}" in said
            assert all(part.replace("`", "") in said for cell in reasons for part in cell.split("; ") if part)


# numpy stands for an engine: it is here, and quick to ask.
def ask(monkeypatch, probe="", *, group="sglang.srt.plugins", switch=SGLANG, **environ):
    engine = engines.Engine("Engine", "numpy", probe, "all well", switch, group, "PLUGINS")
    monkeypatch.setattr(engines, "is_here", lambda module: True)
    return engines.look(engine, {"PATH": "", **environ})


@pytest.mark.parametrize(
    ("environ", "probe", "on", "said"),
    [
        ({}, "", False, ": all well; attaches with ISOLOAD_SGLANG=1"),
        ({"ISOLOAD_SGLANG": "0"}, "", False, ": all well; attaches with ISOLOAD_SGLANG=1"),
        ({"ISOLOAD_SGLANG": "1"}, "print('noise')", True, ": all well; attaches, policy exact, placer eplb"),
        (
            {"ISOLOAD_SGLANG": "1", "ISOLOAD_POLICY": "joint", "ISOLOAD_PLACER": "scenario"},
            "",
            True,
            "attaches, policy joint, placer scenario",
        ),
        (
            {"ISOLOAD_SGLANG": "1", "ISOLOAD_MODE": "shadow"},
            "",
            True,
            ": all well; counts in shadow mode, changes nothing",
        ),
        (
            {"ISOLOAD_SGLANG": "1"},
            "print('isoload: f has no x'); print('isoload: g is gone')",
            False,
            ", and isoload does not attach: f has no x; g is gone",
        ),
        (
            {"ISOLOAD_SGLANG": "1"},
            "raise ValueError('ISOLOAD_POLICY: no such')",
            False,
            ", and isoload does not attach: ISOLOAD_POLICY: no such",
        ),
        (
            {"ISOLOAD_SGLANG": "1"},
            "import cloudpickle_that_is_missing",
            False,
            ", and isoload does not attach: importing numpy failed: No module named 'cloudpickle_that_is_missing'",
        ),
        (
            {"ISOLOAD_SGLANG": "1", "PLUGINS": "a,b"},
            "",
            False,
            "isoload does not attach: PLUGINS lists other plug-ins only, got 'a,b'",
        ),
        ({"PLUGINS": "a,isoload"}, "", False, "attaches with ISOLOAD_SGLANG=1"),
    ],
)
def test_an_engine_and_what_would_attach(monkeypatch, environ, probe, on, said):
    found = ask(monkeypatch, probe, **environ)
    assert found[0] == on and found[1].startswith("numpy ") and found[1].endswith(said), found
    assert found[2] == (environ.get("ISOLOAD_SGLANG") == "1")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "attaches with ISOLOAD_VLLM=1"),
        (
            {"ISOLOAD_PLACEMENT": "p.json"},
            "all well; starts from p.json; chooses replicas with ISOLOAD_VLLM=1",
        ),
        (
            {"ISOLOAD_PLACEMENT": "p.json", "ISOLOAD_VLLM": "1"},
            "policy exact, placer eplb; starts from p.json",
        ),
    ],
)
def test_an_engine_that_starts_from_a_file_is_asked_for(monkeypatch, environ, said):
    engine = engines.Engine("Engine", "numpy", "", "all well", VLLM, "", "PLUGINS", PLACEMENT)
    monkeypatch.setattr(engines, "is_here", lambda module: True)
    on, detail, asked = engines.look(engine, {"PATH": "", **environ})
    assert detail.endswith(said) and on == asked == ("ISOLOAD_PLACEMENT" in environ)


def test_an_engine_that_is_switched_off_is_not_asked_for(monkeypatch):
    found = ask(monkeypatch, "", ISOLOAD_SGLANG="1", ISOLOAD_MODE="off")
    assert found[::2] == (False, False) and found[1].endswith(
        ": all well; ISOLOAD_MODE=off attaches to nothing"
    )


def test_an_engine_that_finds_no_entry_point_or_needs_none(monkeypatch):
    assert "does not see its entry point" in ask(monkeypatch, group="no.such.group")[1]
    assert ask(monkeypatch, group="", switch=None)[::2] == (True, False)


@pytest.mark.parametrize(("value", "code"), [("", 0), ("0", 0), ("1", 1)])
def test_exit_code_1_where_an_engine_that_is_asked_for_stays_without(monkeypatch, value, code):
    """No engine is here."""
    done = CliRunner().invoke(app, ["doctor"], env={"ISOLOAD_VLLM": value})
    assert done.exit_code == code and "vLLM                    off  not installed" in done.stdout


@pytest.mark.slow
def test_transformers_takes_isoload_here():
    """The real one: what it says is what tests/engines/test_huggingface.py does."""
    pytest.importorskip("transformers")
    found = item("transformers")
    assert found.on and "ep_implementation='isoload'" in found.detail


def test_a_times_file_is_described(tmp_path: Path) -> None:
    path = measured_times.written(tmp_path / "times.json", gpus=["a", "b", "c", "d"])
    items = {item.name: item.detail for item in doctor.file_items([path])}
    assert items == {
        "times": "GPU, 4 ranks on 1 nodes, measured on an unknown date",
        "experts": "64 x 32 bfloat16, isoload",
        "speeds": "the fastest rank's experts are 10.0 % faster than the slowest's",
        "GPUs": "a, b, c, d",
    }
    even = measured_times.written(tmp_path / "even.json", speeds=[1.0, 1.009, 1.0, 1.0])
    items = {item.name: item.detail for item in doctor.file_items([even])}
    assert items["speeds"].endswith(
        "0.9 % faster than the slowest's: less than 1 %, so that engines and place ignore it"
    )
    old = measured_times.written(tmp_path / "old.json", version=0)
    with pytest.raises(ValueError, match="has version 0, and this isoload reads version 1"):
        doctor.file_items([old])
