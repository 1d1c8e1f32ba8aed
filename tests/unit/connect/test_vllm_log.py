"""kvtier's lines reach vLLM's handlers, at the level that vLLM or the setting `log.level` names."""

import io
import logging

import pytest

from kvtier.config.sections import LogConfig
from kvtier.connect.vllm.vllm_logging import follow_engine
from kvtier.errors import ConfigError
from kvtier.runtime import locked_core

FORMAT = "%(levelname)s [%(filename)s] %(message)s"


@pytest.fixture(autouse=True)
def loggers():
    """The loggers as Python makes them; afterwards as they were."""
    both = [logging.getLogger(name) for name in ("kvtier", "vllm")]
    before = [(each.level, each.handlers, each.propagate, each.parent) for each in both]
    for each in both:
        each.handlers, each.propagate, each.parent = [], True, logging.root
        each.setLevel(logging.NOTSET)
    yield
    for each, (level, each.handlers, each.propagate, each.parent) in zip(both, before, strict=True):
        each.setLevel(level)


def configured(name: str, level: str) -> io.StringIO:
    """What is shown by a logger with a handler of its own, as vLLM configures it: both have the level."""
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.setLevel(level)
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return shown


def test_lines_go_where_vllms_go():
    shown = configured("vllm", "INFO")
    follow_engine()
    follow_engine()  # the scheduler's half and a worker's in one process
    locked_core.logger.info("tier directory is open again")
    locked_core.logger.debug("not shown")
    assert shown.getvalue() == "INFO [test_vllm_log.py] tier directory is open again\n"


@pytest.mark.parametrize(
    ("engines", "level", "expected"),
    [
        ("INFO", "engine", ["INFO", "WARNING"]),
        ("WARNING", "engine", ["WARNING"]),
        ("WARNING", "info", ["INFO", "WARNING"]),
        ("INFO", "debug", ["DEBUG", "INFO", "WARNING"]),
        ("DEBUG", "error", []),
    ],
)
def test_the_level_is_vllms_or_the_settings(engines, level, expected):
    shown = configured("vllm", engines)
    follow_engine(level)
    for name in ("debug", "info", "warning"):
        getattr(locked_core.logger, name)("a line")
    assert [line.partition(" ")[0] for line in shown.getvalue().splitlines()] == expected


@pytest.mark.parametrize("level", ["engine", "info"])
def test_vllm_without_handlers_leaves_lines_to_the_root(monkeypatch, level):
    """VLLM_CONFIGURE_LOGGING=0: the user configures the root, or nothing."""
    monkeypatch.setattr(logging.root, "handlers", [])
    shown = configured("root", "INFO")
    follow_engine(level)
    locked_core.logger.info("to the root")
    assert shown.getvalue().endswith("to the root\n")


def test_handlers_that_the_user_gives_kvtier_stay():
    vllms, ours = configured("vllm", "INFO"), configured("kvtier", "WARNING")
    follow_engine()
    locked_core.logger.info("below the user's level")
    locked_core.logger.warning("to the user's handler")
    assert vllms.getvalue() == ""
    assert ours.getvalue().endswith("to the user's handler\n")


def test_a_level_that_is_none_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"log\.level = 'loud'.*engine, debug, info, warning"):
        LogConfig(level="loud")
