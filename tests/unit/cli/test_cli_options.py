"""Options that are paths: a missing directory is named, an unwritable file is refused before any work."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import pytest

from kvtier.cli.main import cli, run
from kvtier.cli.options import OutputFile, Quantity
from kvtier.config.loader import load as load_settings
from kvtier.errors import ConfigError
from kvtier.report.output import write_file, write_json
from kvtier.tools.options import Bytes
from kvtier.tools.plan.read_inputs import load as load_inputs
from kvtier.tools.trace.arrays import write_lines

LINE = {"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [1]}
MEASURING = [["probe", "--quick"], ["bench", "io"]]
WRITING = [
    ["probe", "--record"],
    ["probe", "--report"],
    ["probe", "--picture"],
    ["bench", "core", "--record"],
    ["bench", "io", "--record"],
    ["bench", "io", "--report"],
    ["bench", "tier", "disk:/x", "--record"],
    ["plan", "llama-3.1-8b", "--report"],
    ["plan", "llama-3.1-8b", "--picture"],
    ["demo", "--record"],
    ["demo", "--report"],
    ["replay", "nothing.jsonl", "--report"],
    ["replay", "nothing.jsonl", "--keep"],
    ["trace", "convert", "nothing.jsonl"],
    ["trace", "synthesize"],
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    return path


@pytest.mark.parametrize("command", MEASURING)
def test_a_directory_that_is_missing_is_named_and_not_made(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--dir", str(tmp_path / "drive" / "a b")]) == 2
    told = capsys.readouterr().err
    assert f"directory '{tmp_path}/drive/a b' does not exist, only '{tmp_path}' does" in told
    assert f"mkdir -p '{tmp_path}/drive/a b'" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo.png")
    for path, words in (
        (tmp_path, "is a directory"),
        (tmp_path / "file" / "x.png", "cannot be written"),
        (tmp_path / "nowhere" / "x.png", f"there is no directory '{tmp_path}/nowhere'"),
        (tmp_path / "fifo.png", "is not a regular file"),
    ):
        assert run([*command, str(path)]) == 2
        told = capsys.readouterr()
        assert words in told.err
        assert told.out == ""
    assert {it.name for it in tmp_path.iterdir()} == {"file", "fifo.png"}


def test_a_file_that_was_written_is_told(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, record = tmp_path / "c.jsonl", tmp_path / "e.json"
    assert run(["trace", "convert", str(trace), str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    assert run(["bench", "core", "--repeats", "1", "--record", str(record), "--json"]) == 0
    told = capsys.readouterr()
    assert f"Written: {record}" in told.err
    assert json.loads(told.out)
    assert target.exists()
    assert record.exists()


OVERWRITING = [
    ["bench", "core", "--repeats", "1", "--record"],
    ["plan", "llama-3.1-8b", "--tp", "8", "--report"],
    ["plan", "llama-3.1-8b", "--tp", "8", "--picture"],
    ["replay", "TRACE", "--policy", "lru", "--report"],
    ["replay", "TRACE", "--policy", "lru", "--picture"],
    ["trace", "convert", "TRACE"],
    ["trace", "anonymize", "TRACE"],
    ["trace", "synthesize", "--requests", "20"],
]


@pytest.mark.parametrize("command", OVERWRITING, ids=" ".join)
def test_a_file_that_was_there_is_kept_beside_the_new_one(
    command: list[str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.svg"
    target.write_text("years of work")
    (tmp_path / "out.svg.1").write_text("older work")
    words = [str(trace) if word == "TRACE" else word for word in (*command, str(target))]
    assert run(words) == 0
    assert f"Kept: the earlier out.svg is now {target}.2" in capsys.readouterr().err
    assert (tmp_path / "out.svg.1").read_text() == "older work"
    assert (tmp_path / "out.svg.2").read_text() == "years of work"
    assert target.read_text() != "years of work"


def test_an_equal_file_is_not_kept_and_a_command_replaces_its_own(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    for _ in range(3):
        assert run(["trace", "convert", str(trace), str(target)]) == 0
    assert "Kept" not in capsys.readouterr().err
    with click.Context(cli):
        target.write_text("earlier")
        OutputFile().convert(str(target), None, None)
        for part in range(3):  # a record is written after each part
            write_json("--record", target, {"parts": part})
    assert {it.name for it in tmp_path.iterdir()} == {"trace.jsonl", "out.jsonl", "out.jsonl.1"}
    assert (tmp_path / "out.jsonl.1").read_text() == "earlier"
    assert json.loads(target.read_text()) == {"parts": 2}


@pytest.fixture
def earlier(tmp_path: Path) -> Iterator[Path]:
    """A file that was there before a command, which is running and names it."""
    target = tmp_path / "out"
    target.write_text("earlier")
    with click.Context(cli):
        OutputFile().convert(str(target), None, None)
        yield target


def test_a_file_that_vanished_meanwhile_costs_no_result(earlier: Path) -> None:
    earlier.unlink()
    write_file("--report", earlier, b"new")
    assert [(it.name, it.read_text()) for it in earlier.parent.iterdir()] == [("out", "new")]


def test_a_file_that_cannot_be_compared_is_kept(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_paths: Path, shallow: bool) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), shallow)

    monkeypatch.setattr("kvtier.report.output.cmp", unreadable)
    write_file("--report", earlier, b"new")
    assert (earlier.read_text(), earlier.with_name("out.1").read_text()) == ("new", "earlier")


@pytest.mark.parametrize("has_links", [True, False])
def test_no_name_that_is_taken_is_used_for_an_earlier_file(
    earlier: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to nowhere and a file that came after a look at the names are taken, too."""
    earlier.with_name("out.1").symlink_to("nowhere")
    earlier.with_name("out.2").write_text("another's")
    monkeypatch.setattr(Path, "exists", lambda _path: False)

    def no_link(*_paths: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        monkeypatch.setattr(os, "link", no_link)
    write_file("--report", earlier, b"new")
    assert earlier.with_name("out.1").readlink() == Path("nowhere")
    assert [earlier.with_name(f"out{it}").read_text() for it in ("", ".2", ".3")] == ["new", "another's", "earlier"]


def test_the_earlier_file_stays_where_the_new_one_cannot_be_put(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_draft: Path, _name: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file("--report", earlier, b"new")
    assert earlier.read_text() == "earlier"


def test_a_commands_own_output_is_no_file_to_replace(trace: Path, tmp_path: Path) -> None:
    """A redirected stdout is a regular file, and replacing it would take what is printed away from its reader."""
    command = [sys.executable, "-m", "kvtier.cli.main", "trace", "anonymize", str(trace), "/dev/stdout"]
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, "is the output of this command" in done.stderr) == (2, True)
    assert {it.name for it in tmp_path.iterdir()} == {"trace.jsonl", "out"}


def test_a_links_target_is_what_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("missing/out")
    with pytest.raises(ConfigError, match=f"no directory '{tmp_path}/missing'"):
        OutputFile().convert(str(tmp_path / "link"), None, None)


class Closed(io.StringIO):
    """A pipe without a reader."""

    def write(self, _text: str, /) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "core", "--repeats", "1"],
        ["probe", "--size", "4KiB", "--depth", "1", "--seconds", "0.01", "--bytes", "1MiB", "--dir", "DIR"],
        ["bench", "tier", "disk:DIR", "--sample", "1MiB", "--size", "64KiB", "--repeats", "1"],
    ],
    ids=lambda it: " ".join(it[:2]),
)
def test_a_record_is_written_before_anything_is_printed(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Closed())
    words = [it.replace("DIR", str(tmp_path)) for it in command]
    with pytest.raises(BrokenPipeError):
        run([*words, "--record", str(tmp_path / "record")])
    assert json.loads((tmp_path / "record").read_text())["results"]


