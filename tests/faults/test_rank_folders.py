"""The folders of ranks' sockets: a killed rank's is removed by the next start, and nothing else."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.rig import FINGERPRINT, LAYOUT, Engine, config

from kvtier.errors import ConfigError
from kvtier.runtime import rank_server
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer

SERVE = """
import sys
from pathlib import Path
from kvtier.runtime import rank_server
listener, address, folder = rank_server._listen()
print(address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The directory for temporary files."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    yield made
    for path in sorted(made.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    made.rmdir()


def served(place):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], env={"TMPDIR": str(place), "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, Path(process.stdout.readline().strip()).parent


def closed(listener, address, folder):
    listener.close()
    rank_server._remove(Path(address).parent, folder, rank_server.os.getpid())


def test_the_next_start_removes_those_of_killed_ranks_only(place):
    started = [served(place) for _ in range(3)]
    for process, _ in started[:2]:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list(place.iterdir())) == 3
    kept = [place / "kvtier-rank-foreign", place / "kvtier-rank-file", place / "kvtier-rank-link"]
    kept[0].mkdir()
    (kept[0] / "rank").write_bytes(b"not a socket")
    kept[1].touch()
    elsewhere = place / "elsewhere"
    started[0][1].rename(elsewhere)
    kept[2].symlink_to(elsewhere)
    mine = rank_server._listen()
    assert {*place.iterdir()} == {started[2][1], Path(mine[1]).parent, elsewhere, *kept}
    assert (elsewhere / "rank").is_socket()
    closed(*mine)
    for process, _ in started:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def test_a_failed_start_leaves_none(place, monkeypatch, tmp_path):
    rank = open_rank(config(tmp_path), LAYOUT, FINGERPRINT, Engine(8).copier())
    monkeypatch.setattr(rank_server, "_SOCKET", "r" * 200)  # too long for an address
    with pytest.raises(ConfigError, match="no socket can be created"):
        RankServer(rank, lambda _note: None)
    rank.close(5.0)
    assert not list(place.iterdir())
