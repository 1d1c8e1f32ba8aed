"""The connector fits the interface of the vLLM that runs it: every hook is called, with its arguments."""

import inspect
from collections.abc import Callable

import pytest
from harness import in_process

pytestmark = [pytest.mark.engine, pytest.mark.vllm_core]


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

    from kvtier.connect.vllm.block_pool import BlockPins

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


def check_calls() -> None:
    """Runs where vLLM is imported: what is taken for harmless is a method of vLLM's workers, not a name misspelt."""
    from vllm.v1.worker.gpu_worker import Worker

    from kvtier.connect.vllm.weights import HARMLESS

    of_0_33 = {"get_simple_cpu_offload_num_cpu_blocks"}
    assert {name for name in HARMLESS if not hasattr(Worker, name)} <= of_0_33
    changing = "reload_weights update_config load_model reset_weights start_weight_update update_weights sleep wake_up"
    for name in [*changing.split(), "discard", "apply_model", "elastic_ep_execute", "checkpoint_restore"]:
        assert hasattr(Worker, name), name
        assert name not in HARMLESS


@pytest.mark.parametrize("one", [check, check_role, check_pool, check_calls])
def test_the_connector_fits_vllm(one: Callable[[], None]) -> None:
    in_process(one)
