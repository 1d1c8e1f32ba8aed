"""Prefill here, decode there: two engines with one shared tier answer like one engine, whatever fails between them."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import LONG, SHORT, Expected, Start
from harness import Ask
from judge import is_same, prompt
from server import END_S, SIZES, Client, Server
from settings import CHUNK, connector, whole
from tests.cluster import valkey_bed
from tests.faults.hanging_fs import hanging_fs, missing
from tests.shared.ceph import NotInstalledError
from tests.waiting import free_port, wait_until

pytestmark = pytest.mark.engine

SECRET = "5e" * 32
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
STEP = 512
"""Tokens of a step, so that a prompt is computed in several."""
BOUNDED_S = 5.0
"""A wait that ends by itself, and the steps after it; a read that hangs takes longer."""
PROXY = Path(__file__).parents[2] / "examples" / "prefill_decode_proxy.py"


def role(name: str, place: Path | str, *tiers: str, **settings: Any) -> dict[str, Any]:
    """A configuration with the shared tier at `place`, a path or the text of a tier, behind `tiers`."""
    limits = "probe_deadline_s=2&transfer_deadline_s=2&retry_s=0.5"
    shared = place if isinstance(place, str) else f"far=shared_directory:{place}?{limits}&capacity_bytes=1GiB"
    given = connector(None, **{"tiers": [*tiers, shared], "store__secret": SECRET} | settings)
    return given | {"kv_role": name}


def announced(tokens: object) -> dict[str, Any]:
    return {"do_remote_prefill": True, "kvtier": {"tokens": tokens}}


def stored(place: Path) -> int:
    """Objects in the shared tier."""
    return sum(len(path.name) == 64 for path in place.rglob("*"))


@pytest.mark.vllm_core
def test_the_decode_engine_goes_on_where_the_prefill_engine_ended(
    start: Start, expected: Expected, tmp_path: Path
) -> None:
    place, drive = tmp_path / "shared", f"disk:{tmp_path / 'drive'}?capacity_bytes=1GiB"
    here = start("llama", role("kv_producer", place, drive), max_num_batched_tokens=STEP)
    there = start("llama", role("kv_consumer", place), max_num_batched_tokens=STEP)
    wanted = expected("llama")
    # The decode engine has just found the long prompt absent.
    assert is_same("llama", there.ask(LONG)[0], wanted["long"])
    there.forget()
    made = here.ask(LONG, count=1)[0].transfer
    assert made == announced(whole(len(LONG))) | {"do_remote_decode": False, "remote_prefill_cached_tokens": 0}
    assert is_same("llama", there.ask(LONG)[0], wanted["long"])
    assert there.external_hits() == 0, "the control: without the announcement it remembers the absence"
    there.forget()
    assert is_same("llama", there.ask(LONG, transfer=made)[0], wanted["long"])
    assert there.external_hits() == whole(len(LONG))

    # A prompt that is still on its way, and nothing that the decode engine computes is stored.
    made = here.ask(SHORT, count=1)[0].transfer
    assert is_same("llama", there.ask(SHORT, transfer=made)[0], wanted["short"])
    both = whole(len(LONG)) + whole(len(SHORT))
    assert there.external_hits() == both
    there.ask(prompt(600, 77))
    there.drain()
    assert stored(place) == both // CHUNK

    # What the decode engine has itself is neither waited for nor loaded.
    again = there.ask(SHORT, transfer=announced(len(SHORT)))[0]
    assert is_same("llama", again, wanted["short"])
    assert there.external_hits() == both

    # Announcements that are not true: more than there is, of another type, of another tenant's prompt.
    for number, lie in enumerate((10**9, 2048, "all", -5, True, [1], {"tokens": 3}, None)):
        tokens = prompt(900, 50 + number)
        began_s = time.monotonic()
        answer = there.ask(tokens, transfer=announced(lie))[0]
        assert len(answer.tokens) == 8
        assert time.monotonic() - began_s < BOUNDED_S
    assert there.external_hits() == both
    there.forget()
    salted = there.ask(Ask(LONG, salt="another tenant", transfer=announced(whole(len(LONG)))))[0]
    assert is_same("llama", salted, wanted["long"])
    assert there.external_hits() == both, "the keys of another tenant name nothing"
    assert there.printed().count("kvtier.tokens = 'all'; allowed: a number of tokens") == 1
    assert "kvtier has failed" not in here.printed() + there.printed()
    there.kill()
    assert is_same("llama", here.ask(LONG)[0], wanted["long"]), "a prefill engine holds nothing for another one"


def test_a_prefill_engine_that_is_killed_half_way_costs_only_time(
    start: Start, expected: Expected, tmp_path: Path
) -> None:
    place = tmp_path / "shared"
    here = start("llama", role("kv_producer", place), max_num_batched_tokens=CHUNK)
    there = start("llama", role("kv_consumer", place))
    here.ask(LONG, count=1, abort_at_step=4)
    wait_until(lambda: stored(place) > 0, "chunks that are stored while the prompt is computed", BOUNDED_S)
    here.kill()
    began_s = time.monotonic()
    answer = there.ask(LONG, transfer=announced(whole(len(LONG))))[0]
    assert is_same("llama", answer, expected("llama")["long"])
    assert time.monotonic() - began_s < BOUNDED_S
    assert 0 < there.external_hits() < whole(len(LONG)), "what was there is loaded"
    stranger = start("llama", role("kv_consumer", place, store__secret="7a" * 32))
    began_s = time.monotonic()
    assert is_same("llama", stranger.ask(LONG, transfer=announced(whole(len(LONG))))[0], answer)
    assert time.monotonic() - began_s < BOUNDED_S
    assert stranger.external_hits() == 0, "another secret"


def test_a_server_in_memory_hands_on_as_well(start: Start, expected: Expected, tmp_path: Path) -> None:
    try:
        server = valkey_bed.Server(tmp_path, valkey_bed.install())
    except NotInstalledError as error:
        pytest.skip(f"Valkey cannot be installed: {error}")
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        server.restart()
        tier = f"valkey:127.0.0.1:{server.port}"
        here = start("llama", role("kv_producer", tier), max_num_batched_tokens=STEP)
        there = start("llama", role("kv_consumer", tier))
        made = here.ask(LONG, count=1)[0].transfer
        assert is_same("llama", there.ask(LONG, transfer=made)[0], expected("llama")["long"])
        assert there.external_hits() == whole(len(LONG))


@pytest.mark.vllm_core
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_shared_tier_that_hangs_costs_only_time(start: Start, expected: Expected, tmp_path: Path) -> None:
    with contextlib.contextmanager(hanging_fs)(tmp_path) as files:
        here = start("llama", role("kv_producer", files.place / "kv"))
        there = start("llama", role("kv_consumer", files.place / "kv"))
        files.hang("everything")
        made = here.ask(LONG, count=1)[0].transfer
        for tokens, name in ((LONG, "long"), (SHORT, "short")):
            began_s = time.monotonic()
            answer = there.ask(tokens, transfer=made)[0]
            assert is_same("llama", answer, expected("llama")[name])
            assert time.monotonic() - began_s < BOUNDED_S
        assert there.external_hits() == 0
        files.go_on()


@pytest.mark.parametrize("tokens", [1400, 1280])
def test_a_model_with_windows_goes_on_at_the_announced_end(
    tokens: int, start: Start, expected: Expected, tmp_path: Path
) -> None:
    here = start("gemma3", role("kv_producer", tmp_path / "shared"), max_num_batched_tokens=STEP)
    there = start("gemma3", role("kv_consumer", tmp_path / "shared"), max_num_batched_tokens=STEP)
    text = LONG[:tokens]
    wanted = here.ask(text)[0]
    answer = there.ask(text, transfer=announced(tokens // CHUNK * CHUNK))[0]
    assert is_same("gemma3", answer, wanted)
    assert there.external_hits() == whole(tokens)
    if tokens == len(LONG):
        assert is_same("gemma3", answer, expected("gemma3")["long"])


# ---- two servers and the proxy ---------------------------------------------------------------------------------------

HITS = "vllm:external_prefix_cache_hits_total"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@contextlib.contextmanager
def proxied(checkpoints: Path, root: Path) -> Iterator[tuple[Client, Server, Server]]:
    """A proxy, its prefill server and its decode server."""
    sizes = [*SIZES, "--max-num-batched-tokens", str(STEP), "--chat-template", TEMPLATE]
    cores = sorted(os.sched_getaffinity(0))

    def server(name: str, core: int) -> Server:
        given = json.dumps(role(name, root / "shared"))
        return Server(checkpoints / "llama", root / f"{name}.log", given, *sizes, cores=str(core))

    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        starting = [pool.submit(server, "kv_producer", cores[0]), pool.submit(server, "kv_consumer", cores[-1])]
        here, there = (stack.enter_context(it.result()) for it in starting)
        port = free_port()
        command = [sys.executable, str(PROXY), "--prefill", here.url, "--decode", there.url, "--port", str(port)]
        log = stack.enter_context((root / "proxy.log").open("wb"))
        proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        stack.callback(proxy.wait, END_S)
        stack.callback(proxy.terminate)
        client = Client(f"http://127.0.0.1:{port}")
        client.await_health(lambda: "" if proxy.poll() is None else (root / "proxy.log").read_text())
        yield client, here, there


def test_two_servers_behind_the_proxy_answer_like_one(checkpoints: Path, start: Start, tmp_path: Path) -> None:
    plain = start("llama")
    others = [prompt(700, seed) for seed in (31, 32, 33)]
    wanted = [it.tokens for it in plain.ask_in_turn(LONG, SHORT, *others, count=16)]
    with proxied(checkpoints, tmp_path) as (proxy, here, there):
        assert proxy.complete(LONG, 16) == wanted[0]
        assert there.total(HITS) == whole(len(LONG))
        # The same, not streamed, and as a chat: the text of each token is its name.
        text = " ".join(f"t{token}" for token in SHORT)
        answer = proxy.post("/v1/completions", {"prompt": text, "max_tokens": 16, "return_token_ids": True})
        assert answer["choices"][0]["token_ids"] == wanted[1]
        text = " ".join(f"t{token}" for token in others[0])
        chat = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": 16}
        assert proxy.stream("/v1/chat/completions", chat) == wanted[2]
        assert there.total(HITS) == whole(len(LONG)) + 2 * whole(len(SHORT))
        # A request that is wrong gets the server's own answer.
        with pytest.raises(OSError, match="400"):
            proxy.complete(LONG, -1)
        # The prefill server dies while it has a request: the decode server does it all.
        here.pause()
        killer = threading.Timer(0.5, here.kill)
        killer.start()
        assert proxy.complete(others[1], 16) == wanted[3]
        killer.join()
        assert proxy.complete(others[2], 16) == wanted[4], "and it goes on without"
        assert there.total(HITS) == whole(len(LONG)) + 2 * whole(len(SHORT))
        assert "prefill server" in (tmp_path / "proxy.log").read_text()
