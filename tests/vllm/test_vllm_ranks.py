"""Two workers in processes of their own (tensor parallelism): a chunk counts only when both have it."""

import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import ARGUMENTS, LONG, Expected, Start
from harness import ANSWER_S, START_S, Engine, EngineError, in_process
from judge import TOLERANCE, apart, prompt
from models import make_checkpoint
from sabotage import FLAG, IN_WORKERS
from settings import CHUNK, connector, whole
from storage import corrupt, heads, remove
from tests.waiting import wait_until

from kvtier.connect.engine_metrics import INTERVAL_S

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores: vLLM wants one for each worker"),
]

# A core for each worker: two on one core wait for each other most of the time.
CORES = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
TWO = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": CORES}}


@pytest.mark.vllm_core
def test_two_ranks_store_restart_hit_and_miss_together(start: Start, expected: Expected, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    start("llama", connector(directory)).ask_and_close(LONG)

    first = start("llama", connector(directory), **TWO)
    plain = first.ask(LONG)[0]
    assert first.external_hits() == 0, "what one worker has stored for itself is of no use to two"
    assert apart(plain, expected("llama")["long"]) < TOLERANCE
    first.forget()
    warm = first.ask(LONG)[0]
    assert first.external_hits() == whole(len(LONG))
    assert apart(warm, plain) < TOLERANCE
    first.close()
    assert {first_head for _, first_head, _ in heads(directory)} == {0, 1}

    # A chunk that only one rank has is no chunk: rank 1 loses its third.
    assert remove(directory, first_head=1, depth=2) == 1
    second = start("llama", connector(directory), **TWO)
    disk = second.ask(LONG)[0]
    assert second.external_hits() == 2 * CHUNK
    assert apart(disk, plain) < TOLERANCE
    second.close()

    # The control: numbers of other tokens would show.
    assert corrupt(directory)
    third = start("llama", connector(directory), **TWO)
    assert apart(third.ask(LONG)[0], plain) > 100 * TOLERANCE
    assert third.external_hits() == whole(len(LONG)), "the second engine has completed what was missing"


@pytest.mark.vllm_core
def test_weights_that_change_when_a_worker_has_loaded_them_name_no_kv(
    start: Start, checkpoints: Path, tmp_path: Path
) -> None:
    model, directory, log = tmp_path / "model", tmp_path / "kv", tmp_path / "engine0.log"
    shutil.copytree(checkpoints / "llama", model)
    weights = model / "model.safetensors"
    shutil.copy(weights, tmp_path / "other")

    def replace() -> None:
        wait_until(lambda: log.exists() and "Loading weights took" in log.read_text("utf-8"), "the load", START_S)
        (tmp_path / "other").replace(weights)

    thread = threading.Thread(target=replace)
    thread.start()
    engine = start(model, connector(directory), **TWO)
    thread.join()
    engine.ask(LONG)
    engine.forget()
    assert engine.hits_of(LONG) == whole(len(LONG)), "both workers have the same private identity"
    engine.close()
    assert engine.private() == [f"KV is kept in host memory only: {weights} changed while the engine started"]
    assert not heads(directory)


ROW = {"deepseek": 3 * 576 * 4, "llama-mqa": 3 * 2 * 32 * 4}
"""Bytes of a token on each rank."""


@pytest.mark.parametrize("model", ["deepseek", "llama-mqa"])
def test_kv_that_both_ranks_hold_is_kept_and_stored_once(model: str, start: Start, tmp_path: Path) -> None:
    directory, place, flag = tmp_path / "kv", tmp_path / model, tmp_path / "hold"
    in_process(make_checkpoint, model, place)
    host_bytes = 5.5 * CHUNK * ROW[model]
    small = connector(directory, host__capacity_bytes=int(max(host_bytes, 1 << 20)))
    options = TWO | ARGUMENTS.get(model, {})
    held = {"environment": TWO["environment"] | {FLAG: str(flag), IN_WORKERS: "hold_scatters"}}
    first = start(place, small, **options | held, worker_extension_cls="sabotage.InWorkers")
    plain = first.ask(LONG)[0]
    stored = len(LONG) // CHUNK
    wait_until(lambda: len(heads(directory)) == stored, "the writes")
    assert {(group, first_head) for group, first_head, _ in heads(directory)} == {(0, 0)}
    first.forget()
    warm = first.ask(LONG)[0]
    assert first.external_hits() == whole(len(LONG)), "two copies of these chunks would not fit in host memory"
    assert promoted(first) == 0
    assert apart(warm, plain) < TOLERANCE

    # A worker dies in the middle of a load, and the engine with it.
    first.forget()
    flag.touch()
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(first.ask, LONG)
        wait_until(lambda: flag.with_suffix(".held").exists() or failing.done(), "the load", ANSWER_S)
        os.kill(int(flag.with_suffix(".held").read_text()), signal.SIGKILL)
        with pytest.raises(EngineError):
            failing.result()
    first.kill()
    flag.unlink()

    second = start(place, small, **options)
    disk = second.ask(LONG)[0]
    assert second.external_hits() == whole(len(LONG), second.chunk_tokens)
    assert promoted(second) == stored
    assert apart(disk, plain) < TOLERANCE
    second.close()

    # The control: numbers of other tokens would show.
    assert corrupt(directory)
    third = start(place, small, **options)
    assert apart(third.ask(LONG)[0], plain) > 100 * TOLERANCE


def promoted(engine: Engine) -> float:
    """Objects that have come from a tier."""
    time.sleep(2 * INTERVAL_S)
    engine.ask(prompt(20, 9))  # counts travel with steps
    name = "vllm:kvtier_transfers{link=promote,outcome=done"
    return sum(value for found, value in engine.metrics().items() if found.startswith(name))
