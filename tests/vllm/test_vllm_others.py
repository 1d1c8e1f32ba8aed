"""kvtier beside another connector in vLLM's `MultiConnector`: each does its own, and neither disturbs the other."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engines import LONG, SHORT, Expected, Start
from harness import Answer, Engine, EngineError
from judge import TOLERANCE, apart
from settings import connector, whole

pytestmark = [pytest.mark.engine, pytest.mark.fleet]

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PORTS = {"prefill": 5601, "decode": 5602}
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    """`connectors`, in this order."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def ours(directory: Path) -> dict[str, Any]:
    """kvtier with a tier at `directory`."""
    return connector(directory)


@pytest.mark.vllm_core
@pytest.mark.parametrize("is_first", [True, False])
def test_beside_an_example_connector_both_store_and_one_loads(
    is_first: bool, start: Start, expected: Expected, tmp_path: Path
) -> None:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    pair = [ours(tmp_path / "kv"), example]
    given = several(*pair[:: 1 if is_first else -1])
    for turn in range(2):
        engine = start("llama", given, disable_hybrid_kv_cache_manager=True)
        for name, tokens in (("long", LONG), ("short", SHORT)):
            assert apart(engine.ask(tokens)[0], expected("llama")[name]) < TOLERANCE
        assert (engine.external_hits() > 0) == (turn == 1)
        engine.close()
        for place in ("kv/objects", "example"):
            assert any(it.is_file() for it in (tmp_path / place).rglob("*")), f"nothing in {place}"


def test_an_offloading_connector_beside_kvtier_is_refused(start: Start, tmp_path: Path) -> None:
    """It would store what kvtier loads into blocks that it still reads, under the names of the KV before."""
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    other["kv_connector_extra_config"] = {"cpu_bytes_to_use": 64 << 20}
    with pytest.raises(EngineError, match=r"OffloadingConnector beside kvtier .*Use one of the two"):
        start("llama", several(ours(tmp_path / "kv"), other))


def test_a_class_beside_another_connector_is_refused(start: Start, tmp_path: Path) -> None:
    """Its names lack the class, so another engine would take lossy KV for exact KV."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    with pytest.raises(EngineError, match=r"store\.loss = int4: ExampleConnector beside kvtier would pass lossy KV on"):
        start("llama", several(connector(tmp_path / "kv", store__loss="int4"), example))


# ---- NIXL --------------------------------------------------------------------------------------------------------

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="no nixl: make test-fleet installs it")


@pytest.fixture
def server(start: Start, tmp_path: Path) -> Callable[..., Engine]:
    """Starts a prefill or decode engine with NIXL and kvtier, each with a store of its own."""

    def begin(name: str, *, is_first: bool = False, **fields: Any) -> Engine:
        pair = [NIXL, ours(tmp_path / name)]
        environment = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(PORTS[name]),
            "UCX_TLS": "tcp,self,sm",
        }
        given = several(*pair[:: -1 if is_first else 1])
        return start("llama", given, environment=environment, **fields)

    return begin


def handed_over(engine: Engine) -> dict[str, Any]:
    """What a prefill engine says of `LONG`, for a decode engine."""
    (answer,) = engine.ask(LONG, count=1, transfer=REMOTE)
    assert answer.transfer is not None
    assert "kvtier" not in answer.transfer, "NIXL hands the request over"
    return answer.transfer


@needs_nixl
@pytest.mark.parametrize("is_first", [True, False])
def test_nixl_hands_a_prompt_over_and_kvtier_keeps_it_on_both_sides(
    is_first: bool, server: Callable[..., Engine], expected: Expected
) -> None:
    wanted: Answer = expected("llama")["long"]
    prefill, decode = server("prefill", is_first=is_first), server("decode", is_first=is_first)
    (answer,) = decode.ask(LONG, transfer=handed_over(prefill))
    assert apart(answer, wanted) < TOLERANCE
    assert decode.metrics()["vllm:prompt_tokens_by_source{source=external_kv_transfer}"] == len(LONG)
    for engine in (prefill, decode):
        engine.forget()
        before = engine.external_hits()
        assert apart(engine.ask(LONG)[0], wanted) < TOLERANCE
        assert engine.external_hits() - before == whole(len(LONG)), "from kvtier"
        engine.close()
    again = server("decode", is_first=is_first)
    assert apart(again.ask(LONG)[0], wanted) < TOLERANCE
    assert again.external_hits() == whole(len(LONG)), "after a restart"


@needs_nixl
def test_when_one_of_them_fails_the_other_goes_on(server: Callable[..., Engine], expected: Expected) -> None:
    wanted = expected("llama")
    prefill, decode = server("prefill"), server("decode")
    assert apart(decode.ask(SHORT)[0], wanted["short"]) < TOLERANCE
    params = handed_over(prefill)
    prefill.kill()
    (answer,) = decode.ask(LONG, transfer=params)
    assert apart(answer, wanted["long"]) < TOLERANCE
    decode.forget()
    assert decode.hits_of(LONG, SHORT) == whole(len(LONG)) + whole(len(SHORT)), "from kvtier"
    decode.close()

    prefill, decode = server("prefill"), server("decode", sabotage="sabotage:fail_lookups")
    (answer,) = decode.ask(LONG, transfer=handed_over(prefill))
    assert apart(answer, wanted["long"]) < TOLERANCE
    assert "kvtier has failed and is off" in decode.printed()
    assert decode.metrics()["vllm:prompt_tokens_by_source{source=external_kv_transfer}"] == len(LONG)
