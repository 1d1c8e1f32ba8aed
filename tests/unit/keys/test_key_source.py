"""Sources of keys: a file, a command, a text or the secret; what a later reading changes, and what it shows."""

import logging
import os
import shlex
import sys
import threading
import time

import pytest
from tests.refusals import refuses

from kvtier.errors import ConfigError
from kvtier.keys.key_source import KeySource, open_keys, read_command, read_file
from kvtier.keys.seal_keys import BYTES_MAX, FORM, Keyring, SealKey, parse
from kvtier.keys.secret import Secret

HEX = "c0ffee5eed1e55ab" * 4
OTHER = "0ddba11decade5ad" * 4
MATERIAL = bytes.fromhex(HEX)


@pytest.fixture
def keys_file(tmp_path):
    path = tmp_path / "keys"
    write(path, f"1 a {HEX}\n")
    return path


@pytest.fixture
def opened():
    """Makes sources that end with the test."""
    made = []

    def open_one(*args, **options):
        made.append(open_keys(*args, **options))
        return made[-1]

    yield open_one
    for source in made:
        source.close()
    assert until(lambda: not threads())


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "kvtier keys"]


def until(holds):
    """Whether `holds` comes true within 30 s."""
    ends_s = time.monotonic() + 30
    while not holds():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.005)
    return True


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)


def python(program):
    return [sys.executable, "-c", program]


def epochs(keyring, tenant="a"):
    return sorted(key.epoch for key in keyring.keys if key.tenant == tenant)


def hides(text, *secrets):
    """`text` has no eight digits in a row of any of `secrets`."""
    return not any(secret[at : at + 8] in text for secret in secrets for at in range(len(secret) - 7))


# ---- a file ----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_also_behind_links_as_kubernetes_makes_them(keys_file, tmp_path):
    (tmp_path / "..data").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to("..data/keys")
    assert read_file(tmp_path / "link").keys == read_file(keys_file).keys == {SealKey.of("a", 1, MATERIAL)}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_can_read_is_refused(keys_file, mode):
    keys_file.chmod(mode)
    with refuses("keys file", f"mode {mode:04o}", value=str(keys_file), allowed="chmod 600"):
        open_keys(file=keys_file)


