"""Ranks that share the tokens of a block (DCP): each loads its own share, and a chunk counts when all shares are there.

Attention is `context_parallel`'s, in torch: vLLM's kernels for the CPU know no context parallelism. Prefill context
parallelism does not run here: vLLM has it in its second model runner alone, which needs Triton.
"""

from pathlib import Path
from typing import Any

import pytest
from engines import ARGUMENTS, LONG, Start
from harness import Ask, Engine, EngineError, in_process
from judge import TOLERANCE, apart, furthest, prompt
from models import make_checkpoint
from settings import CHUNK, connector, whole
from storage import damage_behind, shares
from test_vllm_ranks import TWO
from test_vllm_ranks import pytestmark as needs_two_cores

pytestmark = needs_two_cores

TORCH = TWO | {"worker_extension_cls": "context_parallel.Workers"}
OTHER = prompt(len(LONG), 77)
SHARED = TORCH | {"decode_context_parallel_size": 2}


def in_workers(*places: str) -> dict[str, Any]:
    """Arguments of an engine whose workers call these functions first."""
    return SHARED | {"environment": TWO["environment"] | {"IN_WORKERS": ",".join(places)}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with one KV head, of which both ranks have a copy without DCP."""
    place = tmp_path / "model"
    in_process(make_checkpoint, "llama-mqa", place)
    return place


def pages(engine: Engine) -> list[list[str]]:
    """What the ranks hold of the whole chunks of the last request, which was `LONG`."""
    return engine.do("draft_pages:by_rank", whole(len(LONG)))


@pytest.mark.vllm_core
def test_each_rank_loads_its_own_share(model: Path, start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    first = start(model, connector(directory), **SHARED)
    first.do("draft_pages:watch")
    plain, computed = first.ask(LONG)[0], pages(first)
    assert len({*computed[0], *computed[1]}) == 2 * len(computed[0])
    assert first.external_hits() == 0
    first.forget()
    assert apart(first.ask(LONG)[0], plain) < TOLERANCE
    assert pages(first) == computed
    assert first.external_hits() == whole(len(LONG))
    first.close()
    parts = [f"layers 0-2, heads 0-0, token share {rank} of 2" for rank in range(2)]
    assert shares(directory) == [(depth, part) for depth in range(len(LONG) // CHUNK) for part in parts]

    second = start(model, connector(directory), **SHARED)
    second.do("draft_pages:watch")
    assert apart(second.ask(LONG)[0], plain) < TOLERANCE
    assert pages(second) == computed
    assert second.external_hits() == whole(len(LONG))


def test_a_share_of_another_rank_would_show(model: Path, start: Start, tmp_path: Path) -> None:
    """The control of the test above. Two shares that change places show in the pages alone.

    Attention reads a token's position from its key, so it does not matter which rank holds it.
    """
    directory = tmp_path / "kv"
    first = start(model, connector(directory), **SHARED)
    first.do("draft_pages:watch")
    plain, computed = first.ask(LONG)[0], pages(first)
    first.close()
    swapped = start(model, connector(directory), **in_workers("context_parallel:swap"))
    swapped.do("draft_pages:watch")
    assert apart(swapped.ask(LONG)[0], plain) < TOLERANCE
    assert swapped.external_hits() == whole(len(LONG))
    assert pages(swapped) == computed[::-1]
    swapped.close()
    with pytest.raises(EngineError, match="two ranks may not claim the same copy of a part"):
        start(model, connector(directory), **in_workers("context_parallel:all_are_first"))


def test_engines_of_other_shapes_on_the_same_store_miss(model: Path, start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    plain = start(model, connector(directory), **SHARED).ask_and_close(LONG)[0]
    for shape in (TORCH, SHARED | {"cp_kv_cache_interleave_size": 16}):
        other = start(model, connector(directory), **shape)
        assert apart(other.ask(LONG)[0], plain) < TOLERANCE
        assert other.external_hits() == 0
        other.forget()
        assert apart(other.ask(LONG)[0], plain) < TOLERANCE
        assert other.external_hits() == whole(len(LONG))
        other.close()


def test_shares_of_latents_come_back_and_damaged_ones_are_misses(start: Start, tmp_path: Path) -> None:
    directory, place, latent = tmp_path / "kv", tmp_path / "model", SHARED | ARGUMENTS["deepseek"]
    in_process(make_checkpoint, "deepseek", place)
    plain = start(place, None, **latent).ask_and_close(LONG)[0]
    start(place, connector(directory), **latent).ask_and_close(LONG)
    assert damage_behind(directory, 3)
    second = start(place, connector(directory), **latent)
    assert second.hits_of(LONG[: 3 * CHUNK + 1]) == 3 * CHUNK
    # The look-up promises the damaged chunks, too. Nor do the blocks that vLLM keeps hold anything else then.
    assert apart(second.ask(LONG)[0], plain) < TOLERANCE
    assert apart(second.ask(LONG)[0], plain) < TOLERANCE


def test_shapes_of_one_latent_share_a_store(start: Start, tmp_path: Path) -> None:
    """Each shape loads all that the other has stored, and a token's bytes are those that the other has computed."""
    directory, place = tmp_path / "kv", tmp_path / "model"
    in_process(make_checkpoint, "deepseek", place)
    kept, latent = connector(directory, store__token_shares=2), ARGUMENTS["deepseek"]

    def opened(shape: dict[str, Any]) -> Engine:
        engine = start(place, kept, **shape | latent)
        engine.do("draft_pages:watch")
        return engine

    def by_token(engine: Engine) -> Any:
        return engine.do("draft_pages:by_token", whole(len(LONG)))

    alone = opened(TORCH)
    plain, computed = alone.ask(LONG)[0], by_token(alone)
    assert alone.external_hits() == 0
    alone.close()
    parts = [f"layers 0-2, heads 0-0, token share {rank} of 2" for rank in range(2)]
    assert shares(directory) == [(depth, part) for depth in range(len(LONG) // CHUNK) for part in parts]

    divided = opened(SHARED)
    assert apart(divided.ask(LONG)[0], plain) < TOLERANCE
    assert divided.external_hits() == whole(len(LONG))
    assert by_token(divided) == computed
    other, stored = divided.ask(OTHER)[0], by_token(divided)
    assert divided.external_hits() == whole(len(LONG))
    divided.close()

    again = opened(TORCH)
    assert apart(again.ask(OTHER)[0], other) < TOLERANCE
    assert again.external_hits() == whole(len(OTHER))
    assert by_token(again) == stored != computed
    again.close()

    misled = opened(in_workers("context_parallel:hold_the_other"))
    misled.ask(LONG)
    assert misled.external_hits() == whole(len(LONG))
    assert by_token(misled) != computed
    misled.close()

    turns = start(place, kept, **SHARED | latent | {"cp_kv_cache_interleave_size": 16})
    assert apart(turns.ask(LONG)[0], plain) < TOLERANCE
    assert turns.external_hits() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("token_shares", [0, 4])
def test_ranks_with_equal_shares_store_them_once(token_shares: int, start: Start, tmp_path: Path) -> None:
    """Four workers on two cores: the first and the third, and the second and the fourth, hold the same."""
    directory, place = tmp_path / "kv", tmp_path / "model"
    in_process(make_checkpoint, "deepseek", place)
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "|".join([TWO["environment"]["VLLM_CPU_OMP_THREADS_BIND"]] * 2)}
    four = SHARED | ARGUMENTS["deepseek"] | {"tensor_parallel_size": 4, "environment": cores}
    kept, count = connector(directory, store__token_shares=token_shares), token_shares or 2
    plain = start(place, kept, **four).ask_and_close(LONG)[0]
    parts = [f"layers 0-2, heads 0-0, token share {rank} of {count}" for rank in range(count)]
    assert shares(directory) == [(depth, part) for depth in range(len(LONG) // CHUNK) for part in parts]
    second = start(place, kept, **four)
    second.do("draft_pages:watch")
    assert apart(second.ask(LONG)[0], plain) < TOLERANCE
    assert second.external_hits() == whole(len(LONG))
    held = pages(second)
    assert held[0] == held[2] != held[1] == held[3]


GROWING = [Ask(prompt(500 + 11 * number, number), count=80, logprobs=1) for number in range(8)]


def test_a_storm_of_preemptions_changes_no_answer(model: Path, start: Start, tmp_path: Path) -> None:
    small = {"block_size": 32, "max_model_len": 1300, "max_num_seqs": 8}
    calm = start(model, None, **SHARED | small)
    plain = calm.ask(*GROWING)
    calm.close()
    # Room for four of eight requests, and copies that are late.
    storm = in_workers("sabotage:slow_copies") | small | {"num_gpu_blocks_override": 40}
    engine = start(model, connector(tmp_path / "kv"), **storm)
    for _ in ("store", "load"):
        assert furthest(engine.ask(*GROWING, limit_s=600), plain) < TOLERANCE
        engine.forget()
    assert engine.metrics()["vllm:num_preemptions"] > 0
    assert engine.external_hits() > 0


def test_a_rank_with_another_share_than_its_number_says_stops_the_start(model: Path, start: Start) -> None:
    with pytest.raises(EngineError, match=r"rank 1 holds token share 0 of 2 according to vLLM's groups .* 1 of 2"):
        start(model, connector(None), **in_workers("context_parallel:say_first"))


@pytest.mark.parametrize(
    ("runner", "reason"), [("0", "V1 does not support: prefill context parallel"), ("1", "V2 requires Triton")]
)
def test_prefill_context_parallelism_does_not_run_on_this_wheel(
    runner: str, reason: str, model: Path, start: Start
) -> None:
    """When it does, the tests above want a case with it."""
    shape = {"prefill_context_parallel_size": 2, "environment": {"VLLM_USE_V2_MODEL_RUNNER": runner}}
    with pytest.raises(EngineError, match=f"Model Runner {reason}"):
        start(model, None, **shape)
