"""Records KV events that vLLM really publishes, for the test of their reader: run by hand, see golden/traces/README.md.

    python record_events.py FOLDER

writes ``vllm_events.msgpack``, batches as they come over ZMQ, and ``vllm_events.json``: what was asked, what vLLM said
that it had, and its answer's length.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq
from engines import small_engine
from harness import in_process
from judge import prompt
from models import make_all
from tests.waiting import free_port

BLOCK = 32
PAUSE_S = 2.5
"""Longer than what the reader takes for one prompt in pieces."""


def asked() -> list[tuple[str, list[int], int]]:
    """(what it shows, prompt, tokens to generate)"""
    system = prompt(100, 1)
    turn = [*system, *prompt(90, 3)]
    return [
        ("new", system, 8),
        ("branches off", [*system[:64], *prompt(80, 2)], 8),
        ("goes on", turn, 70),
        ("new, in pieces", prompt(700, 4), 8),
        ("there as a whole: nothing is stored", system, 8),
        ("goes on", [*turn, *prompt(100, 5)], 8),
    ]


def main(folder: Path) -> None:
    """Ask, and write what was published."""
    events, port = publisher()
    with tempfile.TemporaryDirectory() as place:
        models = Path(place)
        in_process(make_all, models)
        result = []
        with small_engine(
            models, "llama", models / "log", None, kv_events_config=events, block_size=BLOCK, max_num_batched_tokens=256
        ) as engine:
            for what, tokens, count in asked():
                answer = engine.ask(tokens, count=count)[0]
                result.append(
                    {"what": what, "prompt": len(tokens), "cached": answer.cached, "generated": len(answer.tokens)}
                )
                time.sleep(PAUSE_S)
            batches = published(port)
    (folder / "vllm_events.msgpack").write_bytes(b"".join(batches))
    (folder / "vllm_events.json").write_text(json.dumps({"block": BLOCK, "asked": result}, indent=1) + "\n")
    print(f"{len(batches)} batches; {result}")


def publisher() -> tuple[dict[str, Any], int]:
    """vLLM's settings of a publisher of KV events, and the port for what it has sent already."""
    port = free_port()
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}"}
    return events | {"replay_endpoint": f"tcp://127.0.0.1:{port}"}, port


def published(port: int) -> list[bytes]:
    """All batches so far, from vLLM's memory of what it has sent."""
    found: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.rcvtimeo = 60_000
        asking.connect(f"tcp://127.0.0.1:{port}")
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        while batch := asking.recv_multipart()[-1]:
            found.append(batch)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
