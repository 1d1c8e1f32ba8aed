"""The connector fits the interface of the vLLM that runs it: every hook is called, with its arguments."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Start
from harness import EngineError, in_process
from settings import connector

pytestmark = [pytest.mark.engine, pytest.mark.vllm_core]


UNKNOWN_CHANGES = frozenset({
    # They change the model or its settings, and nobody says when it is complete.
    "apply_model", "update_config", "elastic_ep_execute", "checkpoint_prepare", "checkpoint_restore", "load_model",
    # At the start only.
    "init_device", "initialize_from_config", "compile_or_warm_up_model", "determine_available_memory",
    "set_kv_cache_layout", "update_max_model_len", "handle_ft_command",
    # Within a worker.
    "annotate_profile", "get_model", "get_draft_model",
})  # fmt: skip
"""Methods of vLLM's workers that stop kvtier until a cache reset."""


CODE_NAMES = ("co_names", "co_varnames", "co_cellvars")


def check() -> None:
    """Runs where vLLM is imported: every hook is one of vLLM's."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from kvtier.connect.vllm import KvtierConnector

    assert issubclass(KvtierConnector, KVConnectorBase_V1)
    assert issubclass(KvtierConnector, SupportsHMA)
    assert not inspect.isabstract(KvtierConnector)
    ours = {name for name in vars(KvtierConnector) if not name.startswith("_")}
    assert len(ours) > 20
    for name in ours:
        theirs = inspect.getattr_static(KVConnectorBase_V1, name, inspect.getattr_static(SupportsHMA, name, None))
        assert theirs is not None, f"vLLM never calls {name}"
        mine = inspect.getattr_static(KvtierConnector, name)
        assert type(mine) is type(theirs), f"{name} is a {type(mine).__name__}, not a {type(theirs).__name__}"
        if not isinstance(mine, property):
            taken, given = (inspect.signature(getattr(it, "__func__", it)).parameters for it in (mine, theirs))
            assert list(taken) == list(given), f"{name} takes {list(taken)}, vLLM gives {list(given)}"


def check_role() -> None:
    """A prefill engine loads, too. vLLM must read its role when the connector has changed it to one that loads."""
    from vllm.v1.core.sched.scheduler import Scheduler

    text = inspect.getsource(Scheduler.__init__)
    assert text.index("KVConnectorFactory.create_connector(") < text.index("kv_transfer_config.is_kv_consumer")
    assert text.count("is_kv_consumer") == 1
    assert "self.defer_block_free = True" in text


def broken() -> None:
    """As `check`, with a hook that vLLM does not know."""
    from kvtier.connect.vllm import KvtierConnector

    KvtierConnector.get_number_of_matched_tokens = lambda self: 0
    check()


def test_a_hook_of_another_name_would_be_noticed() -> None:
    with pytest.raises(Exception, match="broken ended with exit code 1"):
        in_process(broken)


def check_pool() -> None:
    """Runs where vLLM is imported: blocks go to the front of the queue, keep what they hold, and are handed out."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    from kvtier.connect.vllm.scheduler.block_pool import BlockPins

    pool = BlockPool(10, True, 16)
    pins = BlockPins(pool, lambda block: None)
    blocks = pool.get_new_blocks(9)
    for block in blocks[:6]:
        name = make_block_hash_with_group_id(BlockHash(bytes([block.block_id])), 0)
        pool._insert_block_hash(name, block, num_tokens=16)
    mine = pins.contents(block.block_id for block in blocks[:2])
    assert not any(map(pins.is_free, mine))
    pool.free_blocks(blocks)
    assert all(map(pins.is_free, mine))
    order = list(pins.free())
    assert [it.block for it in order] == [7, 8, 9, 1, 2, 3, 4, 5, 6]
    pins.hand_out_first([order[7], order[1]])
    assert [it.block for it in pins.free()] == [5, 8, 7, 9, 1, 2, 3, 4, 6]
    assert pool.get_num_free_blocks() == 9
    assert [block.block_id for block in pool.get_new_blocks(5)] == [5, 8, 7, 9, 1]
    assert pool.get_cached_block(BlockHash(bytes([1])), [0]) is None
    assert pool.get_cached_block(BlockHash(bytes([2])), [0]) == [blocks[1]]
    pool.free_blocks(blocks[:1])
    assert list(map(pins.is_free, mine)) == [False, True], "block 1 holds nothing any more"


