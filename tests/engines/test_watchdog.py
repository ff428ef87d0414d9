"""The watchdog: a rebalance that stalls and a thread that ends are named, once; an engine without requests is not."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from isoload.engines.settings import Settings
from isoload.engines.vllm import MODELS, dispatch
from isoload.online import switch
from isoload.online.switch import Watchdog
from support.told_metrics import Told


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(switch.time, "monotonic", made.monotonic)
    return made


def told_by(watch: Watchdog) -> dict[str, float]:
    watch.metrics = told = Told()
    return told.values


def looked(watch: Watchdog, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    watch.look()
    return [record.getMessage() for record in caplog.records]


def watching(seconds: float = 60) -> Watchdog:
    """Without a thread: the test looks."""
    watch = Watchdog("engine", seconds)
    watch._thread = threading.current_thread()
    return watch


def test_one_that_comes_back_is_none(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    watch = watching()
    for _ in range(3):
        watch.enter()
        clock.now += 59
        assert looked(watch, caplog) == []
        watch.leave(pending=False)
        clock.now += 1000
        assert looked(watch, caplog) == []


def test_one_that_does_not_come_back_is_named_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    watch = watching()
    measured = told_by(watch)
    watch.enter()
    clock.now += 61
    (line,) = looked(watch, caplog)
    assert line == (
        "isoload engine: EPLB has stalled: no layer's experts have arrived for 61 s (passes: 1). "
        "Copies go where experts last arrived"
    )
    clock.now += 60
    assert looked(watch, caplog) == [] and measured["rebalance_stalled_seconds"] == 121
    watch.leave(pending=False)
    assert looked(watch, caplog) == [] and measured["rebalance_stalled_seconds"] == 0


def test_one_that_stays_pending_is_named_by_passes_and_seconds(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watching()
    for passes in range(6):
        assert looked(watch, caplog) == [], passes
        watch.enter()
        clock.now += 10
        watch.leave(pending=True)
    (line,) = looked(watch, caplog)
    assert "for 60 s (passes: 6)" in line
    watch.progressed()
    assert looked(watch, caplog) == []
    clock.now += 70
    watch.enter()
    watch.leave(pending=True)
    assert "for 70 s (passes: 1)" in looked(watch, caplog)[0], "another stall has another line"


def test_an_engine_without_requests_moves_nothing_and_stalls_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers move in passes alone; the first pass after a night still finds what was pending."""
    watch = watching()
    watch.enter()
    watch.leave(pending=True)
    clock.now += 10_000
    assert looked(watch, caplog) == []
    watch.enter()
    assert looked(watch, caplog) == []
    watch.progressed()
    watch.leave(pending=True)
    assert looked(watch, caplog) == []


def test_progress_inside_of_a_pass_counts(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    watch = watching()
    watch.enter()
    for _ in range(5):
        clock.now += 50
        watch.progressed()
        assert looked(watch, caplog) == []
    clock.now += 60
    assert len(looked(watch, caplog)) == 1


def test_rebalances_are_counted_and_timed_at_their_end(clock: Clock) -> None:
    """Over all of its passes; one that moves nothing, as every step of vLLM's without one, is none."""
    watch = watching()
    measured = told_by(watch)
    for moves in (1, 0, 2):
        for i in range(moves + 1):
            watch.enter()
            clock.now += 3
            if i < moves:
                watch.progressed()
            watch.leave(pending=i < moves)
            clock.now += 4
    assert measured == {"rebalances_total": 2, "rebalance_seconds": [10, 17]}


def killed() -> threading.Thread:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    return thread


def test_a_thread_that_has_ended_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch, stay = watching(), threading.Event()
    measured = told_by(watch)
    watch.worker = threading.Thread(target=stay.wait)
    watch.worker.start()
    assert looked(watch, caplog) == [] and measured["rebalance_thread_dead"] == 0
    stay.set()
    watch.worker.join()
    line = "isoload engine: EPLB's thread has ended: experts are not moved any more"
    assert looked(watch, caplog) == [line] and looked(watch, caplog) == []
    assert measured["rebalance_thread_dead"] == 1
    watch.worker = killed()
    assert looked(watch, caplog) == [line], "another"


def state(rebalanced: bool) -> Any:
    return SimpleNamespace(rebalanced=rebalanced)


@pytest.fixture
def models(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A vLLM process that is watched every 20 ms."""
    MODELS.start(Settings.read({"ISOLOAD_STALLED_SECONDS": "0.02"}))
    yield
    MODELS.start(Settings.read({}))


def wait_for(caplog: pytest.LogCaptureFixture, text: str) -> None:
    end = time.monotonic() + 20
    while text not in caplog.text:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.01)


def test_vllms_dead_thread_is_named_while_no_pass_runs(
    models: None, caplog: pytest.LogCaptureFixture
) -> None:
    """And what it left pending, as soon as passes find it."""
    vllm = SimpleNamespace(model_states={"model": state(False)}, async_worker=killed())
    dispatch.step(lambda *_, **__: None, vllm)
    wait_for(caplog, "isoload vLLM: EPLB's thread has ended")
    assert "stalled" not in caplog.text
    vllm.model_states["model"].rebalanced = True
    dispatch.step(lambda *_, **__: None, vllm)
    time.sleep(0.03)
    dispatch.step(lambda *_, **__: None, vllm)
    wait_for(caplog, "isoload vLLM: EPLB has stalled")


def test_vllms_step_that_does_not_return_is_named_from_outside(
    models: None, caplog: pytest.LogCaptureFixture
) -> None:
    """As where one rank is gone and the others wait for it."""
    vllm = SimpleNamespace(model_states={"model": state(False)})  # a synchronous one has no thread

    def original(*_: Any, **__: Any) -> None:
        wait_for(caplog, "isoload vLLM: EPLB has stalled")

    dispatch.step(original, vllm)
    assert caplog.text.count("stalled") == 1


def test_a_layer_that_arrives_is_progress(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    MODELS.start(Settings.read({}))
    MODELS.watch._thread = threading.current_thread()
    vllm = SimpleNamespace(model_states={"model": state(True)})
    for arrives in (True, True, False, False):
        assert looked(MODELS.watch, caplog) == []
        clock.now += 50

        def original(*_: Any, arrives: bool = arrives, **__: Any) -> None:
            if arrives:
                dispatch.on_layer_committed(lambda *_: None, state(True), None, 0)  # type: ignore[arg-type]

        dispatch.step(original, vllm)
    assert "for 100 s (passes: 2)" in looked(MODELS.watch, caplog)[0]
    MODELS.start(Settings.read({}))


def test_a_profiled_step_is_not_watched() -> None:
    MODELS.start(Settings.read({}))
    dispatch.step(lambda *_, **__: None, SimpleNamespace(model_states={}), is_profile=True)
    assert MODELS.watch._thread is None


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_its_thread_ends_with_it_and_0_has_none(seconds: float) -> None:
    watch = Watchdog("engine", seconds)
    watch.enter()
    thread = watch._thread
    assert (thread is not None) == bool(seconds)
    if thread is not None:
        assert thread.daemon
        del watch
        gc.collect()
        thread.join(20)
        assert not thread.is_alive()
