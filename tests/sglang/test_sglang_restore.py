"""Pages of SGLang's host pools come back byte-equal, through SGLang's controllers, and never wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import LAYOUTS, PAGE, Engine, engine, equal, mha, mla

pytestmark = pytest.mark.sglang_core

PROMPT = range(8 * PAGE)
LONGER = [*PROMPT, *range(9000, 9000 + 2 * PAGE)]
Start = Callable[..., Engine]


def test_sglangs_own_file_backend_is_the_control(server: None, tmp_path: Path) -> None:
    """The harness drives SGLang's own backend to the same result."""
    with engine({"file_storage_path": str(tmp_path)}, backend="file") as own:
        stored, pages = own.backup(PROMPT)
        found = own.prefetch(LONGER)
    assert (stored, found.hit, found.completed) == (len(PROMPT), len(PROMPT), len(PROMPT))
    assert equal(found.pages, pages)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_byte_equal(start: Start, layout: str) -> None:
    """Backup and prefetch of a prompt whose end is new."""
    engine = start(layout=layout)
    stored, pages = engine.backup(PROMPT)
    found = engine.prefetch(LONGER)
    assert (stored, found.hit, found.completed) == (len(PROMPT), len(PROMPT), len(PROMPT))
    assert equal(found.pages, pages)
    assert engine.prefetch(range(500, 500 + 4 * PAGE)).hit == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_outlive_the_engine(start: Start, layout: str) -> None:
    """A new engine with the same model and layout finds them, and another layout does not."""
    first = start(layout=layout)
    _, pages = first.backup(PROMPT)
    first.controller.detach_storage_backend()
    assert equal(start(layout=layout).prefetch(PROMPT).pages, pages)


@pytest.mark.parametrize("other", LAYOUTS[1:])
def test_another_layout_is_a_miss(start: Start, other: str, tmp_path: Path) -> None:
    """Pages of equal size, in another order of their bytes."""
    first = start(layout="layer_first" if other == "page_first" else "page_first")
    assert first.backup(PROMPT)[0] == len(PROMPT)
    first.controller.detach_storage_backend()
    assert start(layout=other).prefetch(PROMPT).hit == 0


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_latents_come_back_byte_equal(start: Start, layout: str) -> None:
    """Multi-head latent attention: one piece per page or layer."""
    engine = start(pools=mla(layout))
    stored, pages = engine.backup(PROMPT)
    found = engine.prefetch(LONGER)
    assert (stored, found.completed) == (len(PROMPT), len(PROMPT))
    assert equal(found.pages, pages)


def test_many_pages_go_in_several_batches(start: Start) -> None:
    """SGLang calls with at most 128 pages."""
    engine = start(pools=mha("page_first", tokens=300 * PAGE))
    prompt = range(300 * PAGE)
    stored, pages = engine.backup(prompt)
    found = engine.prefetch(prompt)
    assert (stored, found.completed) == (len(prompt), len(prompt))
    assert equal(found.pages, pages)


def test_attach_and_detach_at_run_time(start: Start, tmp_path: Path) -> None:
    """A controller gets the backend again, and finds what it stored."""
    engine = start()
    controller: Any = engine.controller
    _, pages = engine.backup(PROMPT)
    controller.detach_storage_backend()
    assert not controller.enable_storage
    controller.attach_storage_backend(
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="the/model",
        storage_backend_extra_config={
            "backend_name": "kvtier",
            "module_path": "kvtier.connect.sglang",
            "class_name": "KvtierStorage",
            "interface_v1": 1,
            "tiers": [f"directory:{tmp_path / 'store'}"],
        },
    )
    assert equal(engine.prefetch(PROMPT).pages, pages)
