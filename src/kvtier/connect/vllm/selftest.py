"""The self-test of an unsupported vLLM, and its results next to the store.

Names and signatures do not prove the layout of a page. The self-test (`kvtier vllm doctor --selftest`) does, for one
build of vLLM, one model and one KV layout. It stores KV, restarts, and compares the answers with vLLM's own; a control
run restores wrong bytes. Its result is a note next to the store, and engines of that build require it.

Each engine runs in its own process (`python -m kvtier.connect.vllm.selftest JOB RESULT`), with the arguments of the
server's command line, but without a tokenizer or a server.
"""

import hashlib
import json
import logging
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from kvtier.codec.head import RAW_ID, pack_head, read_head
from kvtier.config.sections import Config
from kvtier.connect.vllm.installed import CONNECTOR, engine_arguments, is_supported
from kvtier.errors import ConfigError
from kvtier.layout import KvLayout
from kvtier.runtime.secret import within
from kvtier.tier import store_notes as notes
from kvtier.tier.registry import kind_of
from kvtier.tier.safe_open import make_root

logger = logging.getLogger(__name__)

ENGINE_S = 3600.0
"""Longest run of one engine; loading a large model's weights takes most of it."""

TOLERANCE = 0.05
"""Largest difference of log probabilities: rounding of 16-bit numbers in equal batches. The control run must
exceed it."""

PROMPT_TOKENS_MAX = 3000
ANSWER_TOKENS = 16
_IDS = (5, 2000)
"""Range of prompt tokens; others may stand for images, or end a text."""

_ERROR_LINES = 12


# ---- results next to the store -------------------------------------------------------------------------------------


def result_folder(config: Config) -> Path:
    """Folder of the results: that of the first tier that has one.

    Raises:
        ConfigError: no tier has one.
    """
    for tier in config.tiers:
        if (folder := kind_of(tier).folder(tier)) is not None:
            return folder
    raise ConfigError(
        "the self-test of an unsupported vLLM writes its result next to a store, and no tier is in a directory; "
        "allowed: --tier disk:PATH or --tier directory:PATH"
    )


def check(config: Config, build: str, fingerprint: bytes, layout: KvLayout) -> None:
    """Refuse an unsupported build of vLLM that has no result for this model and layout.

    Args:
        config: the settings.
        build: `installed.build_of`.
        fingerprint: digest of the model's.
        layout: the layout of a worker.

    Raises:
        ConfigError: there is no result; the message names the command that makes one.
    """
    if is_supported(build):
        return
    pages = [layout.digest(group).hex() for group in range(len(layout.groups))]
    subject: dict[str, object] = {"build": build, "fingerprint": fingerprint.hex(), "layout": pages}
    folder = result_folder(config)
    if config.vllm.unsupported == "selftest":
        logger.warning("vLLM %s is under test; the answers of this engine may be wrong", build)
        make_root(folder)
        _write(folder, subject, is_passed=False)
        return
    results: list[dict[str, object]] = []
    with suppress(TimeoutError):
        results = within(config.limits.open_deadline_s, partial(notes.read, folder, "selftest"), "kvtier selftest")
    if {**subject, "passed": True} not in results:
        raise ConfigError(
            f"vLLM {build} is not supported, and {folder} holds no self-test result for this model and layout; run "
            "`kvtier vllm doctor --selftest` with the server's settings, --model and --engine-args"
        )


def publish(tested: Path, folder: Path) -> int:
    """Copy the results that test engines left in `tested` to `folder`, as passed; returns how many.

    Raises:
        OSError: they cannot be written.
    """
    found = notes.read(tested, "selftest")
    for note in found:
        _write(folder, note, is_passed=True)
    return len(found)


def _write(folder: Path, subject: Mapping[str, object], *, is_passed: bool) -> None:
    name = repr([subject[key] for key in ("build", "fingerprint", "layout")])
    notes.write(folder, "selftest", hashlib.sha256(name.encode()).digest(), {**subject, "passed": is_passed})


# ---- the test ------------------------------------------------------------------------------------------------------


