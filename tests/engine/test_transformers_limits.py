"""What cannot be served is refused with a clear message, or computed as if kvtier were not there, with a reason."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attaching import SMALL, Attach
from tests.rig import Raise
from tests.waiting import wait_until
from tiny_transformers import _made, batch, gemma3, llama, tokens
from transformers import DynamicCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from kvtier.connect.transformers import attach
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.connect.transformers.support import inspect_cache
from kvtier.errors import ConfigError, TierError, UnsupportedModelError

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
PROMPT = batch(tokens(70, 1))[0]


def static(model: Any) -> Any:
    model.generation_config.cache_implementation = "static"
    return model


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no model": (object, "object is not a transformers PreTrainedModel"),
    "encoder-decoder": (
        lambda: _made("T5ForConditionalGeneration", "T5Config", 2, d_model=48, d_kv=12, d_ff=64, num_heads=4),
        "encoder-decoder",
    ),
    "no generation": (lambda: _made("BertForMaskedLM", "BertConfig", 2), "cannot generate"),
    "state space": (lambda: _made("MambaForCausalLM", "MambaConfig", 2), "cache of class LinearAttentionLayer"),
    "hybrid": (lambda: _made("JambaForCausalLM", "JambaConfig", 4), "cache of class LinearAttentionLayer"),
    "chunked attention": (
        lambda: _made(
            "Llama4ForCausalLM", "Llama4TextConfig", 2, head_dim=12, attention_chunk_size=32, intermediate_size_mlp=64
        ),
        "chunked attention",
    ),
    "looks ahead": (lambda: gemma3(use_bidirectional_attention=True), "attends to later tokens"),
    "own cache": (lambda: _made("RwkvForCausalLM", "RwkvConfig", 2), "does not use the cache that it is given"),
    "static cache": (lambda: static(llama()), "cache_implementation is 'static'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_when_it_is_attached(name: str) -> None:
    build, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        attach(build(), **SMALL)
    assert "allowed: " in str(caught.value)


class LooksAhead(transformers.LlamaForCausalLM):
    """A model whose configuration does not say that its tokens see later ones."""

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded + embedded.mean(dim=1, keepdim=True), **inputs)


def test_attention_to_later_tokens_is_noticed_where_nothing_tells_of_it() -> None:
    torch.manual_seed(0)
    model = LooksAhead(llama().config).eval()
    with pytest.raises(UnsupportedModelError, match=r"changes by .* with the tokens after it"):
        inspect_cache(model)


PASSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams is 2"),
    "several answers": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2"),
    "no cache": ({"use_cache": False}, "use_cache is False"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is True"),
    "positions": ({"position_ids": torch.arange(70)[None]}, "model input 'position_ids'"),
    "own cache": ({"past_key_values": DynamicCache()}, "past_key_values was given"),
}


@pytest.mark.parametrize("name", PASSED)
def test_an_option_that_cannot_be_served_passes_through_with_a_reason(
    name: str, kv: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options, reason = PASSED[name]
    kv.generate(PROMPT, **GREEDY)
    results = []
    for generate in (kv.model.generate, kv.generate, kv.generate):
        torch.manual_seed(5)
        fresh = {"past_key_values": DynamicCache()} if "past_key_values" in options else {}
        results.append(generate(PROMPT, **(GREEDY | options | fresh)))
    sequences = [result if isinstance(result, torch.Tensor) else result.sequences for result in results]
    assert torch.equal(sequences[0], sequences[1])
    assert torch.equal(sequences[0], sequences[2])
    assert reason in kv.last.uncached_reason
    assert (kv.last.restored_tokens, kv.last.stored_chunks, kv.last.computed_tokens) == (0, 0, 70)
    assert [record.message for record in caplog.records].count(
        f"a call did not use the cache: {kv.last.uncached_reason} (logged once)"
    ) == 1


def test_inputs_that_are_no_left_padded_tokens_pass_through(kv: Any) -> None:
    rows, mask = batch(tokens(40, 1), tokens(30, 2))
    for hidden in (mask.flip(1), torch.cat([mask[:, :5], 0 * mask[:, :1], mask[:, 6:]], dim=1)):
        output = kv.generate(rows, attention_mask=hidden, **GREEDY)
        assert torch.equal(output, kv.model.generate(rows, attention_mask=hidden, **GREEDY))
        assert "allowed: padding on the left" in kv.last.uncached_reason
    embedded = kv.model.get_input_embeddings()(PROMPT)
    output = kv.generate(inputs_embeds=embedded, **GREEDY)
    assert torch.equal(output, kv.model.generate(inputs_embeds=embedded, **GREEDY))
    assert "model input 'inputs_embeds'" in kv.last.uncached_reason
    output = kv.generate(**GREEDY)
    assert torch.equal(output, kv.model.generate(**GREEDY))
    assert "not a tensor input_ids" in kv.last.uncached_reason


def test_training_mode_and_autocast_pass_through(kv: Any) -> None:
    kv.model.train()
    kv.generate(PROMPT, **GREEDY)
    assert "training mode" in kv.last.uncached_reason
    kv.model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kv.generate(PROMPT, **GREEDY)
    assert "autocast" in kv.last.uncached_reason
    kv.generate(PROMPT, **GREEDY)
    assert kv.last.uncached_reason == ""
    assert kv.last.restored_tokens == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"host__capacity": "1GiB"}, r"host\.capacity .*unknown setting; did you mean capacity_bytes"),
        ({"hosts__capacity_bytes": "1GiB"}, "hosts .*unknown section"),
        ({"store__chunk_tokens": -5}, "store.chunk_tokens = -5"),
        ({"host__capacity_bytes": "1 parsec"}, "host.capacity_bytes"),
        ({"held_calls": 0}, "held_calls must be at least 1"),
        ({"tiers": ["disk:/elsewhere"]}, "directory and tiers are both given"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], reason: str, attached: Attach) -> None:
    with pytest.raises(ConfigError, match=reason):
        attached(llama(), **settings)


def test_a_directory_that_is_a_file_is_one_error(
    attached: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("mine")
    attached(llama(), directory=tmp_path / "file").generate(PROMPT, **GREEDY)
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "file' is not a directory" in told
    assert "kvtier starts without this tier" in told
    assert (tmp_path / "file").read_text() == "mine"


def broken(*_: Any, **__: Any) -> Any:
    raise TierError("test", "planned")


@pytest.mark.parametrize("method", ["lookup", "load", "store", "poll", "release"])
def test_a_session_that_fails_costs_speed_and_no_answer(
    method: str, kv: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = kv.model.generate(PROMPT, **GREEDY)
    kv.generate(PROMPT, **GREEDY)
    kv.flush()
    with monkeypatch.context() as patch:
        patch.setattr(type(kv.session), method, broken)
        for _ in range(3):
            assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
        if method != "store":
            assert "planned" in kv.last.uncached_reason
        longer, _ = batch(tokens(70, 1) + tokens(40, 2))
        assert torch.equal(kv.generate(longer, **GREEDY), kv.model.generate(longer, **GREEDY))
        assert "planned" in kv.last.uncached_reason
    assert len([record for record in caplog.records if "planned" in record.message]) == 1
    assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
    assert kv.last.restored_tokens == 64, "and it goes on when the session does"


BELOW_SESSION = ("/core/", "/runtime/", "/policy/", "/observe/", "/types.py")
"""The user's thread runs the core under the session's lock; an exception there shuts the session."""


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.nightly)])
def test_whatever_a_call_of_ours_raises_nothing_stays_open_and_the_next_call_is_served(
    attached: Attach, step: int
) -> None:
    """Every `step`-th call of kvtier in the user's thread raises once; inside the model's forward it fails the call."""
    model = llama()
    longer, _ = batch(tokens(70, 1) + tokens(40, 2))
    plain = model.generate(longer, **GREEDY)

    def run(site: Any) -> Raise:
        kv = attached(model)
        kv.generate(PROMPT, **GREEDY)
        assert kv.flush()
        with Raise(site, KeyError, lambda frame: frame.f_code.co_name in ("generate", "_generate")) as planted:
            try:
                assert torch.equal(kv.generate(longer, **GREEDY), plain), planted.where
            except KeyError as error:
                assert "planted" in str(error)  # noqa: PT017
        assert torch.equal(kv.generate(longer, **GREEDY), plain), planted.where
        if kv.session._is_broken:  # an internal error, as any in the core: kvtier is off, and says so once
            assert planted.where.startswith(BELOW_SESSION), planted.where
            wait_until(lambda: kv.flush() or not kv.stored.pending_calls, "the session's thread, which ends them", 30.0)
        else:
            assert kv.last.restored_tokens >= 64, planted.where
            assert kv.flush(), planted.where
        assert kv.stored.pending_calls == 0
        kv.close()
        return planted

    sites = run(None).sites
    assert len(sites) > 100
    for site in sites[::step]:
        run(site)


@contextmanager
def held_copies(way: str) -> Iterator[threading.Event]:
    """Copies, of `gather` or `scatter`, wait until the event is set."""
    copy, go_on = getattr(CacheCopier, way), threading.Event()

    def slow(self: CacheCopier, *arguments: Any) -> Any:
        assert go_on.wait(60)
        return copy(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheCopier, way, slow)
        yield go_on


@pytest.mark.parametrize("make", [llama, gemma3])
def test_a_load_that_is_late_is_computed_instead(make: Any, attached: Attach) -> None:
    model = make()
    plain = model.generate(PROMPT, **GREEDY)
    kv = attached(model, limits__load_deadline_s=2.0)  # what is on time takes less, on a busy machine too
    kv.generate(PROMPT, **GREEDY)
    kv.flush()
    with held_copies("scatter") as go_on:
        output, report = kv.generate(PROMPT, return_report=True, **GREEDY)
        assert "1/0/0" in kv._current().requests._copier._rows, "what still writes keeps its tensors"
        go_on.set()
    assert torch.equal(output, plain)
    assert report.restored_tokens == 0
    assert 1.9 < report.lookup_s + report.load_s < 30
    assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
    kv.flush()
    kv.generate(PROMPT, **GREEDY)
    assert kv.last.restored_tokens == 64


def test_too_many_calls_that_are_still_being_stored_are_not_stored(attached: Attach) -> None:
    kv = attached(llama(), held_calls=2)
    stored = []
    with held_copies("gather") as go_on:
        for seed in range(4):
            kv.generate(batch(tokens(70, seed))[0], **GREEDY)
            stored.append(kv.last.stored_chunks)
        assert stored == [4, 4, 0, 0]
        assert (kv.stored.pending_calls, kv.stored.dropped) == (2, 8)
        go_on.set()
        assert kv.flush()
    assert (kv.stored.pending_calls, kv.stored.held) == (0, 8)


def test_a_cache_that_is_returned_is_the_callers_own(kv: Any) -> None:
    with held_copies("gather") as go_on:
        threading.Timer(0.5, go_on.set).start()
        output = kv.generate(PROMPT, return_dict_in_generate=True, **GREEDY)
    assert kv.stored.pending_calls == 0, "its tensors are copied before the call returns"
    for layer in output.past_key_values.layers:
        layer.keys.zero_()
    plain = kv.model.generate(PROMPT, **GREEDY)
    assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
    assert kv.last.restored_tokens == 64


class Collected(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.parts.append([])


class StopAfter(StoppingCriteria):
    """Stops at a length."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 73, device=input_ids.device)


