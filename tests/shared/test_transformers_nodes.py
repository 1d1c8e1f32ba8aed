"""Two processes with a Transformers model as two nodes: each has host memory and a drive, and both see one store."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.shared.s3_world import fresh_prefix

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None, reason="torch and transformers are needed"
    ),
]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
SECRET, OTHER_SECRET = "5e" * 32, "7a" * 32
CHUNK, PROMPT, QUESTION = 16, 1000, 40

NODE = """
import json, sys, torch
from tests.engine.attaching import SMALL
from tests.engine.tiny_transformers import batch, llama
from kvtier.connect.transformers import attach

GREEDY = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
for line in sys.stdin:
    call = json.loads(line)
    kv = attach(llama(), **SMALL | call["settings"])
    input_ids, _ = batch(call["tokens"])
    plain = kv.model.generate(input_ids, **GREEDY)[0].tolist()
    output = kv.generate(input_ids, **GREEDY)[0].tolist()
    if not call["is_killed"]:
        kv.close()
    answer = {"is_same": output == plain, "tokens": output, "sources": kv.last.restored_by_source}
    print(json.dumps(answer), flush=True)
"""


class Node:
    """A process that answers calls one after the other."""

    def __init__(self, folder: Path, shared: str) -> None:
        self._folder, self._shared = folder, shared
        self._calls = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", NODE], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def generate(self, tokens: list[int], secret: str = SECRET, *, is_killed: bool = False) -> dict[str, Any]:
        """Attach a model with an empty drive, generate, close; or kill the process while it writes."""
        self._calls += 1
        drive = self._folder / f"drive-{self._calls}"
        tiers = [f"disk:{drive}?capacity_bytes=64MiB", f"far={self._shared}"]
        call = {"tokens": tokens, "settings": {"tiers": tiers, "store__secret": secret}, "is_killed": is_killed}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if is_killed:
            self._process.kill()
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=DEADLINE_S)


@pytest.fixture(params=["shared_directory", "s3"])
def nodes(request, tmp_path):
    """Two nodes over a new shared store."""
    if request.param == "s3":
        access = request.getfixturevalue("gateway").access
        keys = f"access_key_id={access.access_key}&secret_access_key={access.secret_key}"
        place = f"s3:s3://{access.bucket}/{fresh_prefix()}?endpoint={access.endpoint}&allow_http=true&{keys}"
        places = [place, place]
    else:
        places = [
            f"shared_directory:{mount / tmp_path.name}?capacity_bytes=256MiB"
            for mount in request.getfixturevalue("mounts")
        ]
    made = [Node(tmp_path / name, place) for name, place in zip("ab", places, strict=True)]
    yield made
    for node in made:
        node.close()


def prompt(count: int, seed: int) -> list[int]:
    return [3 + (seed * 31 + number * number * 7 + number // 5) % 190 for number in range(count)]


def test_what_one_node_generated_goes_on_at_the_other_and_other_secrets_share_nothing(nodes):
    a, b = nodes
    first = a.generate(prompt(PROMPT, 1))
    assert (first["is_same"], first["sources"]) == (True, {})
    turn = [*first["tokens"], *prompt(QUESTION, 2)]
    other = b.generate(turn, OTHER_SECRET)
    assert (other["is_same"], other["sources"]) == (True, {})
    known = (len(first["tokens"]) - 1) // CHUNK * CHUNK  # the last token of an answer has no KV yet
    going_on = b.generate(turn)
    assert (going_on["is_same"], going_on["sources"]) == (True, {"far": known})


def test_a_node_that_is_killed_in_the_middle_costs_only_misses(nodes):
    a, b = nodes
    assert a.generate(prompt(PROMPT, 3), is_killed=True)["is_same"]
    answer = b.generate(prompt(PROMPT, 3))
    assert answer["is_same"]
    restored = answer["sources"].get("far", 0)
    assert restored % CHUNK == 0
    assert b.generate(prompt(PROMPT, 3))["sources"] == {"far": PROMPT // CHUNK * CHUNK}, "b has written what is missing"
