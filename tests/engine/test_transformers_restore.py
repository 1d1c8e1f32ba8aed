"""Restored KV is the KV that was stored: bit for bit in a new process, and the same tokens as a full recompute."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attaching import SMALL, Attach
from tests.sealed_places import KINDS, sealed_place
from tiny_transformers import MODELS, batch, gemma3, llama, mistral, tokens
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvtier.connect.transformers import attach, support
from kvtier.connect.transformers.caches import RecordingWindowLayer, empty_cache
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.connect.transformers.support import inspect_cache
from kvtier.runtime.arena import chunk_bytes
from kvtier.tier.directory.tier import DirectoryTier

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
LOGITS: dict[str, Any] = GREEDY | {"output_logits": True, "return_dict_in_generate": True}

CHUNK = SMALL["store__chunk_tokens"]
PROMPT = batch(tokens(100, 1))[0]


def logits(output: Any) -> torch.Tensor:
    """[steps, rows, vocabulary]."""
    return torch.stack(output.logits)


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_gives_the_same_tokens_cold_warm_and_from_disk(name: str, attached: Attach) -> None:
    model = MODELS[name]()
    plain = model.generate(PROMPT, **LOGITS)
    kv = attached(model)
    cold = kv.generate(PROMPT, **LOGITS)
    assert kv.last.restored_tokens == 0
    assert kv.last.stored_chunks == 6 * len(kv._current().shape.groups)
    warm = kv.generate(PROMPT, **LOGITS)
    assert kv.last.restored_by_source == {"host": 96}
    kv.close()
    reopened = attached(model)
    disk = reopened.generate(PROMPT, **LOGITS)
    assert reopened.last.restored_by_source == {"directory": 96}
    assert reopened.last.computed_tokens == 4

    # Recording must not change what the library computes.
    assert torch.equal(logits(cold), logits(plain))
    assert torch.equal(plain.sequences, warm.sequences)
    torch.testing.assert_close(logits(warm), logits(plain), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(warm), logits(disk)), "the same KV gives the same bits, wherever it was"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_come_back_through_split_and_a_seal(kind: str, attached: Attach, tmp_path: Path) -> None:
    model = llama()
    with sealed_place(kind, tmp_path / kind) as (given, heads):
        settings = {name.replace(".", "__"): value for name, value in given.items()} | {"directory": None}
        kv = attached(model, **settings)
        kv.generate(PROMPT, **LOGITS)
        warm = kv.generate(PROMPT, **LOGITS)
        kv.close()
        assert len(heads()) == 6
        assert all(head.seal and 2 in head.codecs for head in heads())
        reopened = attached(model, **settings)
        below = reopened.generate(PROMPT, **LOGITS)
        assert reopened.last.restored_by_source == {kind: 96}
        assert torch.equal(logits(warm), logits(below)), "the same KV gives the same bits"
        reopened.close()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "deepseek_v3", "gpt_oss", "bloom", "opt"])
def test_values_shifted_by_one_token_change_the_output(
    name: str, attached: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of all tests here: they would notice a byte order or a token that is off by one.

    Only V is shifted: attention does not mind the order of its (K, V) pairs, whose K holds the position.
    """
    model = MODELS[name]()
    kv = attached(model)
    right = kv.generate(PROMPT, **LOGITS)
    kv.flush()
    scatter = CacheCopier.scatter

    def shifted(self: CacheCopier, request: Any, group: int, blocks: tuple[int, ...], payload: memoryview) -> Any:
        wrong = bytearray(payload)
        layers, offsets = self._shape.groups[group], self._layout.groups[group].layer_offsets
        for layer, offset in zip(layers, offsets, strict=True):
            start = offset + CHUNK * layer.key_bytes_per_token
            values = np.frombuffer(wrong, np.float32, CHUNK * layer.value_bytes_per_token // 4, start)
            values = values.reshape(layer.value_heads, CHUNK, layer.value_dim)
            values[:] = np.roll(values, 1, axis=1)
        return scatter(self, request, group, blocks, memoryview(wrong))

    monkeypatch.setattr(CacheCopier, "scatter", shifted)
    wrong = kv.generate(PROMPT, **LOGITS)
    assert kv.last.restored_tokens == 96
    assert not torch.equal(wrong.sequences, right.sequences)
    assert (logits(wrong)[0] - logits(right)[0]).abs().max() > 1.0, "tests accept 0.0001"


def in_memory(model: Any, recorded: DynamicCache, columns: int) -> DynamicCache:
    """A cache of the library's own layers, holding the first `columns` columns of a recorded one."""
    cache = DynamicCache(config=model.config)
    for layer, source in zip(cache.layers, recorded.layers, strict=True):
        spans = source.recorded if isinstance(source, RecordingWindowLayer) else None
        keys = torch.cat([span.keys for span in spans], dim=-2) if spans else source.keys
        values = torch.cat([span.values for span in spans], dim=-2) if spans else source.values
        start = 0
        if isinstance(layer, DynamicSlidingWindowLayer):
            start, layer.cumulative_length = max(0, columns - layer.sliding_window + 1), columns
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[..., start:columns, :].clone(), values[..., start:columns, :].clone()
    return cache


PROCESS = """
import sys
import numpy as np
import torch
from attaching import SMALL
from test_transformers_restore import LOGITS
from tiny_transformers import MODELS, batch, tokens
from kvtier.connect.transformers import attach

name, directory, result = sys.argv[1:]
input_ids, mask = batch(tokens(100, 1), tokens(61, 2))
with attach(MODELS[name](), directory, **SMALL) as kv:
    output = kv.generate(input_ids, attention_mask=mask, **LOGITS)
    assert kv.last.restored_by_source == {"directory": 87 + 48}, kv.last
# Never closed: the end of the process does it.
kv = attach(MODELS[name](), directory, **SMALL)
kv.generate(batch(tokens(50, 9))[0], **LOGITS)
np.savez(result, logits=torch.stack(output.logits).numpy(), sequences=output.sequences.numpy())
"""


@pytest.mark.slow
def test_a_new_process_continues_bit_for_bit_as_from_memory(tmp_path: Path) -> None:
    name = "gemma3"
    model = MODELS[name]()
    input_ids, mask = batch(tokens(100, 1), tokens(61, 2))
    # The library itself fills this cache, and remembers all of it.
    recorded = empty_cache(inspect_cache(model))
    model.generate(input_ids, attention_mask=mask, past_key_values=recorded, **GREEDY)
    with attach(model, tmp_path / "kv", **SMALL) as kv:
        kv.generate(input_ids, attention_mask=mask, **GREEDY)
    # Rows of 100 and 61 tokens have 96 and 48 in whole chunks; the second has 39 columns of padding, so both resume
    # at column 87.
    memory = model.generate(input_ids, attention_mask=mask, past_key_values=in_memory(model, recorded, 87), **LOGITS)
    here = str(Path(__file__).parent)
    there = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}  # the tests' own folders
    command = [sys.executable, "-c", PROCESS, name, str(tmp_path / "kv"), str(tmp_path / "result.npz")]
    done = subprocess.run(command, cwd=here, env=there, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    record = np.load(tmp_path / "result.npz")
    assert np.array_equal(record["sequences"], memory.sequences.numpy())
    assert np.array_equal(record["logits"], logits(memory).numpy())
    with attach(model, tmp_path / "kv", **SMALL) as kv:
        kv.generate(batch(tokens(50, 9))[0], **GREEDY)
        assert kv.last.restored_by_source == {"directory": 48}


@pytest.mark.parametrize("make", [llama, gemma3])
def test_generated_tokens_are_restored_in_the_next_turn(make: Any, attached: Attach) -> None:
    model, kv = make(), attached(make())
    turn = tokens(40, 1)
    for number in range(3):
        input_ids, mask = batch(turn)
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}
        plain = model.generate(input_ids, **options)
        output, report = kv.generate(input_ids, return_report=True, **options)
        assert torch.equal(plain, output)
        # All but the last generated token of the turn before have KV.
        known = len(turn) - 15 - 1 if number else 0
        assert report.restored_tokens == known // CHUNK * CHUNK
        turn = output[0].tolist() + tokens(15, number + 2)


