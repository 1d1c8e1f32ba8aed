"""A vLLM that was never tried is taken only with the result of its test for this build, model and layout."""

import threading
from dataclasses import replace

import pytest

from kvtier.config.sections import Config, LimitsConfig, VllmConfig
from kvtier.connect.vllm import selftest
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.tier import store_notes as notes
from kvtier.tier.directory.kind import DirectorySettings

BUILD, MODEL = "0.1.dev7 build 0123456789abcdef", bytes(range(32))
LAYOUT = KvLayout(256, (GroupLayout(History(), (4096,), "pages"),))


@pytest.fixture
def config(tmp_path):
    return Config(
        tiers=(DirectorySettings(path=tmp_path / "kv"),),
        vllm=VllmConfig(unsupported="allow"),
        limits=LimitsConfig(open_deadline_s=30.0),
    )


@pytest.fixture
def tested(config, tmp_path):
    """`config`, with a result beside its store."""
    during = replace(
        config, vllm=VllmConfig(unsupported="selftest"), tiers=(DirectorySettings(path=tmp_path / "tested"),)
    )
    selftest.check(during, BUILD, MODEL, LAYOUT)
    config.tiers[0].path.mkdir()
    assert selftest.publish(tmp_path / "tested", config.tiers[0].path) == 1
    return config


def test_a_release_that_was_tried_needs_no_result(config):
    selftest.check(config, "0.32.0", MODEL, LAYOUT)


def test_without_a_result_an_engine_is_refused(config):
    with pytest.raises(ConfigError, match=r"is not supported, and .*kv holds no self-test result .* --selftest"):
        selftest.check(config, BUILD, MODEL, LAYOUT)
    nowhere = replace(config, tiers=())
    with pytest.raises(ConfigError, match=r"allowed: --tier disk:PATH or --tier directory:PATH"):
        selftest.check(nowhere, BUILD, MODEL, LAYOUT)


def test_a_result_counts_for_its_build_model_and_layout(tested):
    selftest.check(tested, BUILD, MODEL, LAYOUT)
    other = KvLayout(256, (GroupLayout(History(), (4096,), "other pages"),))
    for build, model, layout in ((BUILD + "0", MODEL, LAYOUT), (BUILD, bytes(32), LAYOUT), (BUILD, MODEL, other)):
        with pytest.raises(ConfigError, match="is not supported"):
            selftest.check(tested, build, model, layout)


def test_a_test_that_is_under_way_or_failed_is_no_result(config, tmp_path):
    during = replace(config, vllm=VllmConfig(unsupported="selftest"))
    selftest.check(during, BUILD, MODEL, LAYOUT)
    assert len(notes.read(config.tiers[0].path, "selftest")) == 1
    with pytest.raises(ConfigError, match="is not supported"):
        selftest.check(config, BUILD, MODEL, LAYOUT)


def test_a_damaged_result_is_none(tested):
    (note,) = tested.tiers[0].path.glob("note-selftest-*")
    note.write_bytes(note.read_bytes().replace(b"true", b"null"))
    with pytest.raises(ConfigError, match="is not supported"):
        selftest.check(tested, BUILD, MODEL, LAYOUT)


def test_a_place_that_hangs_costs_a_deadline_and_is_refused(tested, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(notes, "read", lambda *_: release.wait(60))
    with pytest.raises(ConfigError, match="is not supported"):
        selftest.check(replace(tested, limits=LimitsConfig(open_deadline_s=0.05)), BUILD, MODEL, LAYOUT)
    release.set()
