"""The connector fits the interface of the vLLM that runs it: no hook that nobody calls, none with other arguments."""

import inspect

import pytest
from harness import in_process

pytestmark = pytest.mark.engine


def check() -> None:
    """Runs where vLLM is imported."""
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


def test_every_hook_is_one_of_vllms() -> None:
    in_process(check)


def broken() -> None:
    """As `check`, with a hook that vLLM does not know."""
    from kvtier.connect.vllm import KvtierConnector

    KvtierConnector.get_number_of_matched_tokens = lambda self: 0
    check()


def test_a_hook_of_another_name_would_be_noticed() -> None:
    with pytest.raises(Exception, match="broken ended with exit code 1"):
        in_process(broken)