def test_the_last_prompt_token_is_always_computed(attached: Attach) -> None:
    for make in (llama, gemma3):
        model = make()
        kv = attached(model)
        input_ids, _ = batch(tokens(4 * CHUNK, 1))
        # One more chunk is generated, so that all of the prompt has KV.
        long = kv.generate(input_ids, do_sample=False, max_new_tokens=CHUNK + 1, min_new_tokens=CHUNK + 1)
        again = kv.generate(input_ids, do_sample=False, max_new_tokens=CHUNK + 1, min_new_tokens=CHUNK + 1)
        assert torch.equal(long, again)
        assert (kv.last.restored_tokens, kv.last.computed_tokens) == (4 * CHUNK - 1, 1)
        assert kv.last.stored_chunks == len(kv._current().shape.groups), "only what was generated is new"


def test_a_prompt_shorter_than_a_chunk_costs_nothing_and_grows_into_one(kv: Any) -> None:
    input_ids, _ = batch(tokens(CHUNK - 1, 1))
    kv.generate(input_ids, **GREEDY)
    assert kv.last.stored_chunks == 1
    assert kv.last.lookup_s < 1.0
    one, _ = batch([5])
    assert torch.equal(kv.generate(one, **GREEDY), kv.model.generate(one, **GREEDY))
    assert kv.last.stored_chunks == 0


