"""The command line: quick help, one clear line for every mistake, the exit codes, and stdout with the result alone."""

import json
import subprocess
import sys

import click
import pytest

from kvtier.cli.main import COMMANDS, cli, run
from kvtier.tier import registry

DIGITS = "0123456789abcdef" * 4


pytestmark = pytest.mark.usefixtures("no_settings")


HEAVY = {
    "numpy",
    "xxhash",
    "rich",
    "torch",
    "transformers",
    "matplotlib",
    "zstandard",
    "json",
    "asyncio",
    "kvtier.config",
}
LIGHT = {"kvtier.cli.main"}


@pytest.mark.parametrize(
    ("arguments", "is_light"), [(["--help"], True), (["--version"], True), (["config", "show"], False)]
)
def test_help_starts_quickly_and_names_every_command(arguments, is_light):
    """The promise is 150 ms. What it takes is imports; how long they take depends on the machine, so they are named."""
    code = "import sys; from kvtier.cli.main import run; run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stderr.split())
    assert "click" in loaded
    assert (not {name for name in loaded if name in HEAVY or name.startswith("kvtier.cli.")} - LIGHT) == is_light
    if arguments == ["--help"]:
        assert all(f"  {name} " in done.stdout for name in COMMANDS)


KINDS = "from kvtier.tier.registry import built_in, by_name; [by_name(each) for each in built_in()]"
"""Makes every kind of tier declare itself."""
COMMAND = "from kvtier.cli.main import run; run(sys.argv[1:])"


@pytest.mark.parametrize(
    ("code", "arguments", "is_light"),
    [
        (KINDS, "", True),
        (COMMAND, "--help", True),
        (COMMAND, "config", True),
        (COMMAND, "config show", True),
        (COMMAND, "vllm config", True),
        (COMMAND, "vllm config --tier disk:PLACE --tier directory:PLACE", True),
        (COMMAND, "sglang config", True),
        (COMMAND, "inspect --help", False),
    ],
)
def test_what_only_looks_at_settings_imports_neither_numpy_nor_a_tier(code, arguments, is_light, tmp_path):
    """The last command is the control: it reads frames."""
    words = arguments.replace("PLACE", str(tmp_path / "kv")).split()
    found = f"import sys; {code}; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", found, *words], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stderr.split())
    heavy = {"numpy", "mooncake", "valkey", *(f"kvtier.tier.{each}.tier" for each in registry.names())}
    assert ("click" in loaded and "obstore" not in loaded) or code == KINDS
    assert (not loaded & heavy) == is_light


OPTIONAL = (
    "torch",
    "transformers",
    "matplotlib",
    "zstandard",
    "numba",
    "obstore",
    "valkey",
    "mooncake",
    "pyarrow",
    "msgspec",
)
"""Packages of extras. A wheel without extras has none of them."""


