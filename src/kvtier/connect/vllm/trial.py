"""The test of a vLLM that was never tried: store, restart, compare, and a control with wrong bytes.

Each engine runs in a process of its own (`python -m kvtier.connect.vllm.trial JOB RESULT`). It gets the arguments of
the server's command line, and has no tokenizer and no server.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from kvtier.codec.head import RAW_ID, pack_head, read_head
from kvtier.config.sections import Config
from kvtier.connect.vllm import selftest
from kvtier.connect.vllm.installed import CONNECTOR, engine_arguments
from kvtier.errors import ConfigError

TRIAL_S = 3600.0
"""How long one engine may take; the weights of a large model take most of it."""

TOLERANCE = 0.05
"""Of log probabilities: what 16-bit numbers may differ in when batches are alike. The control must exceed it."""

PROMPT_TOKENS_MAX = 3000
ANSWER_TOKENS = 16
_IDS = (5, 2000)
"""Prompts are drawn from these: others may stand for images, or end a text."""

_ERROR_LINES = 12


class Answer(NamedTuple):
    """The answer of an engine to one prompt."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    """Prompt tokens that were not computed."""


def run(config: Config, arguments: Sequence[str]) -> str:
    """Test the vLLM that is installed; what was seen. The result is written beside the store of `config`.

    Args:
        config: the server's settings.
        arguments: the server's command line, with ``--model``.

    Raises:
        ConfigError: the test failed, or could not be run; the message names what was seen.
        OSError: the result cannot be written.
    """
    place = selftest.place_of(config)
    if place is None:
        raise ConfigError("no tier to keep the result of the test; allowed: directory.path or disk.path")
    with tempfile.TemporaryDirectory(prefix="kvtier-selftest-") as folder:
        store = Path(folder, "store")
        transfer = {
            **CONNECTOR,
            "kv_connector_extra_config": {
                "directory.path": str(store),
                "store.chunk_tokens": config.store.chunk_tokens,
                "host.capacity_bytes": config.host.capacity_bytes,
                "planner.enabled": False,
                "vllm.unsupported": "selftest",
            },
        }
        with_kv = [*arguments, "--kv-transfer-config", json.dumps(transfer)]
        _engine(folder, with_kv, [0, 0])
        restored = _engine(folder, with_kv, [0, 0])
        kept = [answer.cached for answer in restored]
        if not all(kept):
            raise ConfigError(f"selftest: of two prompts {kept} tokens were found again after a restart")
        expected = _engine(folder, arguments, kept)
        apart = max(_apart(*pair) for pair in zip(restored, expected, strict=True))
        if apart > TOLERANCE:
            raise ConfigError(f"selftest: log probabilities from restored KV differ from vLLM's own by {apart:g}")
        objects = roll(store)
        wrong = _engine(folder, with_kv, [0, 0])
        control = max(_apart(*pair) for pair in zip(wrong, expected, strict=True))
        if control <= TOLERANCE or [answer.cached for answer in wrong] != kept:
            raise ConfigError(f"selftest: wrong bytes in {objects} objects made no difference ({control:g})")
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        noted = selftest.publish(store, place)
    return (
        f"passed: {sum(kept)} tokens restored after a restart, answers equal (log probabilities within {apart:.2g}); "
        f"with wrong bytes they differ by {control:.2g}; {noted} results beside the store"
    )


def roll(directory: Path) -> int:
    """Move the bytes of every section by a quarter of its length and a bit; the checksums are made anew.

    A bit, because attention does not mind whole tokens that change places: their K holds the position.

    Returns:
        How many objects there are.
    """
    count = 0
    for path in sorted((directory / "objects").rglob("*")):
        if not path.is_file():
            continue
        frame = bytearray(path.read_bytes())
        head = read_head(memoryview(frame))
        if head.codec != RAW_ID:
            raise ConfigError(f"object {path.name} has codec {head.codec}; allowed: raw")
        table = head.table.copy()
        for row, section in zip(table, head.sections, strict=True):
            start, stop = section.offset, section.offset + section.raw_bytes
            rolled = np.roll(np.frombuffer(frame, np.uint8, section.raw_bytes, start), section.raw_bytes // 4 + 100)
            frame[start:stop] = rolled.tobytes()
            row["checksum"] = xxhash.xxh3_64_intdigest(frame[start : section.offset + section.extent_bytes])
        frame[: head.header_bytes] = pack_head(head.identity, RAW_ID, table, head.frame_bytes, head.raw_bytes)
        path.write_bytes(frame)
        count += 1
    return count


def _apart(one: Answer, other: Answer) -> float:
    """The largest difference of two answers in log probability; infinite when tokens differ."""
    if one.tokens != other.tokens:
        return float("inf")
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def _engine(folder: str, arguments: Sequence[str], first: Sequence[int]) -> list[Answer]:
    """Answers of an engine of its own.

    Args:
        folder: for files.
        arguments: of the server.
        first: for each prompt, leading tokens that are asked alone before it, so that vLLM's own cache has them.

    Raises:
        ConfigError: the engine failed; the message ends with what it printed.
    """
    job, result, log = (Path(folder, name) for name in ("job", "result", "log"))
    result.unlink(missing_ok=True)
    job.write_text(json.dumps({"arguments": list(arguments), "first": list(first)}))
    command = ["env", "VLLM_ENABLE_V1_MULTIPROCESSING=0", sys.executable, "-m", __spec__.name, str(job), str(result)]
    with log.open("wb") as printed:
        try:
            subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=TRIAL_S, check=True)
            told = cast("list[Any]", json.loads(result.read_text()))
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            last = log.read_text(errors="replace").splitlines()[-_ERROR_LINES:]
            raise ConfigError("\n".join([f"selftest: the engine failed: {error}", *last])) from None
    return [Answer(*answer) for answer in told]


def _serve(job: Mapping[str, Any]) -> list[Answer]:
    """Runs where vLLM is imported."""
    vllm: Any = import_module("vllm")
    engines: Any = import_module("vllm.v1.engine.llm_engine")
    given: Any = engine_arguments(job["arguments"])
    given.skip_tokenizer_init, given.disable_log_stats = True, False
    engine: Any = engines.LLMEngine.from_engine_args(given)
    length = min(PROMPT_TOKENS_MAX, engine.model_config.max_model_len - 2 * ANSWER_TOKENS)
    ids = (_IDS[0], min(_IDS[1], engine.model_config.get_vocab_size()))

    def ask(prompt: list[int], count: int) -> Answer:
        how: Any = vllm.SamplingParams(temperature=0, max_tokens=count, logprobs=1, detokenize=False, ignore_eos=True)
        engine.add_request("trial", {"prompt_token_ids": prompt}, how)
        while True:
            for output in engine.step():
                if output.finished:
                    told = output.outputs[0]
                    rows = zip(told.token_ids, told.logprobs, strict=True)
                    logprobs = [float(row[token].logprob) for token, row in rows]
                    return Answer(list(told.token_ids), logprobs, output.num_cached_tokens or 0)

    answers: list[Answer] = []
    for number, alone in enumerate(job["first"]):
        draw = random.Random(number)  # noqa: S311 - the same prompts in every engine
        prompt = [draw.randrange(*ids) for _ in range(length // (number + 1))]
        if alone:
            ask(prompt[:alone], 1)
        answers.append(ask(prompt, ANSWER_TOKENS))
    scheduler = engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():  # what is to be stored still reads vLLM's blocks
        engine.step()
    engine.engine_core.shutdown()
    return answers


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_serve(json.loads(Path(sys.argv[1]).read_text()))))