def check_resets() -> None:
    """Runs where vLLM is imported: a reset passes where kvtier waits for it, and the scheduler has what it reads."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvtier.connect.vllm.engine_hooks import SCHEDULER_STATE

    text = inspect.getsource(Scheduler.__init__)
    for name in (*SCHEDULER_STATE, "deferred_frees"):
        assert f"self.{name}: " in text or f"self.{name} = " in text, name
    text = inspect.getsource(Scheduler.reset_prefix_cache)
    assert text.index("self._preempt_request(") < text.index("self.kv_cache_manager.reset_prefix_cache()")
    assert text.index("self.kv_cache_manager.reset_prefix_cache()") < text.index("self.reset_connector_cache()")
    pool = BlockPool(10, True, 16)
    pool.get_new_blocks(3)
    assert not pool.reset_prefix_cache()
    pool.num_gpu_blocks -= 3
    assert pool.reset_prefix_cache(), "the number of blocks decides"


def check_calls() -> None:
    """Runs where vLLM is imported: each method of vLLM's workers is in one row of the table, and none is misspelt."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor.abstract import SLEEP_TAGS, Executor
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    from kvtier.connect.vllm.engine_hooks import HARMLESS
    from kvtier.connect.vllm.scheduler.weight_calls import CHANGES, SLEEPS, TAGS

    found = {name for it in (Worker, CPUWorker) for name in dir(it) if callable(getattr(it, name)) and name[0] != "_"}
    known = (HARMLESS, frozenset(CHANGES), SLEEPS, {"wake_up"}, UNKNOWN_CHANGES)
    assert found - frozenset().union(*known) == set(), "which row of the table?"
    of_0_33 = {"get_simple_cpu_offload_num_cpu_blocks"}
    assert sorted(frozenset().union(*known) - found - of_0_33) == []
    assert sum(map(len, known)) == len(frozenset().union(*known)), "one row for each"
    # A known change tells when the weights are complete; vLLM resets its caches in its own sleep, and right before it.
    assert TAGS == SLEEP_TAGS
    assert "kwargs=dict(level=level)" in inspect.getsource(Executor.sleep)
    assert "kwargs=dict(tags=tags)" in inspect.getsource(Executor.wake_up)
    assert "args=(tuple(tags_to_discard),)" in inspect.getsource(Executor.discard)
    text = inspect.getsource(EngineCore.sleep)
    assert (
        text.index("clear_prefix_cache = level >= 1")
        < text.index("self.pause_scheduler(")
        < text.index("def pause_complete")
    )
    assert "self._reset_caches()" in inspect.getsource(EngineCore.release_kv_cache_memory)
    assert "engine._finish_pause(clear_cache)" in inspect.getsource(EngineCoreProc.pause_scheduler)


