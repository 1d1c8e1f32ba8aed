"""Tensor parallel ranks: uneven hits, other sizes, and a cache that one rank writes for all."""

import json
import multiprocessing
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_shim

pytestmark = pytest.mark.sglang_core

torchvision_shim.install()
from engines import PAGE, chain, checkpoint, engine, equal, mla, published  # noqa: E402 - after the stand-in

PROMPT = range(8 * PAGE)
WAIT_S = 300.0


def shared(store: Path) -> dict[str, Any]:
    """A tier that all ranks use."""
    return {"tiers": [{"kind": "directory", "path": str(store), "shared": True}]}


def in_ranks(work: Callable[..., object], count: int, *args: object) -> list[Any]:
    """The results of `work` in `count` processes with a process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(work.__name__, rank, count, port, results, args)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
    assert [process.exitcode for process in processes] == [0] * count
    found = dict(json.loads(results.get()) for _ in range(count))
    return [found[rank] for rank in range(count)]


def _rank(work: str, rank: int, count: int, port: int, results: Any, args: tuple[Any, ...]) -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    group = torch.distributed.group.WORLD
    results.put(json.dumps([rank, getattr(sys.modules[__name__], work)(rank, count, group, *args)]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def partial(rank: int, count: int, group: Any, model: str, store: str) -> list[Any]:
    """Rank 0 stores eight pages, and rank 1 five."""
    mine = PROMPT if rank == 0 else PROMPT[: 5 * PAGE]
    with published(model, ranks=(rank, count)), engine({"tiers": [f"directory:{store}/{rank}"]}, group=group) as it:
        stored, pages = it.backup(mine, seed=rank)
        alone = it.storage.batch_exists(chain(PROMPT))
        found = it.prefetch(PROMPT)
        return [stored, alone * PAGE, found.hit, found.completed, equal(found.pages, pages[:5])]


def one_writer(rank: int, count: int, group: Any, model: str, store: str) -> list[Any]:
    """A cache of latents in a shared directory: SGLang backs it up on rank 0 alone."""
    with published(model, ranks=(rank, count)), engine(shared(Path(store)), pools=mla("page_first"), group=group) as it:
        stored, pages = it.backup(PROMPT, seed=7)
        torch.distributed.barrier()
        found = it.prefetch(PROMPT)
        return [stored, found.hit, found.completed, equal(found.pages, pages)]


def test_ranks_agree_on_the_shorter_hit(tmp_path: Path) -> None:
    """Each rank has its own heads, and SGLang takes the minimum."""
    model = checkpoint(tmp_path / "model")
    first, second = in_ranks(partial, 2, str(model), str(tmp_path / "store"))
    assert first == [8 * PAGE, 8 * PAGE, 5 * PAGE, 5 * PAGE, True]
    assert second == [5 * PAGE, 5 * PAGE, 5 * PAGE, 5 * PAGE, True]


def test_one_rank_writes_latents_for_all(tmp_path: Path) -> None:
    """Its objects have the same names on all ranks, and each is stored once."""
    model, store = checkpoint(tmp_path / "model"), tmp_path / "store"
    first, second = in_ranks(one_writer, 2, str(model), str(store))
    assert first == [8 * PAGE, 8 * PAGE, 8 * PAGE, True]
    assert second == [0, 8 * PAGE, 8 * PAGE, True]
    large = [each for each in (store / "objects").rglob("*") if each.is_file() and each.stat().st_size > PAGE * 160]
    assert len(large) == 8


def test_other_sizes_are_misses(tmp_path: Path) -> None:
    """Rank 0 of two holds other heads than rank 0 of four."""
    model, prompt = checkpoint(tmp_path / "model"), list(PROMPT)
    with published(model, ranks=(0, 2)), engine(shared(tmp_path / "store")) as it:
        assert it.backup(prompt)[0] == len(prompt)
    for ranks in ((0, 4), (1, 2), (0, 1)):
        with published(model, ranks=ranks), engine(shared(tmp_path / "store")) as it:
            assert it.prefetch(prompt).hit == 0
    with published(model, ranks=(0, 2)), engine(shared(tmp_path / "store")) as it:
        assert it.prefetch(prompt).hit == len(prompt)


def test_ranks_of_latents_share_across_sizes(tmp_path: Path) -> None:
    """Each rank of any size holds the same latents."""
    model, prompt = checkpoint(tmp_path / "model"), list(PROMPT)
    with published(model, ranks=(0, 2)), engine(shared(tmp_path / "store"), pools=mla("page_first")) as it:
        _, pages = it.backup(prompt)
    with published(model, ranks=(3, 4)), engine(shared(tmp_path / "store"), pools=mla("page_first")) as it:
        assert equal(it.prefetch(prompt).pages, pages)
