"""Two pipeline stages in processes of their own: unequal ranks, and several steps under way at once."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from engines import LONG, SHORT, Start
from harness import Ask, EngineError, in_process
from judge import TOLERANCE, apart, furthest, prompt
from models import make_checkpoint
from settings import CHUNK, connector, whole
from storage import objects, remove

from kvtier.codec.frame_header import read_head

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores: vLLM wants one for each worker"),
]

CORES = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers."""
    place = tmp_path_factory.mktemp("deep")
    in_process(make_checkpoint, "llama-deep", place)
    return place


def staged(partition: str = "", sabotage: str = "", **fields: object) -> dict[str, object]:
    """Arguments of an engine with two stages.

    Args:
        partition: layers of each stage, ``3,1``; empty: vLLM decides.
        sabotage: called in each worker.
        fields: further ones.
    """
    environment = {"VLLM_CPU_OMP_THREADS_BIND": CORES, "STAGE_SABOTAGE": sabotage}
    if partition:
        environment["VLLM_PP_LAYER_PARTITION"] = partition
    return {"pipeline_parallel_size": 2, "worker_extension_cls": "stages.Stage", "environment": environment, **fields}


def parts(directory: Path) -> set[tuple[int, int]]:
    """(first layer, end layer) of all objects."""
    found = [read_head(memoryview(path.read_bytes())).identity.part for path in objects(directory)]
    return {(part.first_layer, part.end_layer) for part in found}


