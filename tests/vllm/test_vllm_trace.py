"""A trace that is recorded while the real vLLM serves replays to the hits that kvtier gave it."""

import json
from pathlib import Path

import pytest
from engines import Start
from harness import Ask
from judge import prompt
from settings import CHUNK, connector, whole
from tests.traces import replay

from kvtier.tools.trace.arrays import read_arrays
from kvtier.tools.trace.formats.base import open_trace

pytestmark = [pytest.mark.engine, pytest.mark.vllm_core]

SYSTEM = prompt(600, 1)
PROMPTS = [[*SYSTEM, *prompt(300, 2)], [*SYSTEM, *prompt(500, 3)], prompt(700, 4), [*SYSTEM, *prompt(300, 2)], SYSTEM]


def test_a_replay_of_the_recording_hits_what_vllm_was_given(start: Start, tmp_path: Path) -> None:
    settings = connector(tmp_path / "kv", trace__path=str(tmp_path / "traces"))
    engine = start("llama", settings, enable_prefix_caching=False)
    for tokens in PROMPTS:
        engine.ask(tokens)
        engine.drain()
    hits = engine.external_hits()
    engine.ask(Ask(prompt(900, 9), abort_at_step=1))
    engine.close()
    assert hits == 2 * CHUNK + whole(900) + 2 * CHUNK
    (path,) = (tmp_path / "traces").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [it["input_length"] for it in lines] == [*map(len, PROMPTS), 900]
    assert [it["output_length"] for it in lines[:-1]] == [8] * len(PROMPTS)
    packed = read_arrays(open_trace(path), is_strict=True)
    assert packed.block_tokens == CHUNK
    assert replay(packed, "lru", None).hit_tokens == hits
    # Negative control: a cache of two chunks would not have had them.
    assert replay(packed, "lru", 2 * CHUNK).hit_tokens < hits
