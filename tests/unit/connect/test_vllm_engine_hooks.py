"""The table of reaches into vLLM: what is missing is named at the start, and no other file reaches into vLLM."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from kvtier.connect.vllm import engine_hooks, installed_engine
from kvtier.connect.vllm.engine_hooks import HOOKS, Hook, OnStack, check
from kvtier.errors import ConfigError

FOLDER = Path(engine_hooks.__file__).parent
OWN_OR_TORCH = {"connector.py": 2, "weight_changes.py": 4}
"""Files that use private names of kvtier's connector and of torch's modules, and how often."""


class Pool:
    """Stands for a class of vLLM."""

    def __init__(self) -> None:
        self.blocks = []

    def touch(self, blocks):
        """A method."""


@pytest.fixture
def lacks(monkeypatch):
    """Compare a row with `vllm.pool`, which has `Pool`. Return what is missing."""
    monkeypatch.setitem(sys.modules, "vllm.pool", SimpleNamespace(Pool=Pool))
    monkeypatch.setattr(installed_engine, "installed", lambda: "0.32.1")

    def compare(*places: str, without: str = "") -> None:
        hook = Hook("the pool", "scheduler", "kvtier pins blocks.", places, without)
        monkeypatch.setattr(engine_hooks, "HOOKS", (hook,))
        check("engine")
        check("scheduler")

    return compare


def test_what_vllm_has_is_not_reported(lacks, caplog):
    lacks("pool:Pool", "pool:Pool touch", "pool:Pool.touch blocks", "pool:Pool.__init__ blocks")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("place", "missing"),
    [
        ("other:Pool", "vllm.other:Pool"),
        ("pool:Pool.pin", "vllm.pool:Pool.pin"),
        ("pool:Pool touch pin", "pin in vllm.pool:Pool"),
        ("pool:Pool.touch blocks pin", "pin in vllm.pool:Pool.touch"),
        ("pool:Pool.__init__ free queue", "free in vllm.pool:Pool.__init__, queue in vllm.pool:Pool.__init__"),
    ],
)
def test_what_vllm_lacks_stops_the_start_or_is_a_warning(lacks, caplog, place, missing):
    text = f"vLLM has no {missing} (the pool). kvtier pins blocks."
    with pytest.raises(ConfigError, match=re.escape(f"{text} Install vLLM 0.32.1 as it was published")):
        lacks(place)
    lacks(place, without="Nothing is pinned.")
    assert caplog.messages == [f"{text} Nothing is pinned."]


def test_a_release_that_is_not_supported_is_the_first_reason(lacks, monkeypatch):
    monkeypatch.setattr(installed_engine, "installed", lambda: "0.40.0")
    with pytest.raises(ConfigError, match=r"^vLLM 0\.40\.0 is not supported"):
        lacks("pool:Pool.pin")


def test_each_object_from_the_stack_is_in_the_table():
    """Each is found in a function that sets it, or as a method of its own."""
    known = {name for hook in HOOKS if "(stack)" in hook.name for it in hook.places for name in re.findall(r"\w+", it)}
    assert set(get_args(OnStack)) <= known | {"vllm_config"}
    assert any("vllm_config" in place for hook in HOOKS for place in hook.places)


def test_no_other_file_reads_the_stack_or_private_names_of_vllm():
    files = {it.name: it.read_text() for it in FOLDER.rglob("*.py") if it.name != "engine_hooks.py"}
    assert len(files) > 30
    readers = [
        name for name, text in files.items() if re.search(r"currentframe|walk_stack|inspect\.stack|_getframe", text)
    ]
    assert readers == []
    assert {name: text.count("SLF001") for name, text in files.items() if "SLF001" in text} == OWN_OR_TORCH


def test_the_comparison_needs_no_torch():
    program = "import sys; from kvtier.connect.vllm import engine_hooks; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