def check_tiering() -> None:
    """Runs where vLLM is imported: the secondary tier has vLLM's methods, and gets what it looks for."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvtier.connect.vllm.tiering.engine_setup import HASHES

    entry = {"type": "KvtierSecondaryTier", "module_path": "kvtier.connect.vllm.secondary_tier"}
    ours: Any = SecondaryTierFactory.get_tier_class(entry)
    assert issubclass(ours, SecondaryTierManager)
    assert not inspect.isabstract(ours)
    methods = {it for it, value in vars(ours).items() if inspect.isfunction(getattr(value, "__func__", value))}
    assert "build_metric_definitions" in methods
    for name in [it for it in methods if not it.startswith("_")]:
        taken, given = (inspect.signature(getattr(it, name)).parameters for it in (ours, SecondaryTierManager))
        assert list(taken) == list(given), f"{name} takes {list(taken)}, vLLM gives {list(given)}"
    assert ours.cache_hit_source.name == "DISK"
    assert list(inspect.signature(ours.__init__).parameters)[:5] == list(
        inspect.signature(SecondaryTierManager.__init__).parameters
    )
    assert {"job_id", "keys", "chunk_ids", "req_context"} <= set(inspect.signature(TransferJob).parameters)
    assert {"successful_keys", "transfer_time", "transfer_bytes"} <= set(inspect.signature(JobResult).parameters)
    assert make_offload_key(bytes(32), 7) == bytes(32) + (7).to_bytes(4, "big")
    assert ReqContext("r").get_offload_key_position(b"") is None
    hashes = [get_hash_fn_by_name(it) for it in HASHES]
    assert [resolve_none_hash_seed(it) for it in hashes] == ["vllm-none-hash"] * len(HASHES)
    assert [len(it(("a", 1))) for it in hashes] == [32] * len(HASHES)
    # What is looked for on the stack.
    assert "request" in inspect.signature(OffloadingConnectorScheduler.on_new_request).parameters
    assert "super().__init__(vllm_config, role, kv_cache_config)" in inspect.getsource(OffloadingConnector.__init__)
    text = inspect.getsource(EngineCore.__init__)
    assert text.index("self.model_executor =") < text.index("self.scheduler: SchedulerInterface = Scheduler(")


def check_hooks() -> None:
    """Runs where vLLM is imported: it has every row of the table, and what a row lacks is named with this row alone."""
    from kvtier.connect.vllm.engine_hooks import HOOKS

    assert refused_or_warned() == ("", "")
    removed: set[tuple[str, str]] = set()
    for hook in HOOKS:
        for place in hook.places:
            where, *names = place.split()
            for name in names or [""]:
                assert (where, name) not in removed, "one row for each"
                removed.add((where, name))
                with without(where, name):
                    refusal, warning = refused_or_warned()
                assert bool(warning) == bool(hook.without), (hook.name, warning)
                text = refusal + warning
                assert [it.name for it in HOOKS if f"({it.name})" in text] == [hook.name], (where, name, text)
                assert f"{name} in vllm.{where}".removeprefix(" in ") in text
                assert hook.why in text
    assert len(removed) > 60
    assert refused_or_warned() == ("", "")


def refused_or_warned() -> tuple[str, str]:
    """Compare all rows. Return the text of the error and of the warnings."""
    from kvtier.connect.vllm.engine_hooks import HOOKS, check, logger
    from kvtier.errors import ConfigError

    lines: list[str] = []
    keep = logging.Handler()
    keep.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(keep)
    refusal = ""
    try:
        check(*{hook.part for hook in HOOKS})
    except ConfigError as error:
        refusal = str(error)
    logger.removeHandler(keep)
    assert not refusal or "Install vLLM 0.3" in refusal
    return refusal, "\n".join(lines)


@contextmanager
def without(place: str, name: str) -> Iterator[None]:
    """Remove a function or class of vLLM, or a name in it, as another release might."""
    module, _, path = f"vllm.{place}".partition(":")
    *owners, last = path.split(".")
    owner: Any = reduce(getattr, owners, import_module(module))
    found = inspect.unwrap(getattr(owner, last))
    if name and inspect.isfunction(found):
        code = found.__code__
        gone = {it: tuple("gone" if known == name else known for known in getattr(code, it)) for it in CODE_NAMES}
        found.__code__ = code.replace(**gone)
        yield
        found.__code__ = code
        return
    kept = [(it, vars(it)[last]) for it in getattr(owner, "__mro__", [owner]) if last in vars(it)]
    for it, _ in kept:
        delattr(it, last)
    if name:  # it is a class
        others = {*dir(found), *getattr(found, "__dataclass_fields__", ())} - {
            name,
            *dir(object),
            "__dataclass_fields__",
        }
        setattr(owner, last, SimpleNamespace(**dict.fromkeys(others)))
    yield
    for it, value in kept:
        setattr(it, last, value)


@pytest.mark.parametrize("one", [check, check_role, check_pool, check_resets, check_calls, check_tiering, check_hooks])
def test_the_connector_fits_vllm(one: Callable[[], None]) -> None:
    in_process(one)


def test_an_engine_without_a_hook_does_not_start_and_its_error_names_it(start: Start, tmp_path: Path) -> None:
    lacking = r"vLLM has no vllm\.v1\.core\.block_pool:BlockPool\.unpin_blocks \(`BlockPool` and its blocks\)"
    with pytest.raises(EngineError, match=lacking):
        start("llama", connector(tmp_path / "kv"), sabotage="sabotage:lose_unpin_blocks")