WRITTEN = {
    "bench codec": {"record"},
    "bench core": {"record"},
    "bench io": {"record", "report"},
    "bench quality": {"record", "report"},
    "bench serve": {"record_file", "report"},
    "bench tier": {"record"},
    "characterize": {"report"},
    "demo": {"record", "report"},
    "plan": {"picture", "report"},
    "probe": {"picture", "record", "report"},
    "replay run": {"keep", "picture", "report"},
    "sglang config": {"file"},
    "trace advise": {"report"},
    "trace anonymize": {"target"},
    "trace convert": {"target"},
    "trace synthesize": {"target"},
}
READ = {
    *(
        "device",
        "directory",
        "file",
        "folder",
        "inputs",
        "journals",
        "keys_file",
        "like",
        "lmcache",
        "load_at",
        "model",
        "models",
        "plan_file",
    ),
    *("probe", "python", "socket", "source", "tokenizer", "tokens", "trace", "traces", "transfer", "vllm", "where"),
}


def test_every_option_that_names_a_file_to_write_keeps_an_earlier_one() -> None:
    """A new option with a path is found here: it is an `OutputFile`, or its name says that it is not replaced."""
    written: dict[str, set[str]] = {}
    read: set[str] = set()
    for name, command in leaves(cli):
        for it in command.params:
            names_path = re.search("FILE|PATH|DIR", it.metavar or "")
            if isinstance(it.type, OutputFile):
                written.setdefault(name, set()).add(it.name or "")
            elif isinstance(it.type, click.Path | click.File) or names_path:
                read.add(it.name or "")
    assert (written, read) == (WRITTEN, READ)


