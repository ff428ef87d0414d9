"""bench/serving without SGLang: command lines, and cells that run against a small server in the engine's place."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.judge import even_imbalance

sys.path.append(str(Path(__file__).parents[2] / "bench"))
sys.path.append(str(Path(__file__).parents[2] / "bench" / "serving"))
import matrix
import rates
import rectangle
import runner

BENCH = Path(__file__).parents[2] / "bench"

ENGINE = """
import http.server, os, socketserver, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
own = {name: value for name, value in os.environ.items() if name.startswith("ISOLOAD_")}
print("variables", own, flush=True)
if "--worker" in sys.argv:
    print("worker", subprocess.Popen(["sleep", "600"]).pid, flush=True)
if "--die" in sys.argv:
    sys.exit("out of memory")
if own and "lp" in sys.argv:
    print("isoload: attached to SGLang's --ep-dispatch-algorithm lp (all), exact and joint on 2", flush=True)
elif "--enable-waterfill" in sys.argv and "--dense" not in sys.argv:
    print("isoload: attached to SGLang's --enable-waterfill, policy waterfill on 2" if own
          else "Prepared 2 Waterfill TopK modules.", flush=True)
class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/dump_expert_distribution_record" and "--dense" not in sys.argv:
            folder = os.environ["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"]
            os.makedirs(folder, exist_ok=True)
            open(os.path.join(folder, "counts.pt"), "w").write("counts")
        self.send_response(200), self.end_headers()
    do_POST = do_GET
socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("127.0.0.1", port), Server).serve_forever()
"""
GENERATOR = """
import json, sys
value = lambda name: sys.argv[sys.argv.index(name) + 1]
lost = int(value("--lose"))
figures = dict.fromkeys(FIGURES, float(value("--seed")))
figures |= {"completed": int(value("--num-prompts")) - lost}
figures |= {"server_info": {"max_total_num_tokens": 7, "version": "0.5"}}
open(value("--output-file"), "a").write(json.dumps(figures) + "\\n")
"""
SMALL = ["--batch", "4", "--concurrency", "2", "--rounds", "2"]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs matrix.py with options on stand-ins: (exit status, rows by cell). The user's own variables are set."""
    monkeypatch.setenv("ISOLOAD_SGLANG", "1")
    monkeypatch.setattr(runner, "STOP_SECONDS", 10)
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "generator.py").write_text(f"FIGURES = {runner.FIGURES}\n{GENERATOR}")

    def call(*options: str, lose: int = 0) -> tuple[int, dict[str, Any]]:
        python, folder = sys.executable, str(tmp_path)
        stand_ins = ["--launcher", f"{python} {folder}/engine.py"]
        stand_ins += ["--generator", f"{python} {folder}/generator.py --lose {lose}", "--limit", "60"]
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = str(taken.getsockname()[1])
        places = ["--results", folder, "--work", f"{folder}/work", "--port", port]
        monkeypatch.setattr(sys, "argv", ["matrix.py", *SMALL, *stand_ins, *places, *options])
        status = matrix.main()
        rows = [json.loads(line) for line in (tmp_path / "serving_matrix.jsonl").read_text().splitlines()]
        assert len({row["cell"] for row in rows}) == len(rows)
        return status, {row["cell"]: row for row in rows}

    return call