class EngineAnswer(NamedTuple):
    """An engine's answer to one prompt."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    """Prompt tokens that were not computed."""


def run(config: Config, arguments: Sequence[str]) -> str:
    """Test the installed vLLM, write the result next to the store of `config`, and return a summary.

    Args:
        config: the server's settings.
        arguments: the server's command line, with ``--model``.

    Raises:
        ConfigError: the test failed or could not run; the message says what was observed.
        OSError: the result cannot be written.
    """
    results = result_folder(config)
    with tempfile.TemporaryDirectory(prefix="kvtier-selftest-") as folder:
        store = Path(folder, "store")
        transfer = {
            **CONNECTOR,
            "kv_connector_extra_config": {
                "tiers": [{"kind": "directory", "path": str(store)}],
                "store.chunk_tokens": config.store.chunk_tokens,
                "host.capacity_bytes": config.host.capacity_bytes,
                "planner.enabled": False,
                "vllm.unsupported": "selftest",
            },
        }
        with_kv = [*arguments, "--kv-transfer-config", json.dumps(transfer)]
        _engine(folder, with_kv, [0, 0])
        restored = _engine(folder, with_kv, [0, 0])
        cached = [answer.cached for answer in restored]
        if not all(cached):
            raise ConfigError(f"selftest: after a restart {cached} tokens of two prompts were restored")
        expected = _engine(folder, arguments, cached)
        difference = max(_difference(*pair) for pair in zip(restored, expected, strict=True))
        if difference > TOLERANCE:
            raise ConfigError(f"selftest: log probabilities from restored KV differ from vLLM's own by {difference:g}")
        objects = corrupt(store)
        wrong = _engine(folder, with_kv, [0, 0])
        control = max(_difference(*pair) for pair in zip(wrong, expected, strict=True))
        if control <= TOLERANCE or [answer.cached for answer in wrong] != cached:
            raise ConfigError(f"selftest: wrong bytes in {objects} objects changed no answer ({control:g})")
        make_root(results)
        count = publish(store, results)
    return (
        f"passed: {sum(cached)} tokens restored after a restart, answers equal (log probabilities within "
        f"{difference:.2g}); with wrong bytes they differ by {control:.2g}; {count} results next to the store"
    )


def corrupt(directory: Path) -> int:
    """Rotate the bytes of every section by a quarter of its length plus 100, with valid checksums; returns the objects.

    Attention does not notice whole tokens that change places, since K holds the position; the 100 bytes break tokens.
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


def _difference(one: EngineAnswer, other: EngineAnswer) -> float:
    """Largest difference in log probability; infinite if tokens differ."""
    if one.tokens != other.tokens:
        return float("inf")
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def _engine(folder: str, arguments: Sequence[str], first: Sequence[int]) -> list[EngineAnswer]:
    """Answers of an engine in a process of its own.

    Args:
        folder: for files.
        arguments: arguments of the server.
        first: per prompt, the leading tokens to ask for alone, so that vLLM's own cache has them.

    Raises:
        ConfigError: the engine failed; the message ends with its output.
    """
    job, result, log = (Path(folder, name) for name in ("job", "result", "log"))
    result.unlink(missing_ok=True)
    job.write_text(json.dumps({"arguments": list(arguments), "first": list(first)}))
    command = ["env", "VLLM_ENABLE_V1_MULTIPROCESSING=0", sys.executable, "-m", __spec__.name, str(job), str(result)]
    with log.open("wb") as output:
        try:
            subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=ENGINE_S, check=True)
            answers = cast("list[Any]", json.loads(result.read_text()))
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            last = log.read_text(errors="replace").splitlines()[-_ERROR_LINES:]
            raise ConfigError("\n".join([f"selftest: the engine failed: {error}", *last])) from None
    return [EngineAnswer(*answer) for answer in answers]


def _serve(job: Mapping[str, Any]) -> list[EngineAnswer]:
    """Answer the prompts of a job. Runs in an engine's process."""
    vllm: Any = import_module("vllm")
    engines: Any = import_module("vllm.v1.engine.llm_engine")
    given: Any = engine_arguments(job["arguments"])
    given.skip_tokenizer_init, given.disable_log_stats = True, False
    engine: Any = engines.LLMEngine.from_engine_args(given)
    length = min(PROMPT_TOKENS_MAX, engine.model_config.max_model_len - 2 * ANSWER_TOKENS)
    ids = (_IDS[0], min(_IDS[1], engine.model_config.get_vocab_size()))

    def ask(prompt: list[int], count: int) -> EngineAnswer:
        params: Any = vllm.SamplingParams(
            temperature=0, max_tokens=count, logprobs=1, detokenize=False, ignore_eos=True
        )
        engine.add_request("selftest", {"prompt_token_ids": prompt}, params)
        while True:
            for result in engine.step():
                if result.finished:
                    output = result.outputs[0]
                    rows = zip(output.token_ids, output.logprobs, strict=True)
                    logprobs = [float(row[token].logprob) for token, row in rows]
                    return EngineAnswer(list(output.token_ids), logprobs, result.num_cached_tokens or 0)

    answers: list[EngineAnswer] = []
    for number, alone in enumerate(job["first"]):
        draw = random.Random(number)  # noqa: S311 - equal prompts in all engines
        prompt = [draw.randrange(*ids) for _ in range(length // (number + 1))]
        if alone:
            ask(prompt[:alone], 1)
        answers.append(ask(prompt, ANSWER_TOKENS))
    scheduler = engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():  # open stores still read vLLM's blocks
        engine.step()
    engine.engine_core.shutdown()
    return answers


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_serve(json.loads(Path(sys.argv[1]).read_text()))))