def fail_after(text: str) -> Iterator[str]:
    yield text
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_keeps_what_it_had_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    for write in (
        lambda text: write_file("--report", link, text.encode()),
        lambda text: write_json("--record", link, {"text": text}),
        lambda text: write_lines(link, [text]),
    ):
        write("first")
        assert "first" in real.read_text()
        assert link.is_symlink()
    with pytest.raises(ConfigError, match="No space left"):
        write_lines(link, fail_after("second"))

    def refuse(_draft: Path, _name: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ConfigError, match="No space left"):
        write_file("--report", link, b"second")
    assert "first" in real.read_text()
    assert {it.name for it in tmp_path.iterdir()} == {"real", "link"}


@pytest.mark.parametrize(
    ("option", "value", "is_used"),
    [("--tokenizer", "x", False), ("--window-h", "3", False), ("--time-unit", "s", True)],
)
def test_an_option_that_a_trace_has_no_use_for_is_told(
    trace: Path, option: str, value: str, is_used: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", "describe", str(trace), option, value]) == 0
    assert ("has no effect" in capsys.readouterr().err) is not is_used
    assert run(["replay", str(trace), "--policy", "lru", "--capacity-tokens", "1k", option, value]) == 0
    assert (f"{option} has no effect" in capsys.readouterr().err) is not is_used
    assert run(["replay", "describe", str(trace)]) == 0
    assert "has no effect" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "write", [lambda path: write_file("--report", path, b"new"), lambda path: write_lines(path, ["new"])]
)
def test_nothing_planted_beside_an_output_is_written_to_or_removed(tmp_path, write):
    """In a directory of several users the name of a draft could be foreseen, and a link with that name was followed."""
    precious, link = tmp_path / "precious", tmp_path / f".out.{os.getpid()}"
    precious.write_bytes(b"years of work")
    link.symlink_to(precious)
    write(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"new"
    assert precious.read_bytes() == b"years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([link.name, "out", "precious"])


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *((it, "--seconds") for it in ("probe", "characterize", "bench serve")),
        ("bench serve", "--ttft"),
        *((it, "--timeout") for it in ("doctor sglang", "doctor vllm")),
        ("cache pin", "--for"),
        *((it, "--age") for it in ("cache clear", "inspect free")),
        ("trace anonymize", "--coarse-s"),
        ("trace synthesize", "--think-s"),
        *((it, "--sample") for it in ("bench io", "bench tier")),
        *(("bench serve", it) for it in ("--memory", "--host", "--device-kv", "--store")),
        ("probe", "--bytes"),
        ("size", "--memory"),
    ],
)
def test_durations_and_sizes_have_the_forms_of_the_settings(command: str, option: str) -> None:
    context = click.Context(cli)
    found: click.Command = cli
    for word in command.split():
        assert isinstance(found, click.Group)
        found = found.get_command(context, word) or found
    (kind,) = [it.type for it in found.params if option in it.opts]
    forms = ("1min", "60", "60 s") if kind.name == "time" else ("1MiB", "1048576", "1 mib")
    assert len({kind.convert(form, None, None) for form in forms}) == 1
    with pytest.raises(click.BadParameter, match="allowed"):
        kind.convert("soon", None, None)


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands without commands of their own, by name."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for below in command.list_commands(context):
        yield from leaves(command.get_command(context, below) or command, f"{name} {below}".strip())