def printed(script: Any, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """The lines of a dry run, of `python`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", "--dry-run", "--work", "w", *options])
        assert script.main() == 0
    return capsys.readouterr().out.replace(sys.executable, "python").replace(f"{BENCH}/", "").splitlines()


ENGINE_LINE = (
    "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-{} --tp-size 8 --dp-size 8 --ep-size 8 "
    "--enable-dp-attention --moe-a2a-backend deepep --trust-remote-code --host 127.0.0.1 --port 30000"
)
LOAD_LINE = (
    "python -m sglang.bench_serving --host 127.0.0.1 --port 30000 --model deepseek-ai/DeepSeek-{} --num-prompts {} "
    "--flush-cache --disable-tqdm --output-file w/{}.jsonl --backend sglang --dataset-name random-ids "
    "--tokenize-prompt --random-range-ratio 1 --random-input-len {} --random-output-len {} --seed {} --request-rate {}"
)


def test_the_matrix_prints_what_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(matrix, capsys)
    systems = ["stock", "fused", "waterfill", "lplb", "both", "isoload"]
    names = [f"{placement}/{system}" for placement in ("red0", "red16", "red32") for system in systems]
    names = ["record", "none/stock", "none/fused", "none/waterfill", "none/isoload", *names]
    assert [line for line in lines if line.startswith("#")] == [f"# {name}" for name in names]
    placed = "--init-expert-location w/expert_counts.pt --ep-num-redundant-experts 32"
    both, on = "--ep-dispatch-algorithm lp --enable-waterfill", "ISOLOAD_SGLANG=1 ISOLOAD_STRICT=1"
    start = f"{ENGINE_LINE.format('V3')} --deepep-mode normal"
    loads = [("warm-up_0", 2), ("warm-up_1", 3), *((f"round_{i}", 4 + i) for i in range(4))]

    def cell(name: str, launch: str) -> list[str]:
        file, shape = name.replace("/", "_"), "inf --max-concurrency 256"
        return [f"# {name}", launch] + [
            LOAD_LINE.format("V3", 1000, f"{file}.{load}", 512, 1, seed, shape) for load, seed in loads
        ]

    expected = cell("red32/both", f"{start} {placed} {both}") + cell(
        "red32/isoload", f"{on} {start} {placed} {both}"
    )
    assert lines[-16:] == expected
    at = lines.index("# none/stock")
    assert lines[at : at + 8] == cell("none/stock", start)
    at = lines.index("# red0/fused")
    assert lines[at + 1].endswith("--ep-num-redundant-experts 0 --enforce-shared-experts-fusion")
    record = "--expert-distribution-recorder-mode stat --expert-distribution-recorder-buffer-size -1"
    where = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=w/recorded"
    assert lines[1] == f"{where} {ENGINE_LINE.format('V3')} {record} --deepep-mode normal"


def test_two_nodes_are_in_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ("--gpus", "16", "--nnodes", "2", "--dist-init-addr", "10.0.0.1:5000")
    for rank in ("0", "1"):
        lines = printed(matrix, capsys, *nodes, "--node-rank", rank, "--only", "none/stock")
        assert (
            f"--nnodes 2 --node-rank {rank} --dist-init-addr 10.0.0.1:5000" in lines[1]
            and "--tp-size 16" in lines[1]
        )
    for words, message in (
        (["--nnodes", "2"], "--dist-init-addr must be HOST:PORT of node 0 with --nnodes above 1"),
        (["--node-rank", "1"], "--node-rank above 0 needs --dry-run"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["script", *words])
            with pytest.raises(SystemExit, match=message):
                matrix.main()


def test_a_trimmed_mean_leaves_out_the_fastest_and_the_slowest() -> None:
    assert matrix.trimmed([4.0, 1.0, 9.0, 2.0]) == 3.0 and matrix.trimmed([1.0, 3.0]) == 2.0


def test_rates_print_what_they_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(rates, capsys, "--rates", "4", "0.5", "--only", "base", "craft8", "isoload")

    def cell(name: str, redundant: int, file: str, more: str = "", variables: str = "") -> list[str]:
        mixed = "--enable-mixed-chunk --chunked-prefill-size 32768 --max-running-requests 1024"
        mixed += " --cuda-graph-max-bs-decode 128"
        placed = f"--init-expert-location w/{file} --ep-num-redundant-experts {redundant}"
        loads = [("warm-up", 60, 2, 0.5), ("rate_0.5", 60, 3, 0.5), ("rate_4", 480, 3, 4)]
        return [f"{variables}{ENGINE_LINE.format('R1')} {mixed} {placed}{more}"] + [
            LOAD_LINE.format("R1", prompts, f"{name}.{load}", 4096, 256, seed, rate)
            for load, prompts, seed, rate in loads
        ]

    make = "python serving/rectangle.py w/expert_counts.pt --ranks 8 --replicas 8 --output w/craft8.json"
    own, on = " --ep-dispatch-algorithm dynamic", "ISOLOAD_SGLANG=1 ISOLOAD_STRICT=1 "
    assert lines == [
        *("# base", *cell("base", 0, "expert_counts.pt")),
        *("# craft8", make, *cell("craft8", 8, "craft8.json")),
        *("# isoload", *cell("isoload", 8, "expert_counts.pt", own, on)),
    ]


def test_prompts_of_a_file_are_chat_requests(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(matrix, capsys, "--prompts", "p.jsonl", "--only", "none/stock")
    chat = "--backend sglang-oai-chat --dataset-name openai --dataset-path p.jsonl --sharegpt-output-len 1"
    assert all(chat in line and "random" not in line for line in lines[2:])


@pytest.mark.slow
def test_cells_leave_rows_and_a_picture(serve: Any, tmp_path: Path) -> None:
    status, rows = serve("--only", "record", "none/stock", "red0/isoload", "--engine-args=--worker")
    assert status == 0 and list(rows) == ["record", "none/stock", "red0/isoload"]
    for row in rows.values():
        assert (row["error"], row["cache_tokens"], row["sglang"]) == (None, 7, "0.5") and row[
            "seconds_to_start"
        ]
        assert "engine.py --model-path deepseek-ai/DeepSeek-V3" in row["launch"] and row["gpus"] == 8
        assert {"device", "torch", "commit", "date"} <= row.keys()
    row = rows["red0/isoload"]
    assert [of["total_throughput"] for of in row["loads"]] == [4.0, 5.0], (
        "the warm-ups, of seeds 2 and 3, are not kept"
    )
    assert all("generator.py" in of["command"] for of in row["loads"])
    assert (tmp_path / "work" / "expert_counts.pt").read_text() == "counts"
    said = {name: (tmp_path / "work" / f"{name}.log").read_text() for name in ("none_stock", "red0_isoload")}
    assert "variables {}" in said["none_stock"], "stock, though the user has set ISOLOAD_SGLANG"
    assert "'ISOLOAD_STRICT': '1'" in said["red0_isoload"]
    for text in said.values():
        assert not Path("/proc", re.search(r"worker (\d+)", text)[1], "exe").exists(), "a process is left"
    picture = (tmp_path / "serving_matrix.svg").read_text()
    assert all(word in picture for word in ("red0", "isoload", "none", "stock", "+0.0 %", "4 tokens/s"))


def test_other_cells_keep_their_rows(serve: Any) -> None:
    _, first = serve("--only", "none/*")
    status, second = serve("--only", "none/stock", "--engine-args=--die")
    assert status == 1 and list(second) == ["none/fused", "none/waterfill", "none/isoload", "none/stock"]
    assert second["none/isoload"] == first["none/isoload"]
    error = second["none/stock"]["error"]
    assert "the engine ended with status 1" in error and "out of memory" in error
    status, third = serve("--only", "none/*", "--resume")
    assert status == 0 and third["none/isoload"] == first["none/isoload"]
    assert third["none/stock"]["error"] is None, "the cell that had failed ran again"


def test_a_cell_that_fails_says_why(serve: Any) -> None:
    status, rows = serve("--only", "red0/stock", "none/*", "--engine-args=--dense", lose=1)
    assert status == 1
    assert "expert_counts.pt is not there: cell record makes it" in rows["red0/stock"]["error"]
    says = (
        "the engine's log must have a line with isoload: attached to SGLang's --enable-waterfill ... policy"
    )
    assert says in rows["none/isoload"]["error"]
    assert "must have a line with Waterfill TopK modules: " in rows["none/waterfill"]["error"]
    assert rows["none/stock"]["error"].endswith("warm-up 0: 3 of 4 requests completed")
    status, rows = serve("--only", "record", "--engine-args=--dense")
    assert status == 1 and "the engine must record one file, got 0 in" in rows["record"]["error"]
    status, rows = serve("--only", "none/stock", "--generator", "false")
    assert status == 1 and "status 1 of false" in rows["none/stock"]["error"]
    status, rows = serve("--only", "none/stock", "--launcher", "no-such-program")
    assert status == 1 and "FileNotFoundError" in rows["none/stock"]["error"]


def test_a_port_that_is_taken_is_refused(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "healthy", lambda asked: True)
    status, rows = serve("--only", "none/stock")
    assert status == 1 and "--port must be free, got" in rows["none/stock"]["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "red8/*"], r"--only must name cells of record, .*, got 'red8/\*'"),
        (
            ["--prompts", "a", "--record-prompts", "a"],
            "--record-prompts must be another file than --prompts, got a",
        ),
    ],
)
def test_what_cannot_run_is_refused(serve: Any, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve(*options)


def test_rates_must_be_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rates.py", "--dry-run", "--rates", "1", "0"])
    with pytest.raises(ValueError, match="--rates must be above 0, got 0"):
        rates.main()


def test_the_curve_has_a_line_for_each_placement() -> None:
    loads = [{"request_throughput": float(x), "mean_ttft_ms": 1e3 * x * x} for x in (1, 2, 4)]
    rows = [{"placement": name, "loads": loads} for name in ("base", "craft8")]
    drawn = rates.draw([{"cell": "record", "loads": loads}, *rows])
    assert drawn.count("<path") == 2 and drawn.count('r="3"') == 6 and "craft8" in drawn
    assert "L310.0 235.0L560.0 40.0" in drawn, "two of four requests, four of sixteen seconds"
    assert "<svg" in rates.draw([]) and "<svg" in matrix.draw([])


def test_the_rectangle_has_crafts_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    counts = generator.integers(1, 1000, (5, 6, 16)) ** 2 // 1000
    torch.save({"logical_count": torch.from_numpy(counts)}, tmp_path / "counts.pt")
    out = tmp_path / "craft.json"
    words = ["rectangle.py", str(tmp_path / "counts.pt"), "--ranks", "4", "--replicas", "2", "-o", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    rectangle.main()
    loaded = isoload.read_placement(out, isoload.Topology(4))
    trace = isoload.read_trace(tmp_path / "counts.pt")
    craft = isoload.place(trace, isoload.Topology(4), 5, placer="craft", replicas=2)
    assert (craft.arrays[0] < 0).any() and loaded.slots_per_rank == 5 and (loaded.arrays[0] >= 0).all()
    kept = craft.arrays[0] >= 0
    assert (loaded.arrays[0][kept] == craft.arrays[0][kept]).all()
    np.testing.assert_allclose(even_imbalance(loaded, counts), even_imbalance(craft, counts))


def test_a_rank_without_single_experts_has_no_rectangle() -> None:
    ragged = isoload.Placement(torch.tensor([[0, 1, 0, -1]]), isoload.Topology(2), 2)
    with pytest.raises(
        ValueError, match="replicas must leave 1 experts with one copy on rank 1 of layer 0, got 0"
    ):
        rectangle.rectangle(ragged)
