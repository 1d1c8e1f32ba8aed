"""Routers of a fleet, from their packages: what they read of two engines' KV events, and which engine they select."""

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import pytest
import zmq
from engines import Start
from harness import Ask, Engine
from judge import prompt
from record_events import published, publisher
from server import SIZES, Client, Server
from settings import CHUNK, connector
from tests.waiting import free_port
from zmq.devices import ThreadProxy

PYTHON = Path(__file__).parents[2] / ".venv-routers" / "bin" / "python"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.fleet,
    pytest.mark.skipif(not PYTHON.exists(), reason="no routers: make test-fleet installs them"),
]

BLOCK = 32
GPU_BLOCKS = 70
"""Two prompts fill the engine's own memory."""
HELD = 4 * CHUNK
DISK_BYTES = 8 << 20
REPEAT_S = 2.0
END_S = 60.0


class Feed(NamedTuple):
    """Where an engine's events come out."""

    events: str
    replay: str


class Node(NamedTuple):
    """A server with kvtier, whose host memory holds little and whose disk is bounded."""

    server: Server
    feed: Feed

    def ask(self, tokens: Sequence[int]) -> None:
        self.server.complete(tokens, 1)

    @property
    def asked(self) -> float:
        return self.server.total("vllm:request_success_total")


def forwarder() -> tuple[str, Feed]:
    """Where vLLM sends its events to, and where they come out: vLLM itself listens on all addresses, or on none."""
    sent, endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(3))
    proxy = ThreadProxy(zmq.XSUB, zmq.XPUB)
    proxy.bind_in(sent)
    proxy.bind_out(endpoint)
    proxy.start()
    return sent, Feed(endpoint, replay)


def events_of(sent: str, feed: Feed) -> dict[str, Any]:
    """`--kv-events-config` of an engine that sends to a forwarder."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": sent, "replay_endpoint": feed.replay}


def node(checkpoints: Path, place: Path, repeat_s: float) -> Node:
    """A node with a directory of its own."""
    place.mkdir()
    sent, feed = forwarder()
    own = {"kind": "directory", "path": str(place / "kv"), "capacity_bytes": DISK_BYTES, "evictor": "lru"}
    ours = connector(None, host__capacity_bytes="4MiB", events__repeat_s=repeat_s)
    ours["kv_connector_extra_config"]["tiers"] = [own]
    server = Server(
        *(checkpoints / "llama", place / "log", json.dumps(ours), *SIZES),
        *("--max-model-len", "2048", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(GPU_BLOCKS)),
        *("--kv-events-config", json.dumps(events_of(sent, feed))),
        "--enable-scale-out",  # vLLM's router asks for a prompt's tokens
    )
    return Node(server, feed)


@pytest.fixture(scope="module")
def nodes(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Two servers that share nothing. The first repeats its events."""
    place = tmp_path_factory.mktemp("nodes")
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        starting = [
            threads.submit(node, checkpoints, place / f"of{repeat_s:g}", repeat_s) for repeat_s in (REPEAT_S, 0.0)
        ]
        found = [each.result() for each in starting]
        for each in found:
            stack.enter_context(each.server)
        yield found


class Dynamo:
    """Dynamo's SelectionService over some engines; a context manager."""

    def __init__(self, feeds: Sequence[Feed], log: Path, *, replays: bool = True) -> None:
        script = Path(__file__).with_name("dynamo_selection.py")
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [PYTHON, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        for number, each in enumerate(feeds):
            worker = {"worker_id": number, "endpoint": f"http://127.0.0.1:{number + 1}", "block_size": BLOCK}
            feed = {"kv_events_endpoint": each.events} | ({"replay_endpoint": each.replay} if replays else {})
            sizes = {"max_num_batched_tokens": 2048, "total_kv_blocks": GPU_BLOCKS}
            self.say({"add": worker | feed | sizes})

    def say(self, line: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(line) + "\n")
        stdin.flush()
        said = json.loads(stdout.readline())
        assert "error" not in said, said
        return said

    def held(self, tokens: Sequence[int], worker: int) -> tuple[int, int, int]:
        """Leading tokens that a worker has in its GPU, in host memory, and on disk."""
        found = next(it for it in self.say({"score": list(tokens)})["workers"] if it["worker_id"] == worker)
        blocks = (found[f"{place}_blocks"] for place in ("device", "host_pinned", "disk"))
        gpu, host, disk = (BLOCK * count for count in blocks)
        return gpu, host, disk

    def selected(self, tokens: Sequence[int]) -> dict[str, Any]:
        return self.say({"select": list(tokens)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=END_S)  # the end of its input ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()


class VllmRouter(Client):
    """vLLM's router over some nodes; a context manager."""

    def __init__(self, nodes: Sequence[Node], log: Path) -> None:
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}")
        command = [PYTHON, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port()), "--policy", "kv_aware", "--kv-event-model", "m"]
        command += ["--kv-event-block-size", str(BLOCK), "--worker-urls", *(each.server.url for each in nodes)]
        for each in nodes:
            command += ["--kv-event-source", f"{each.server.url}={each.feed.events}"]
            command += ["--kv-event-replay-source", f"{each.server.url}={each.feed.replay}"]
        self._log = log
        with log.open("wb") as printed:
            self._process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
        self.await_health(self._why_over)

    def _why_over(self) -> str:
        return "" if self._process.poll() is None else self._log.read_text(errors="replace")[-2000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_S)