@pytest.mark.vllm_core
def test_unequal_stages_store_restart_hit_and_miss_together(deep: Path, start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    one = start(deep, connector(directory))
    plain = one.ask(LONG)[0]
    one.close()
    assert parts(directory) == {(0, 4)}

    first = start(deep, connector(directory), **staged("3,1"))
    assert apart(first.ask(LONG)[0], plain) < TOLERANCE
    assert first.external_hits() == 0, "other shapes are misses"
    first.forget()
    assert apart(first.ask(LONG)[0], plain) < TOLERANCE
    assert first.external_hits() == whole(len(LONG))
    first.close()
    assert parts(directory) == {(0, 4), (0, 3), (3, 4)}

    # A chunk that only one stage has is no chunk: the last one loses its third.
    assert remove(directory, first_head=0, first_layer=3, depth=2) == 1
    second = start(deep, connector(directory), **staged("3,1"))
    assert apart(second.ask(LONG)[0], plain) < TOLERANCE
    assert second.external_hits() == 2 * CHUNK


def test_a_stage_with_the_part_of_the_other_one_would_show(deep: Path, start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    plain = start(deep, connector(directory), **staged()).ask_and_close(LONG)[0]
    assert parts(directory) == {(0, 2), (2, 4)}
    second = start(deep, connector(directory), **staged(sabotage="stages:swap"))
    assert apart(second.ask(LONG)[0], plain) > 100 * TOLERANCE
    assert second.external_hits() == whole(len(LONG))


def test_a_stage_may_lack_the_layers_of_a_vllm_group_but_not_of_a_rule(start: Start, tmp_path: Path) -> None:
    """vLLM has ten windows in groups of two, of which 7 layers of 12 take both of one group."""
    directory, model = tmp_path / "kv", tmp_path / "gemma3-deep"
    in_process(make_checkpoint, "gemma3-deep", model)
    first = start(model, connector(directory), **staged("7,5"))
    plain = first.ask(LONG)[0]
    first.ask(LONG)
    first.close()
    assert parts(directory) == {(0, 6), (6, 10), (0, 1), (1, 2)}, "windows and full attention are counted apart"
    second = start(model, connector(directory), **staged("7,5"))
    assert apart(second.ask(LONG)[0], plain) < TOLERANCE
    assert second.external_hits() == whole(len(LONG))
    second.close()
    with pytest.raises(
        EngineError, match=r"no layer with KV of the rule History.* each stage needs a layer of every kind"
    ):
        start("gemma3", connector(directory), **staged())


@pytest.mark.parametrize(
    ("partition", "sabotage", "reason", "logged"),
    [
        ("1,11", "", "no layer with KV of the kind", "no layer with KV of the kind"),
        ("11,1", "", "no layer with KV|rank 1 has failed to start; its own message", "no layer with KV of the kind"),
        ("", "stages:fail_late", "monitoredBarrier|no memory", "no memory"),
    ],
)
def test_a_stage_that_fails_stops_the_start_of_the_others(
    start: Start, tmp_path: Path, partition: str, sabotage: str, reason: str, logged: str
) -> None:
    """Also one that another stage waits for, which vLLM asks first and without a deadline."""
    model = tmp_path / "gemma3-deep"
    in_process(make_checkpoint, "gemma3-deep", model)
    with pytest.raises(EngineError, match=reason):
        start(model, connector(tmp_path / "kv"), **staged(partition, sabotage))
    assert logged in (tmp_path / "engine0.log").read_text(), "each stage that fails says why"


def test_a_chunk_that_counts_when_one_stage_has_it_would_show(deep: Path, start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    plain = start(deep, connector(directory), **staged("3,1")).ask_and_close(LONG)[0]
    assert remove(directory, first_head=0, first_layer=3, depth=2) == 1
    second = start(deep, connector(directory), **staged("3,1"), sabotage="stages:take_the_best")
    assert apart(second.ask(LONG)[0], plain) > 100 * TOLERANCE
    assert second.external_hits() == whole(len(LONG))


def test_several_steps_are_under_way_while_requests_are_aborted_and_preempted(
    deep: Path, start: Start, tmp_path: Path
) -> None:
    """Few blocks, small steps and slow copies: stores and loads overlap with steps of both stages."""
    prompts = [prompt(290 + 5 * number, number) for number in range(10)]
    asked = [Ask(it, count=100, at_step=2 * number) for number, it in enumerate(prompts)]
    asked += [Ask(it, at_step=3 + number, abort_at_step=6 + 2 * number) for number, it in enumerate(prompts[:3])]
    small = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 90, "block_size": 32, "max_model_len": 2048}
    plain = start(deep, None, **staged("3,1", **small))
    wanted = plain.ask_in_turn(*prompts, count=100)
    plain.close()
    engine = start(deep, connector(tmp_path / "kv"), **staged("3,1", "sabotage:slow_copies", **small))
    for _ in range(3):
        found = engine.ask(*asked)
        assert furthest(found[: len(prompts)], wanted) < TOLERANCE
        engine.forget()
    assert engine.external_hits() > 4 * CHUNK
    assert engine.metrics()["vllm:num_preemptions"] > 0
    engine.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_stops_or_dies_in_a_store_and_in_a_load(
    deep: Path, start: Start, tmp_path: Path, stage: int
) -> None:
    directory = tmp_path / "kv"
    slow = staged("3,1", "sabotage:slow_copies")

    first = start(deep, connector(directory), **slow)
    pid = first.do("stages:worker_of", stage)
    plain = first.ask(SHORT)[0]

    def stop_and_go(after_s: float) -> threading.Thread:
        def act() -> None:
            time.sleep(after_s)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=act)
        thread.start()
        return thread

    thread = stop_and_go(0.1)
    wanted = first.ask(LONG)[0]  # its stores begin with its first step
    thread.join()
    first.forget()
    thread = stop_and_go(0.02)
    assert apart(first.ask(LONG)[0], wanted) < TOLERANCE
    thread.join()
    assert first.external_hits() == whole(len(LONG))
    first.forget()

    # A dead worker ends vLLM's engine. What it leaves behind is right.
    threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(EngineError):
        first.ask(prompt(1400, 9), LONG, SHORT, count=200)
    first.kill()
    second = start(deep, connector(directory), **staged("3,1"))
    assert apart(second.ask(LONG)[0], wanted) < TOLERANCE
    assert apart(second.ask(SHORT)[0], plain) < TOLERANCE
    assert second.external_hits() >= CHUNK
