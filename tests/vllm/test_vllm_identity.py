"""KV is found only by requests and engines that it belongs to."""

import json
import re
import shutil
from pathlib import Path

import pytest
import sabotage
from engines import LONG, Expected, Start
from harness import Ask, in_process
from judge import TOLERANCE, apart
from models import make_adapter
from settings import CHUNK, connector, whole
from storage import codecs, heads
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

LOSSY_ID = 5
"""Of the codec int4."""


@pytest.mark.vllm_core
def test_requests_share_kv_only_under_the_same_salt(start: Start, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    hits = []
    for salt in ("exact:", "exact:", "b", "", "", "b"):  # without a lossy class, the first is one like any other
        hits.append(engine.hits_of(LONG, salt=salt))
        engine.forget()
    all_of_it = whole(len(LONG))
    assert hits == [0, all_of_it, 0, 0, all_of_it, all_of_it]
    engine.close()
    again = start("llama", connector(tmp_path / "kv"))
    assert [again.hits_of(LONG, salt=salt) for salt in "bc"] == [all_of_it, 0]


@pytest.mark.vllm_core
def test_a_salt_gets_exact_answers_from_an_engine_that_stores_kv_with_loss(
    start: Start, expected: Expected, tmp_path: Path
) -> None:
    wanted, all_of_it = expected("llama")["long"], whole(len(LONG))
    lossy = connector(tmp_path / "kv", store__loss="int4", journal__path=str(tmp_path / "journal"))
    first = start("llama", lossy, sabotage="sabotage:declare_axes")
    assert apart(first.ask(LONG, salt="exact:")[0], wanted) == 0
    assert first.hits_of(Ask(LONG, salt="exact:one"), Ask(LONG, salt="exact:one")) == 0
    assert apart(first.ask_and_close(LONG)[0], wanted) == 0, "what is stored was computed"
    assert len(codecs(tmp_path / "kv")) == len(LONG) // CHUNK, "nothing of the others was stored"
    assert all(LOSSY_ID in it for it in codecs(tmp_path / "kv"))

    second = start("llama", lossy, sabotage="sabotage:declare_axes")
    inexact, exact = second.ask(LONG)[0], second.ask(LONG, salt="exact:")[0]
    assert second.external_hits() == all_of_it
    assert apart(inexact, wanted) > 10 * TOLERANCE, "the control: KV with loss gives another answer"
    assert exact.cached == 0, "vLLM keeps blocks apart that were loaded"
    assert apart(exact, wanted) == 0
    again = second.ask_in_turn(Ask(LONG, salt="exact:"), Ask(LONG))
    assert [it.cached for it in again] == [(len(LONG) - 1) // 128 * 128] * 2
    assert apart(again[0], wanted) < TOLERANCE < apart(again[1], wanted)
    assert [(it.transfer or {}).get("kvtier") for it in (inexact, exact, *again)] == [
        {"loss": "int4", "loaded_tokens": all_of_it},
        {"loss": "none", "loaded_tokens": 0},
        {"loss": "none", "loaded_tokens": 0},
        {"loss": "int4", "loaded_tokens": 0},
    ]
    wait_until(
        lambda: second.drain() or second.metrics()["vllm:kvtier_lossy_load_tokens{loss=int4}"] == all_of_it,
        "the count",
        60,
    )
    second.close()
    assert "this engine stores KV with loss (int4)" in second.printed()
    lines = [json.loads(it) for file in (tmp_path / "journal").iterdir() for it in file.read_text().splitlines()]
    told = [(it["loss"], sum(it["loaded_tokens"].values())) for it in lines if it["kind"] == "request"]
    assert sorted(told) == sorted([*[("int4", 0)] * 2, ("int4", all_of_it), *[("none", 0)] * 5])


@pytest.mark.vllm_core
def test_adapters_have_kv_of_their_own(start: Start, checkpoints: Path, tmp_path: Path) -> None:
    with_adapters = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    one, two = tmp_path / "one", tmp_path / "two"
    shutil.copytree(checkpoints / "adapter-1", one)
    shutil.copytree(checkpoints / "adapter-2", two)
    asked = [Ask(LONG), Ask(LONG, lora=str(one), lora_number=1), Ask(LONG, lora=str(two), lora_number=2)]
    plain = [start("llama", **with_adapters).ask(it)[0] for it in asked]
    assert apart(plain[0], plain[1]) > 1.0
    assert apart(plain[1], plain[2]) > 1.0

    first = start("llama", connector(tmp_path / "kv"), **with_adapters)
    for it, wanted in zip(asked, plain, strict=True):
        assert apart(first.ask(it)[0], wanted) == 0
    assert first.external_hits() == 0
    first.close()
    second = start("llama", connector(tmp_path / "kv"), **with_adapters)
    for it, wanted in zip(asked, plain, strict=True):
        assert apart(second.ask(it)[0], wanted) < TOLERANCE
    assert second.external_hits() == 3 * whole(len(LONG))
    second.close()

    # Another adapter of the same name at the same path is another adapter.
    shutil.rmtree(one)
    in_process(make_adapter, checkpoints / "llama", one, 3)
    third = start("llama", connector(tmp_path / "kv"), **with_adapters)
    assert apart(third.ask(asked[1])[0], plain[1]) > 1.0
    assert third.external_hits() == 0


@pytest.mark.vllm_core
def test_an_adapter_that_changes_before_vllm_reads_it_names_no_kv(
    start: Start, checkpoints: Path, tmp_path: Path
) -> None:
    sources = {name: str(checkpoints / f"adapter-{number}") for number, name in enumerate(("one", "two"), 1)}
    path, directory = tmp_path / "one", tmp_path / "kv"
    shutil.copytree(sources["one"], path)
    one, two = Ask(LONG, lora=str(path)), Ask(LONG, lora=sources["two"], lora_number=2)
    # vLLM holds one adapter: each that is used evicts the other.
    engine = start("llama", connector(directory), enable_lora=True, max_lora_rank=8, max_loras=1)
    wrong = engine.do("changes:ask_and_replace", LONG, str(path), 1, sources["two"])
    engine.forget()
    assert engine.hits_of(one) == 0
    assert not heads(directory)
    assert wrong == engine.ask(two)[0].tokens, "the worker has read the files that came later"
    assert len(re.findall(r" WARNING .*is not cached: .* of adapter 'one'", engine.printed())) == 1

    # Loaded again unchanged, it is cached again, apart from what vLLM has computed with the wrong files.
    engine.do("changes:replace_adapter", str(path), sources["one"])
    engine.ask(two)
    engine.forget()
    right = engine.ask(one)[0].tokens
    assert right != wrong
    engine.forget()
    assert engine.hits_of(one) == 0, "the request before this one has loaded it"
    engine.forget()
    assert engine.hits_of(one) == whole(len(LONG))

    # Evicted, it is read again, and its KV must not be loaded for what is read then.
    engine.ask(two)
    engine.forget()
    assert engine.do("changes:ask_and_replace", LONG, str(path), 1, sources["two"]) == wrong
    engine.forget()
    assert engine.hits_of(one) == 0
    engine.close()

    again = start("llama", connector(directory), enable_lora=True, max_lora_rank=8, max_loras=1)
    shutil.copytree(sources["one"], path, dirs_exist_ok=True)
    assert again.ask(one)[0].tokens == right
    assert again.external_hits() == whole(len(LONG))


@pytest.mark.vllm_core
def test_a_reset_forgets_what_the_connector_knows_only_if_told_so(start: Start, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    engine.ask(LONG)
    assert engine.forget()
    assert engine.hits_of(LONG) == whole(len(LONG))
    assert engine.forget(everywhere=True)
    assert engine.hits_of(LONG) == 0, "everything from before the reset is a miss"
    engine.forget()
    assert engine.hits_of(LONG) == whole(len(LONG)), "and what is stored since then is not"
    assert "the cache was reset: this engine no longer finds the KV stored before" in engine.printed()
    engine.close()
    again = start("llama", connector(tmp_path / "kv"))
    assert again.hits_of(LONG) == whole(len(LONG)), "the names from before hold again"
    again.close()
    # And those of the reset do not: of two prompts, one was computed only after it.
    third = start("llama", connector(tmp_path / "other"))
    third.forget(everywhere=True)
    third.ask_and_close(LONG)
    assert start("llama", connector(tmp_path / "other")).hits_of(LONG) == 0


@pytest.mark.vllm_core
def test_what_changes_the_numbers_or_their_place_is_another_fingerprint(start: Start, tmp_path: Path) -> None:
    start("llama", connector(tmp_path / "kv")).ask_and_close(LONG)
    for other in ({"dtype": "bfloat16"}, {"block_size": 64}, {"hf_overrides": {"rope_parameters": ROPE}}):
        engine = start("llama", connector(tmp_path / "kv"), **other)
        assert engine.hits_of(LONG) == 0, other
        engine.close()
    # The control: the same engine, under limits that change no number.
    same = start("llama", connector(tmp_path / "kv"), max_model_len=2048, kv_cache_memory_bytes=32 << 20)
    assert same.hits_of(LONG) == whole(len(LONG))


ROPE = {"rope_type": "default", "rope_theta": 20000.0}


@pytest.mark.vllm_core
def test_engines_without_weight_files_share_nothing(start: Start, tmp_path: Path) -> None:
    for _ in range(2):
        engine = start("llama", connector(tmp_path / "kv"), load_format="dummy")
        assert engine.hits_of(LONG) == 0
        engine.forget()
        assert engine.hits_of(LONG) == whole(len(LONG)), "within a process it is the same model"
        assert re.search(r" WARNING .*KV is kept in host memory only: its weights are random", engine.printed())
        engine.close()


@pytest.mark.parametrize("how", [pytest.param("replace", marks=pytest.mark.vllm_core), "rewrite", "link"])
def test_weights_that_change_after_vllm_has_read_them_name_no_kv(
    how: str, start: Start, checkpoints: Path, tmp_path: Path
) -> None:
    model, weights = tmp_path / "model", tmp_path / "model" / "model.safetensors"
    shutil.copytree(checkpoints / "llama", model)
    if how == "link":  # as in a hub's cache
        weights.rename(model / "blob")
        weights.symlink_to("blob")
    engine = start(model, connector(tmp_path / "kv"), **sabotage.changing(weights, "loaded", how))
    plain = engine.ask(LONG)[0]
    engine.forget()
    assert engine.hits_of(LONG) == whole(len(LONG)), "within the process it is the same model"
    engine.close()
    assert engine.private() == [f"KV is kept in host memory only: {weights} changed while the engine started"]
    assert not heads(tmp_path / "kv")
    # The control: an engine of the new weights answers otherwise. Nothing changes while it starts, so it shares.
    other = start(model, connector(tmp_path / "kv"))
    assert apart(other.ask(LONG)[0], plain) > TOLERANCE
    other.close()
    assert not other.private()
    assert heads(tmp_path / "kv")


@pytest.mark.vllm_core
def test_weights_that_a_download_brings_while_the_engine_starts_are_shared(
    start: Start, checkpoints: Path, tmp_path: Path
) -> None:
    model, weights = tmp_path / "model", tmp_path / "model" / "model.safetensors"
    shutil.copytree(checkpoints / "llama", model)
    fields = sabotage.changing(weights, "download", "replace")
    weights.rename(f"{weights}.other")
    engine = start(model, connector(tmp_path / "kv"), **fields)
    engine.ask_and_close(LONG)
    assert not engine.private()
    assert start("llama", connector(tmp_path / "kv")).hits_of(LONG) == whole(len(LONG)), "the same weights elsewhere"
