"""KV is found only by requests and engines that it belongs to."""

import re
import shutil
from pathlib import Path

import pytest
from engines import LONG, Start
from harness import Ask, in_process
from judge import TOLERANCE, apart
from models import make_adapter
from settings import connector, whole

pytestmark = [pytest.mark.engine, pytest.mark.vllm_core]


def test_requests_share_kv_only_under_the_same_salt(start: Start, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    hits = []
    for salt in ("a", "a", "b", "", "", "b"):
        hits.append(engine.hits_of(LONG, salt=salt))
        engine.forget()
    all_of_it = whole(len(LONG))
    assert hits == [0, all_of_it, 0, 0, all_of_it, all_of_it]
    engine.close()
    again = start("llama", connector(tmp_path / "kv"))
    assert [again.hits_of(LONG, salt=salt) for salt in "bc"] == [all_of_it, 0]


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


def test_a_reset_forgets_what_the_connector_knows_only_if_told_so(start: Start, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    engine.ask(LONG)
    assert engine.forget()
    assert engine.hits_of(LONG) == whole(len(LONG))
    assert engine.forget(everywhere=True)
    assert engine.hits_of(LONG) == 0, "everything from before the reset is a miss"
    engine.forget()
    assert engine.hits_of(LONG) == whole(len(LONG)), "and what is stored since then is not"
    assert "the cache was reset: this engine does not find KV stored before" in engine.printed()
    engine.close()
    again = start("llama", connector(tmp_path / "kv"))
    assert again.hits_of(LONG) == whole(len(LONG)), "the names from before hold again"
    again.close()
    # And those of the reset do not: of two prompts, one was computed only after it.
    third = start("llama", connector(tmp_path / "other"))
    third.forget(everywhere=True)
    third.ask_and_close(LONG)
    assert start("llama", connector(tmp_path / "other")).hits_of(LONG) == 0


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


def test_engines_without_weight_files_share_nothing(start: Start, tmp_path: Path) -> None:
    for _ in range(2):
        engine = start("llama", connector(tmp_path / "kv"), load_format="dummy")
        assert engine.hits_of(LONG) == 0
        engine.forget()
        assert engine.hits_of(LONG) == whole(len(LONG)), "within a process it is the same model"
        assert re.search(r" WARNING .*KV is kept in host memory only: its weights are random", engine.printed())
        engine.close()