def numbers() -> Iterator[tuple[str, click.Option]]:
    """Options whose values click turns into numbers, of every command."""
    for name, command in leaves(cli):
        for it in command.params:
            is_number = isinstance(it.type, click.types.IntParamType | click.types.FloatParamType | Bytes)
            if isinstance(it, click.Option) and is_number:
                yield f"{name} {next(text for text in it.opts if text.startswith('--'))}", it


def convert(kind: click.ParamType, text: str) -> object:
    """What an option makes of `text`; its message if that is not allowed, such as a range."""
    try:
        return kind.convert(text, None, None)
    except click.BadParameter as error:
        return error.message


def test_every_number_has_one_grammar() -> None:
    found = dict(numbers())
    assert {"size --tp", "bench serve --users", "replay run --servers", "probe --bytes"} <= found.keys()
    for name, option in found.items():
        read = partial(convert, option.type)
        for text, plain in (("1,000", "1000"), ("1k", "1000"), (" 1_000 ", "1000"), ("1Ki", "1024"), ("1.5Ki", "1536")):
            assert read(text) == read(plain), name


@pytest.mark.parametrize("text", ["1k", "1 k", "1K", "1,000", "0.5k", "1Ki"])
def test_inputs_of_a_plan_have_the_grammar_of_the_other_commands(text: str) -> None:
    wanted = Quantity().convert(text, None, None)
    for name in ("traffic.users", "traffic.history_tokens", "price.gpu", "host.capacity_bytes"):
        assert load_inputs(sets=[f"{name}={text}"]).value(name) == wanted
    setting = load_settings(environ={}, flags=[f"limits.stores_in_flight={text}"]).config.limits
    assert setting.stores_in_flight == wanted


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        (["plna", "llama-3.1-8b"], "did you mean plan"),
        (["bench", "oi"], "did you mean io"),
        (["replay", "descrbie", "x.jsonl"], "did you mean describe"),
        (["trace", "sinthesize"], "did you mean synthesize"),
        (["inspect", "prge", "x"], "did you mean purge"),
        (["config", "chek"], "did you mean check"),
        (["cache", "pinn"], "did you mean pin"),
        (["doctor", "vlm"], "did you mean vllm"),
        (["vllm", "confg"], "did you mean config"),
        (["sglang", "confg"], "did you mean config"),
        (["size", "--tokns", "1k"], "'--tokens'"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, list) else None,
)
def test_a_mistyped_command_gets_a_suggestion(
    command: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 2
    assert meant in capsys.readouterr().err


def test_a_file_with_a_commands_name_is_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "describ").write_text(json.dumps(LINE) + "\n")
    monkeypatch.chdir(tmp_path)
    assert run(["replay", "describ", "--policy", "lru"]) == 0


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize(
    "command",
    [
        ["replay", "--prefill"],
        ["replay", "--window-h"],
        ["trace", "synthesize", "x", "--turns"],
        ["bench", "serve", "--rate"],
    ],
    ids=" ".join,
)
def test_a_number_is_finite_and_in_its_range(
    command: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, value]) == 2
    printed = capsys.readouterr().err
    assert f"'{command[-1]}'" in printed
    assert "is not finite" in printed or "is not in the range" in printed
