"""What tests of commands share: no settings of the machine's user, and a machine that is large enough."""

import os
from types import SimpleNamespace

import pytest

from kvtier.cli.main import cli
from kvtier.config import machine_checks
from kvtier.errors import ConfigError
from kvtier.tier.files import path_checks


@pytest.fixture
def no_settings(monkeypatch):
    """The environment without kvtier's variables."""
    for name in [name for name in os.environ if name.startswith("KVTIER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def refusal(capsys):
    """Runs a command that is refused; the error. Nothing is printed to stdout."""

    def call(*arguments: object) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            cli.main([*map(str, arguments)], standalone_mode=False)
        assert capsys.readouterr().out == ""
        return caught.value

    return call


@pytest.fixture
def large_machine(monkeypatch):
    """The default settings need more than a small machine has; `check` is tested elsewhere."""
    monkeypatch.setattr(path_checks, "disk_usage", lambda _: SimpleNamespace(total=2**40, used=0, free=2**40))
    monkeypatch.setattr(machine_checks, "_memory", lambda: (2**40, "the memory of this machine"))