@pytest.mark.parametrize("make", [llama, mistral])
def test_sampling_draws_the_same_tokens(make: Any, attached: Attach) -> None:
    model = make()
    kv = attached(model)
    input_ids, _ = batch(tokens(70, 3))
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": 12, "min_new_tokens": 12}
    drawn = []
    for generate in (model.generate, kv.generate, kv.generate):
        torch.manual_seed(11)
        drawn.append(generate(input_ids, **options))
    assert kv.last.restored_tokens == 64
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_inference_mode_and_prefill_in_pieces(attached: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (llama, gemma3):
        model = make()
        kv = attached(model)
        input_ids, _ = batch(tokens(90, 4))
        plain = model.generate(input_ids, **GREEDY)
        with torch.inference_mode():
            assert torch.equal(kv.generate(input_ids, **GREEDY), plain)
            kv.flush()
            assert torch.equal(kv.generate(input_ids, **GREEDY), plain)
        assert kv.last.restored_tokens == 80
        longer, _ = batch(tokens(90, 4) + tokens(30, 5))
        plain = model.generate(longer, prefill_chunk_size=7, **GREEDY)
        assert torch.equal(kv.generate(longer, prefill_chunk_size=7, **GREEDY), plain)
        assert kv.last.restored_tokens == (80 if support.CONTINUES_IN_PIECES else 0)
        # Releases that ignore a filled cache there would generate wrong tokens.
        monkeypatch.setattr(support, "CONTINUES_IN_PIECES", False)
        assert torch.equal(kv.generate(longer, prefill_chunk_size=7, **GREEDY), plain)
        assert kv.last.restored_tokens == 0
        assert "prefill_chunk_size is 7" in kv.last.uncached_reason


def test_a_prompt_larger_than_host_memory_is_restored_whole(attached: Attach) -> None:
    model = llama()
    kv = attached(model, host__capacity_bytes="1MiB", store__chunk_tokens=64)
    input_ids, _ = batch(tokens(1900, 6))
    assert 1900 // 64 * chunk_bytes(kv._current().layout) > 1 << 20
    plain = model.generate(input_ids, **GREEDY)
    assert torch.equal(kv.generate(input_ids, **GREEDY), plain)
    kv.flush()
    assert kv.stored.dropped == 0
    kv.close()
    again = attached(model, host__capacity_bytes="1MiB", store__chunk_tokens=64)
    assert torch.equal(again.generate(input_ids, **GREEDY), plain)
    assert again.last.restored_tokens == 1900 // 64 * 64


def test_a_damaged_file_is_a_miss_and_heals(attached: Attach, tmp_path: Path) -> None:
    for make in (llama, gemma3):
        directory = tmp_path / make.__name__
        model = make()
        plain = model.generate(PROMPT, **GREEDY)
        kv = attached(model, directory=directory)
        kv.generate(PROMPT, **GREEDY)
        kv.close()
        objects = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 4096]
        for path in objects:
            data = bytearray(path.read_bytes())
            data[-100] ^= 1
            path.write_bytes(data)
        kv = attached(model, directory=directory)
        assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
        assert kv.last.restored_tokens == 0
        assert kv.last.stored_chunks
        kv.close()
        kv = attached(model, directory=directory)
        assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
        assert kv.last.restored_tokens == 96


@pytest.mark.parametrize("make", [llama, gemma3])
def test_damaged_files_behind_a_boundary_keep_what_lies_before_it(
    make: Any, attached: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the tier still lists them: a bad copy is removed behind the load's back, sooner or later."""
    model = make()
    plain = model.generate(PROMPT, **GREEDY)
    kv = attached(model)
    kv.generate(batch(tokens(100, 1)[:40])[0], **GREEDY)
    kv.flush()
    kv.close()
    before = set((tmp_path / "kv").rglob("*"))
    kv = attached(model)
    kv.generate(PROMPT, **GREEDY)
    kv.close()
    later = [path for path in set((tmp_path / "kv").rglob("*")) - before if path.is_file()]
    for path in later:
        if path.stat().st_size > 4096:
            path.write_bytes(b"\0" * path.stat().st_size)
    delete = DirectoryTier.delete

    def late(self: DirectoryTier, name: Any) -> None:
        time.sleep(0.3)
        delete(self, name)

    monkeypatch.setattr(DirectoryTier, "delete", late)
    kv = attached(model)
    assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
    assert kv.last.restored_tokens == 32
    assert kv.last.uncached_reason == "", "tensors of a window end where they were planned to, so it is planned again"