def test_a_streamer_and_stopping_criteria_work_as_without(kv: Any) -> None:
    streams = []
    for generate in (kv.model.generate, kv.generate, kv.generate):
        streamer = Collected()
        output = generate(PROMPT, do_sample=False, max_new_tokens=8, streamer=streamer, stopping_criteria=[StopAfter()])
        assert output.shape[1] == 73
        streams.append(streamer.parts)
    assert streams[0] == streams[1] == streams[2]
    assert 0 < kv.last.ttft_s <= kv.last.wall_s
    assert kv.last.lookup_s + kv.last.load_s <= kv.last.ttft_s


def test_threads_take_turns(kv: Any) -> None:
    prompts = [batch(tokens(60, seed))[0] for seed in range(3)]
    plain = [kv.model.generate(prompt, **GREEDY) for prompt in prompts]
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(3):
            output, report = kv.generate(prompts[number], return_report=True, **GREEDY)
            if not torch.equal(output, plain[number]) or report.prompt_tokens != 60:
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def test_closed_attachments_compute_and_two_share_a_directory(attached: Attach) -> None:
    model = llama()
    plain = model.generate(PROMPT, **GREEDY)
    first, second = attached(model), attached(model)
    first.generate(PROMPT, **GREEDY)
    closed = first.close()
    assert closed is not None
    assert closed.flushed
    assert first.close() is None
    assert torch.equal(first.generate(PROMPT, **GREEDY), plain)
    assert first.last.uncached_reason == "the attachment is closed"
    with pytest.raises(ConfigError, match="closed"):
        _ = first.session
    assert torch.equal(second.generate(PROMPT, **GREEDY), plain)
    assert second.last.restored_by_source == {"directory": 64}


def test_what_is_said_in_the_log_is_said_by_us(attached: Attach, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kvtier"):
        attached(llama())
    assert any("MB were digested in" in record.message for record in caplog.records)
