"""A rank in a process of its own: a small engine in host memory, the mover, the server. Run by the tests of the wire.

python -m tests.rank_worker JSON      prints its handshake, then answers one JSON line on each line it reads
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from tests.rig import DEADLINE_S, FINGERPRINT, LAYOUT, Engine, config, load_places
from tests.waiting import wait_until

from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer

ROOT = Path(__file__).resolve().parents[1]


class SlowCopier:
    """Holds every scatter until the file `gate` is removed; `gate`.held has a byte for each."""

    def __init__(self, copier, gate):
        self._copier = copier
        self._gate = gate

    def gather(self, request, group, blocks, payload):
        return self._copier.gather(request, group, blocks, payload)

    def scatter(self, request, group, blocks, payload):
        if self._gate is not None and self._gate.exists():
            with self._gate.with_suffix(".held").open("ab") as held:
                held.write(b".")
            while self._gate.exists():
                time.sleep(0.01)
        return self._copier.scatter(request, group, blocks, payload)

    def done(self, fence):
        return self._copier.done(fence)


def main(about):
    engine = Engine(about["blocks"], seed=about["seed"])
    gate = Path(about["gate"]) if about.get("gate") else None
    rank = open_rank(
        config(
            Path(about["directory"]),
            host_chunks=about["host_chunks"],
            disk=Path(about["disk"]) if about["disk"] else None,
        ),
        LAYOUT,
        FINGERPRINT,
        SlowCopier(engine.copier(), gate),
        rank=about["rank"],
        ranks=about["ranks"],
    )
    notes = []
    server = RankServer(rank, notes.append)
    print(json.dumps(server.handshake), flush=True)
    for line in sys.stdin:
        order, *values = json.loads(line)
        if order == "same":
            other, tokens = values
            print(json.dumps(engine.same(Engine(about["blocks"], seed=other), load_places(tokens))), flush=True)
        elif order == "notes":
            print(json.dumps(notes), flush=True)
        elif order == "figures":
            views = rank.mover.views.items()
            print(json.dumps({name: [*view.figures[:3], dict(view.figures[3])] for name, view in views}), flush=True)
        elif order == "fork":  # a child that inherits the connection and outlives its parent
            child = os.fork()
            if child == 0:
                signal.alarm(int(DEADLINE_S))
                signal.pause()
            print(json.dumps(child), flush=True)
        elif order == "fork and close":  # a child that leaves as an interpreter does: it closes what it finds open
            child = os.fork()
            if child == 0:
                signal.alarm(int(DEADLINE_S))
                rank.close(1.0)
                server.leave(1.0)
                server.close(1.0)
                atexit._run_exitfuncs()
                os._exit(0)
            print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
        elif order == "leave":
            print(json.dumps(server.leave(DEADLINE_S)), flush=True)
        elif order == "end":
            rank.close(DEADLINE_S)
            print(json.dumps(server.close(DEADLINE_S)), flush=True)
            return


class Worker:
    """The process, as a test sees it."""

    def __init__(self, directory, *, rank=0, ranks=1, seed=0, blocks=64, host_chunks=8, gate=None, disk=None):
        about = {
            "directory": str(directory),
            "rank": rank,
            "ranks": ranks,
            "seed": seed,
            "blocks": blocks,
            "host_chunks": host_chunks * ranks,
            "gate": str(gate) if gate else None,
            "disk": str(disk) if disk else None,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_worker", json.dumps(about)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.handshake = self._read()

    def ask(self, *order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._read()

    def end(self):
        """Close the rank in order; whether nothing was left running."""
        answer = self.ask("end")
        self.process.wait(DEADLINE_S)
        return answer

    def signal(self, number):
        self.process.send_signal(number)

    def stop(self):
        """Make it hang: every thread stands still on return."""
        self.signal(signal.SIGSTOP)
        tasks = list(Path(f"/proc/{self.process.pid}/task").iterdir())
        wait_until(lambda: all((task / "stat").read_text().rpartition(") ")[2][0] == "T" for task in tasks), "the stop")

    def _read(self):
        line = self.process.stdout.readline()
        assert line, "the worker has died"
        return json.loads(line)


@contextmanager
def workers(directory, count, **options):
    """One process for each of `count` ranks; rank r has seed `seed` + r."""
    seed = options.pop("seed", 0)
    started = []
    try:
        for rank in range(count):
            started.append(Worker(directory, rank=rank, ranks=count, seed=seed + rank, **options))
        yield started
    finally:
        for worker in started:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGCONT)
                worker.process.kill()
                worker.process.wait(DEADLINE_S)
            worker.process.stdin.close()
            worker.process.stdout.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