def test_a_file_that_is_missing_short_empty_or_no_file_is_refused(keys_file, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, why in (
        ("nothing", "No such file"),
        ("folder", "not a regular file"),
        ("fifo", "not a regular file"),
    ):
        with refuses("keys file", why, value=str(tmp_path / name)):
            open_keys(file=tmp_path / name)
    for text, why in (("", "there is no key"), (f"1 a {HEX[:-9]}", "line 1 is not a key")):
        write(keys_file, text)
        with refuses(f"keys file {keys_file}", why, allowed=FORM) as caught:
            open_keys(file=keys_file)
        assert hides(str(caught.value), HEX)
    write(keys_file, f"1 a {HEX}\n".ljust(BYTES_MAX + 1, "#"))
    with refuses("keys file", f"{BYTES_MAX} bytes", value=str(keys_file)):
        open_keys(file=keys_file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_a_file_of_another_user_is_refused(keys_file):
    os.chown(keys_file, 12345, -1)
    with refuses("keys file", "user 12345", value=str(keys_file), allowed="chown 0 "):
        open_keys(file=keys_file)
    os.chown(keys_file, 0, -1)
    assert read_file(keys_file).keys


# ---- a command -------------------------------------------------------------------------------------------------------


def test_a_command_is_run_without_a_shell(opened, tmp_path):
    script = tmp_path / "keys.py"
    script.write_text("import sys; print('1', *sys.argv[1:])")
    source = opened(command=shlex.join([sys.executable, str(script), "a", HEX]))
    assert epochs(source.keyring) == [1]
    with refuses("output of store.keys_command", "line 1"):
        read_command([sys.executable, str(script), "a", HEX, ";", "true"])


def test_a_command_that_fails_tells_the_end_of_its_error_and_no_key():
    program = f"import sys; print('1 a {HEX}'); sys.exit('x' * 999 + ' permission\\x1b[0m denied\\n for {HEX}')"
    with refuses("store.keys_command", "status 1") as caught:
        read_command(python(program))
    message = caught.value.problem
    assert message.endswith("denied for (hidden)")
    assert len(message.partition("it wrote: ")[2]) == 200
    assert hides(message, HEX)
    with refuses("store.keys_command", "status -9; it wrote: nothing"):
        read_command(python("import os; os.kill(os.getpid(), 9)"))


def test_a_command_that_cannot_be_started_is_a_clear_error(tmp_path):
    with refuses("store.keys_command", "No such file") as caught:
        read_command([str(tmp_path / "nothing"), HEX])
    assert hides(str(caught.value), HEX)


@pytest.mark.parametrize("silence", ["pass", "os.close(1); os.close(2)"])
def test_a_command_ends_at_its_deadline_with_all_that_it_started(silence, tmp_path):
    marker = tmp_path / "group"
    program = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
open({str(marker)!r}, 'w').write(str(os.getpgrp()))
{silence}
time.sleep(60)
"""
    with refuses("store.keys_command", "2 s, or wrote more than 1048576 bytes"):
        read_command(python(program), deadline_s=2)
    assert until(lambda: not is_group(int(marker.read_text())))


def is_group(number):
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_a_command_leaves_behind_is_not_waited_for(tmp_path):
    marker = tmp_path / "process"
    program = f"""
import subprocess, sys
left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
open({str(marker)!r}, 'w').write(str(left.pid))
print('1 a {HEX}')
"""
    assert epochs(read_command(python(program), deadline_s=30)) == [1]
    os.kill(int(marker.read_text()), 9)


@pytest.mark.parametrize("pipe", ["stdout", "stderr"])
def test_a_command_that_writes_without_end_is_stopped(pipe):
    with refuses("store.keys_command", "60 s, or wrote more than 1048576 bytes") as caught:
        read_command(python(f"import sys\nwhile True: sys.{pipe}.write('# {HEX}\\n' * 99)"), deadline_s=60)
    assert hides(str(caught.value), HEX)


def test_a_command_leaves_no_open_file():
    before = len(os.listdir("/proc/self/fd"))
    for program in (f"print('1 a {HEX}')", "import sys; sys.exit(3)"):
        try:
            read_command(python(program))
        except ConfigError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


# ---- other sources ---------------------------------------------------------------------------------------------------


def test_a_text_is_read_once(opened):
    source = opened(text=f"1 a {HEX}\n2 a {OTHER}")
    assert epochs(source.keyring) == [1, 2]
    assert not threads()
    source.refresh()
    assert epochs(source.keyring) == [1, 2]


def test_the_secret_is_epoch_0_of_the_engines_tenant_as_a_line_would_be(opened, keys_file):
    write(keys_file, f"0 a {HEX}\n0 - {HEX}\n1 a {OTHER}\n")
    listed = opened(file=keys_file).keyring
    for tenant in ("", "a"):
        alone = opened(secret=Secret(MATERIAL), tenant=tenant).keyring
        (key,) = alone.keys
        assert alone.sealing(tenant) == key == listed.knows(key.check)
    assert open_keys() is None


# ---- later readings --------------------------------------------------------------------------------------------------


def test_a_later_reading_adds_and_removes_keys_and_keeps_them_when_it_fails(opened, keys_file, caplog):
    source = opened(file=keys_file, every_s=1000)
    first = source.keyring
    source.refresh()
    assert source.keyring is first  # nothing new
    write(keys_file, f"1 a {HEX}\n2 a {OTHER}\n")
    source.refresh()
    write(keys_file, f"2 a {OTHER}\n")
    before = source.keyring
    source.refresh()
    assert epochs(before) == [1, 2]  # a snapshot never changes
    assert epochs(source.keyring) == [2]
    good = source.keyring
    for number, spoil in enumerate(
        (
            lambda: write(keys_file, f"2 a {OTHER}\n3 a {HEX[:-1]}\n"),
            lambda: write(keys_file, f"3 a {HEX}\n", mode=0o644),
            lambda: write(keys_file, ""),  # it is being rewritten: truncated, and not yet written
            lambda: write(keys_file, " \n\n"),
            keys_file.unlink,
        ),
        1,
    ):
        spoil()
        source.refresh()
        assert source.failures == number
        assert source.keyring is good
    write(keys_file, f"3 a {HEX}\n")
    source.refresh()
    assert epochs(source.keyring) == [3]
    write(keys_file, "# none\n")
    source.refresh()
    assert (source.failures, epochs(source.keyring)) == (5, [])
    assert caplog.records[-1].getMessage() == "0 keys are in use now; there were 1 before"


def test_a_command_that_writes_nothing_removes_no_key(opened, tmp_path):
    """As a pipe whose first part failed."""
    lines = tmp_path / "lines"
    lines.write_text(f"1 a {HEX}\n")
    source = opened(command=f"cat {lines}", every_s=1000)
    lines.write_text("")
    source.refresh()
    assert (source.failures, epochs(source.keyring)) == (1, [1])
    lines.write_text("# none\n")
    source.refresh()
    assert (source.failures, epochs(source.keyring)) == (1, [])


def test_a_reading_that_hangs_is_a_failure(monkeypatch, caplog):
    monkeypatch.setattr("kvtier.keys.key_source.READING_S", 0.02)
    go_on, calls = threading.Event(), []

    def read():
        calls.append(1)
        if len(calls) > 1:
            assert go_on.wait(30)
        return parse(f"{len(calls)} a {HEX}".encode(), "here")

    source = KeySource(read, every_s=0.01)
    assert until(lambda: source.failures > 2)
    assert len(calls) == 2, "no second reading beside one that hangs"
    assert "the new reading takes too long" in caplog.text
    go_on.set()
    assert until(lambda: epochs(source.keyring) != [1])
    source.close()


def test_a_thread_reads_again(opened, keys_file):
    source = opened(file=keys_file, every_s=0.01)
    write(keys_file.with_name("new"), f"2 a {OTHER}\n")
    keys_file.with_name("new").rename(keys_file)
    assert until(lambda: epochs(source.keyring) == [2])


def test_each_kind_of_failure_is_logged_once_in_ten_minutes_and_shows_no_key(caplog):
    now_s, problems = [0.0], iter(())

    def read():
        problem = next(problems, None)
        if problem:
            raise problem
        return parse(f"1 a {HEX}".encode(), "here")

    source = KeySource(read, every_s=None, clock=lambda: now_s[0])

    def warnings(*raised):
        nonlocal problems
        problems = iter(raised)
        caplog.clear()
        for _ in raised:
            source.refresh()
        return [record.getMessage() for record in caplog.records]

    command = [ConfigError(f"the command ended with status 1; it wrote: at {second}") for second in range(3)]
    with caplog.at_level(logging.DEBUG):
        first = warnings(*command, ConfigError("missing"), ValueError(HEX), *command, ConfigError("missing"))
        assert first == [
            f"the 1 keys of the last good reading stay in use: {why}"
            for why in ("the command ended with status 1; it wrote: at 0", "missing", "ValueError")
        ]
        now_s[0] = 599.0
        assert warnings(*command) == []
        now_s[0] = 600.0
        assert len(warnings(*command)) == 1
    assert source.failures == 15
    assert hides(caplog.text, HEX)


def test_a_reading_that_ends_after_close_changes_nothing():
    entered, go_on = threading.Event(), threading.Event()
    rings = iter([parse(f"1 a {HEX}".encode(), "here"), parse(f"2 a {HEX}".encode(), "here")])

    def read():
        if threading.current_thread() in threads():
            entered.set()
            assert go_on.wait(30)
        return next(rings)

    source = KeySource(read, every_s=0.001)
    assert entered.wait(30)
    source.close()
    go_on.set()
    assert until(lambda: not threads())
    assert epochs(source.keyring) == [1]
    assert source.failures == 0
    source.close()  # twice is allowed


def test_a_forked_process_keeps_the_keys_and_never_waits(keys_file):
    source = open_keys(file=keys_file, every_s=1000)
    with source._lock:  # as a thread that reads would have it
        child = os.fork()
        if child == 0:
            write(keys_file, f"2 a {OTHER}\n")
            source.refresh()
            source.close()
            os._exit(0 if epochs(source.keyring) == [1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    source.close()


def test_a_source_shows_no_key(opened, keys_file, caplog):
    with caplog.at_level(logging.DEBUG):
        source = opened(file=keys_file)
        source.refresh()
    assert hides(f"{source!r} {source} {vars(source)} {caplog.text}", HEX, source.keyring.sealing("a").key.hex())
    assert isinstance(source.keyring, Keyring)