def as_text(tokens: Sequence[int]) -> str:
    """A text of these tokens (`models._write_tokenizer`). The router asks an engine for a text's tokens."""
    return " ".join(f"t{token}" for token in tokens)


def until(act: Callable[[], object], wanted: object, limit_s: float = 60.0) -> None:
    """Wait until `act` returns `wanted`."""
    end_s = time.monotonic() + limit_s
    while act() != wanted and time.monotonic() < end_s:
        time.sleep(0.3)
    assert act() == wanted


def only_on_disk(dynamo: Dynamo, node: int, of: Node, tokens: Sequence[int], seed: int) -> None:
    """Crowd a prompt out of the engine and its host memory."""
    number = 0
    while dynamo.held(tokens, node) != (0, 0, HELD):
        of.ask(prompt(len(tokens), 1000 * seed + number))
        number += 1
        assert number < 40, dynamo.held(tokens, node)


@pytest.mark.vllm_core
def test_dynamo_selects_the_engine_that_has_the_prompt_on_disk_until_it_is_evicted(
    nodes: list[Node], tmp_path: Path
) -> None:
    wanted = prompt(HELD + 20, 1)
    with Dynamo([each.feed for each in nodes], tmp_path / "dynamo.log") as dynamo:
        nodes[0].ask(wanted)
        until(lambda: dynamo.held(wanted, 0), (HELD, HELD, HELD))
        only_on_disk(dynamo, 0, nodes[0], wanted, 1)
        chosen = dynamo.selected(wanted)
        assert (chosen["worker_id"], chosen["overlap"]["gpu"], chosen["overlap"]["disk"]) == (0, 0, HELD)
        number = 0
        while dynamo.held(wanted, 0) != (0, 0, 0):
            nodes[0].ask(prompt(HELD + 20, 2000 + number))
            number += 1
            assert number < 60, dynamo.held(wanted, 0)
        nodes[1].ask(wanted[: HELD // 2 + 20])
        until(lambda: dynamo.held(wanted, 1)[0], HELD // 2)
        assert dynamo.selected(wanted)["worker_id"] == 1


def test_a_router_that_comes_late_gets_again_what_is_held(nodes: list[Node], tmp_path: Path) -> None:
    """The second node does not repeat, and this router asks for no past events."""
    wanted = prompt(HELD + 20, 3)
    feeds = [each.feed for each in nodes]
    others = itertools.count(2000)
    with Dynamo(feeds, tmp_path / "early.log") as early:  # it has what is published once
        for number, each in enumerate(nodes):
            each.ask(wanted)

            def held(number: int = number, each: Node = each) -> tuple[int, ...]:
                each.ask(prompt(BLOCK + 8, next(others)))  # a further event shows the router that it has missed some
                return early.held(wanted, number)[1:]

            until(held, (HELD, HELD))
    with Dynamo(feeds, tmp_path / "dynamo.log", replays=False) as dynamo:
        until(lambda: dynamo.held(wanted, 0)[1:], (HELD, HELD))
        time.sleep(REPEAT_S)
        assert dynamo.held(wanted, 1) == (0, 0, 0)


@pytest.mark.vllm_core
def test_vllms_router_sends_a_prompt_to_the_engine_that_has_it_on_disk(nodes: list[Node], tmp_path: Path) -> None:
    """Whichever of the two that is. Dynamo shows when the prompt is nowhere else."""
    with (
        Dynamo([each.feed for each in nodes], tmp_path / "dynamo.log") as dynamo,
        VllmRouter(nodes, tmp_path / "router.log") as router,
    ):
        for number, given in enumerate(nodes):
            wanted = prompt(HELD + 20, 4 + number)
            given.ask(wanted)
            only_on_disk(dynamo, number, given, wanted, 5 + number)
            asked = [each.asked for each in nodes]
            for _ in range(3):
                router.post("/v1/completions", {"prompt": as_text(wanted), "max_tokens": 1})
            answered = [each.asked - before for each, before in zip(nodes, asked, strict=True)]
            assert answered == ([3, 0], [0, 3])[number]


@pytest.mark.parametrize("token_ids", [True, False])
def test_after_a_restart_and_on_joining_a_shared_tier_routers_learn_what_is_held(
    start: Start, tmp_path: Path, *, token_ids: bool
) -> None:
    """Neither engine of the second pair has seen the prompt. The objects are sealed."""
    wanted = prompt(HELD + 20, 7)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    ours = connector(None, store__secret_file=str(secret), events__token_ids=token_ids, events__repeat_s=1.0)
    ours["kv_connector_extra_config"]["tiers"] = [f"shared_directory:{tmp_path}/shared?capacity_bytes=64MiB"]

    def begin() -> tuple[Engine, Feed]:
        sent, feed = forwarder()
        return start("llama", ours, kv_events_config=events_of(sent, feed), block_size=BLOCK), feed

    before, feed = begin()
    with Dynamo([feed], tmp_path / "before.log") as dynamo:
        before.ask(wanted)
        until(lambda: (before.drain(), dynamo.held(wanted, 0))[1], (HELD, HELD, HELD))
    before.close()
    stored = [path for path in (tmp_path / "shared").glob("*/*/*/*") if path.is_file()]
    assert len(stored) == HELD // CHUNK, "a router counts the last chunk, also when one before it is not there"
    pair = [begin(), begin()]
    with Dynamo([feed for _, feed in pair], tmp_path / "after.log") as dynamo:

        def held() -> list[tuple[int, int, int]]:
            for engine, _ in pair:
                engine.drain()
            return [dynamo.held(wanted, number) for number in range(2)]

        if token_ids:
            until(held, [(0, 0, HELD)] * 2)
        for _ in range(10):
            time.sleep(0.5)
            assert held() == [(0, 0, HELD if token_ids else 0)] * 2


LLMD_TIERS = {"gpu", "cpu", "shared_storage", "storage", "object_store"}
"""Lowercased media with a weight by default in llm-d's router (`DefaultKVCacheBackendConfig`, November 2026)."""


def test_events_are_what_llmds_router_reads_and_equal_vllms_own(start: Start, tmp_path: Path) -> None:
    """By the rules of `VLLMAdapter` in its `pkg/kvevents/engineadapter`: it makes keys from tokens and extra keys."""
    feed, port = publisher()
    engine = start("llama", connector(tmp_path / "kv"), kv_events_config=feed)
    asked = [Ask(prompt(2 * CHUNK + 9, seed), salt=salt) for seed, salt in ((1, ""), (2, "tenant"))]
    for each in asked:
        engine.ask(each)
    until_s = time.monotonic() + END_S
    while True:
        engine.drain()
        found = [event for batch in published(port) for event in msgspec.msgpack.decode(batch)[1]]
        stored = [event for event in found if event["type"] == "BlockStored"]
        if sum(event["medium"] == "STORAGE" for event in stored) == 4:
            break
        assert time.monotonic() < until_s
        time.sleep(0.2)
    own: dict[int, tuple[Any, ...]] = {}
    for event in stored:
        size, hashes = event["block_size"], event["block_hashes"]
        assert event["medium"].lower() in LLMD_TIERS
        assert len(event["token_ids"]) == size * len(hashes)
        assert all(isinstance(each, int) for each in hashes)
        assert not event.keys() & {"locality", "ownership"}
        assert (event["group_idx"], event["kv_cache_spec_kind"]) == (0, "full_attention")
        extras = event.get("extra_keys") or [None] * len(hashes)
        assert len(extras) == len(hashes)
        parents = [event["parent_block_hash"], *hashes]
        for number, each in enumerate(hashes):
            block = (parents[number], tuple(event["token_ids"][number * size : (number + 1) * size]), extras[number])
            assert own.setdefault(each, block) == block
    assert ["tenant"] in [extras for _, _, extras in own.values()]