@pytest.mark.parametrize("is_needed", [False, True])
def test_every_command_has_help_without_any_extra(is_needed):
    """The negative control also takes away a package that every command needs."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({(*OPTIONAL, *["click"] * is_needed)!r}))  # None: an import fails
from kvtier.cli.main import COMMANDS, run
bad = [name for name in COMMANDS if run([name, "--help"]) != 0]
sys.exit(str(bad) if bad else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode != 0) == is_needed, done.stderr


@pytest.mark.parametrize("module", ["raise ImportError('libssl')", "", None])
def test_a_broken_package_or_an_old_release_is_refused_with_the_settings(module, tmp_path):
    """The last one, the installed package, is the control."""
    if module is not None:
        (tmp_path / "obstore").mkdir()
        (tmp_path / "obstore" / "__init__.py").write_text("")
        (tmp_path / "obstore" / "store.py").write_text(module)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {COMMAND}"
    words = ["config", "show", "--tier", "s3:bucket/prefix"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True)
    assert ("needs a package" in done.stderr) == (module is not None)


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvtier 0.")


def test_without_a_command_the_help_is_shown(capsys):
    assert run([]) == 2
    assert "Usage: kvtier" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["nosuch"], ["--nosuch"], ["config"], ["config", "show", "--nosuch"], ["config", "show", "extra"]]
)
def test_wrong_usage_ends_with_2_and_says_so_on_stderr(capsys, arguments):
    assert run(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Usage: kvtier" in told.err


def test_a_wrong_setting_is_one_clear_line_on_stderr(capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_HOST__CAPACITY_BYTES", "12 parsecs")
    assert run(["config", "show", "--json"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(
        "kvtier: host.capacity_bytes = '12 parsecs' (from environment KVTIER_HOST__CAPACITY_BYTES): "
        "not a size; allowed: bytes as an integer"
    )
    assert told.err.count("\n") == 1


def test_show_tells_every_value_and_its_origin(capsys, tmp_path, monkeypatch):
    file = tmp_path / "kvtier.toml"
    file.write_text('[host]\ncapacity_bytes = "512MiB"\n')
    monkeypatch.setenv("KVTIER_LIMITS__STORES_IN_FLIGHT", "7")
    arguments = ["config", "show", "--file", str(file), "--set", "store.write_policy=back"]
    assert run([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["file"] == str(file)
    shown = told["settings"]
    assert shown["host.capacity_bytes"]["value"] == 2**29
    assert shown["host.capacity_bytes"]["from"] == f"file {file}"
    assert shown["limits.stores_in_flight"]["from"] == "environment KVTIER_LIMITS__STORES_IN_FLIGHT"
    assert shown["store.write_policy"] | {"help": ""} == {
        "value": "back",
        "text": "back",
        "from": "flag --set store.write_policy",
        "default": "through",
        "allowed": "through, back, selective",
        "help": "",
    }
    assert run(arguments) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in shown)
    assert "512 MiB" in table


def test_secrets_are_never_printed(capsys):
    for arguments in (["--json"], []):
        assert run(["config", "show", "--set", f"store.secret={DIGITS}", *arguments]) == 0
        told = capsys.readouterr()
        assert "0123456789" not in told.out + told.err
        assert "(set)" in told.out
    assert run(["config", "show", "--set", f"store.secret={DIGITS}x"]) == 2
    assert "0123456789" not in capsys.readouterr().err


def test_check_ends_with_1_when_something_will_not_work(capsys, tmp_path):
    (tmp_path / "file").write_text("x")
    small = ["--set", "host.capacity_bytes=1MiB", "--set", "tiers.directory.capacity_bytes=1MiB"]
    bad = ["config", "check", *small, "--tier", f"directory:{tmp_path / 'file'}"]
    assert run(bad) == 1
    assert f"error: tiers.directory.path = {tmp_path / 'file'} (from flag --tier)" in capsys.readouterr().out
    assert run([*bad, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["findings"][0]["setting"] == "tiers.directory.path"
    good = ["config", "check", *small, "--tier", f"directory:{tmp_path / 'kv'}"]
    assert run(good) == 0
    assert capsys.readouterr().out == "the settings can work here\n"
    assert not (tmp_path / "kv").exists()


def test_a_warning_alone_is_not_bad(capsys, tmp_path):
    arguments = ["--set", "host.capacity_bytes=1MiB", "--tier", f"directory:{tmp_path}?capacity_bytes=1000TiB"]
    assert run(["config", "check", *arguments]) == 0
    told = capsys.readouterr().out
    assert told.startswith("warning: tiers.directory.capacity_bytes")
    assert told.endswith("\nthe settings can work here, but not as expected: see the warnings\n")


def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m kvtier.cli.main config show --json"
    script = f"{command} | true; echo ${{PIPESTATUS[0]}}"
    # The reader is gone before the first byte: nothing may appear on stderr.
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() in {"141", "0"}  # 0: all of it fitted into the pipe before the reader left


def test_a_full_pipe_that_closes_ends_with_141(tmp_path):
    script = "import sys; sys.argv = ['kvtier']; from kvtier.cli import main as m; import click\n"
    script += (
        "m.cli.add_command(click.Command('flood', callback=lambda: [click.echo('x' * 1000) for _ in range(10000)]))\n"
    )
    script += "m.main(['flood'])"
    (tmp_path / "flood.py").write_text(script)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "flood.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as flood:
        flood.stdout.readline()
        flood.stdout.close()
        errors = flood.stderr.read()
        assert flood.wait(60) == 141
    assert errors == ""


def test_ctrl_c_ends_quietly(tmp_path):
    script = "from kvtier.cli import main as m; import click, os, signal\n"
    script += "def act():\n    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n"
    script += "m.cli.add_command(click.Command('hang', callback=act))\n"
    script += "m.main(['hang'])"
    (tmp_path / "hang.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "hang.py")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_every_command_of_the_table_can_be_reached():
    context = click.Context(cli)
    for name, (_, help_text) in COMMANDS.items():
        assert help_text.endswith(".")
        assert isinstance(cli.get_command(context, name), click.Command)
