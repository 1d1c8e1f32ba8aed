"""A rank in a process of its own: a small engine in host memory, the mover, the server. Run by the tests of the wire.

python -m tests.rank_worker JSON      prints its handshake, then answers one JSON line on each line it reads

Workers that share host memory exchange two lines with all others before (`runtime.shared_memory`).
"""

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

from tests.rig import DEADLINE_S, FINGERPRINT, LAYOUT, STAGES, Engine, config, load_places
from tests.waiting import wait_until

from kvtier.layout import ELSEWHERE, Part
from kvtier.runtime import shared_memory
from kvtier.runtime.arena import chunk_bytes
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer
from kvtier.tier.directory.tier import DirectoryTier

ROOT = Path(__file__).resolve().parents[1]

SHARED = [
    LAYOUT.with_parts((Part(0, len(group.layer_bytes), 0, 1), rank) for group in LAYOUT.groups) for rank in range(3)
]
"""The layout on each of three ranks that all hold the same KV."""

DIVIDED = [
    LAYOUT.with_parts(
        (Part(0, len(group.layer_bytes), 0, 1), rank // 2 if number == rank % 2 else ELSEWHERE)
        for number, group in enumerate(LAYOUT.groups)
    )
    for rank in range(3)
]
"""The layout on each of three ranks: the first group is on the first and the last of them, the second on the other."""


class Gate:
    """Holds work until the file `path` is removed; `path`.held has a byte for each.

    The text of the file names the work: ``scatter`` if it is empty, or for example ``gather 0``, of rank 0.
    """

    def __init__(self, path, rank):
        self._path, self._rank = path, rank

    def enter(self, work):
        if self._path is None:
            return
        try:
            named = self._path.read_text()
        except FileNotFoundError:  # the test removes it at any time
            return
        if named in ("" if work == "scatter" else work, f"{work} {self._rank}"):
            with self._path.with_suffix(".held").open("ab") as held:
                held.write(b".")
            while self._path.exists():
                time.sleep(0.01)


class SlowCopier:
    """Copies go through a gate first."""

    def __init__(self, copier, gate):
        self._copier = copier
        self._gate = gate

    def gather(self, request, group, blocks, payload):
        self._gate.enter("gather")
        return self._copier.gather(request, group, blocks, payload)

    def scatter(self, request, group, blocks, payload):
        self._gate.enter("scatter")
        return self._copier.scatter(request, group, blocks, payload)

    def done(self, fence):
        return self._copier.done(fence)


def hold_tiers(gate):
    """Reads and writes of directories go through the gate first."""
    for method, work in (("read_one", "promote"), ("write_one", "demote")):
        inner = getattr(DirectoryTier, method)

        def held(tier, *arguments, inner=inner, work=work):
            gate.enter(work)
            return inner(tier, *arguments)

        setattr(DirectoryTier, method, held)


def exchange(own):
    """By lines with the test, which has all ranks' (`workers`)."""
    print(json.dumps(pickle.dumps(own).hex()), flush=True)
    return [pickle.loads(bytes.fromhex(it)) for it in json.loads(sys.stdin.readline())]


def main(about):
    layout, shared = LAYOUT, {}
    if about["is_staged"]:
        layout, shared = STAGES[about["rank"]], {"engine_chunk_bytes": sum(map(chunk_bytes, STAGES))}
    engine = Engine(about["blocks"], seed=about["seed"], layout=layout)
    gate = Gate(Path(about["gate"]) if about.get("gate") else None, about["rank"])
    hold_tiers(gate)
    made = config(
        Path(about["directory"]),
        host_chunks=about["host_chunks"],
        disk=Path(about["disk"]) if about["disk"] else None,
    )
    if about["is_shared"]:
        layout = (DIVIDED if about["is_divided"] else SHARED)[about["rank"]]
        if about["rank"] in about["unable"]:
            shared_memory._opened = shared_memory._made = unable
        memory = shared_memory.share(layout, made.host.capacity_bytes, exchange)
        shared = {"engine_chunk_bytes": memory.chunk_bytes * about["scarcity"], "shared": memory.regions}
    rank = open_rank(
        *(made, layout, FINGERPRINT, SlowCopier(engine.copier(), gate)),
        rank=about["rank"],
        ranks=about["ranks"],
        **shared,
    )
    notes = []
    server = RankServer(rank, notes.append)
    print(json.dumps(server.handshake), flush=True)
    for line in sys.stdin:
        order, *values = json.loads(line)
        if order == "contents":
            print(json.dumps(contents(engine)), flush=True)
        elif order == "same":
            other, tokens = values
            print(
                json.dumps(engine.same(Engine(about["blocks"], seed=other, layout=layout), load_places(tokens))),
                flush=True,
            )
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


def contents(engine):
    """A checksum of each block, by group: of all its layers."""
    return [
        [crc32(b"".join(layer[block] for layer in group)) for block in range(engine.blocks)] for group in engine.groups
    ]


def unable(*_):
    raise OSError("planned")


class Worker:
    """The process, as a test sees it."""

    def __init__(
        self,
        directory,
        *,
        rank=0,
        ranks=1,
        seed=0,
        blocks=64,
        host_chunks=8,
        gate=None,
        disk=None,
        is_shared=False,
        is_staged=False,
        is_divided=False,
        unable=(),
        scarcity=1,
    ):
        about = {
            "directory": str(directory),
            "rank": rank,
            "ranks": ranks,
            "seed": seed,
            "blocks": blocks,
            "host_chunks": host_chunks * ranks,
            "gate": str(gate) if gate else None,
            "disk": str(disk) if disk else None,
            "is_shared": is_shared,
            "is_staged": is_staged,
            "is_divided": is_divided,
            "unable": unable,
            "scarcity": scarcity,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_worker", json.dumps(about)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.handshake = None if is_shared else self.read()

    def ask(self, *order):
        self.write(order)
        return self.read()

    def write(self, value):
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

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

    def read(self):
        line = self.process.stdout.readline()
        assert line, "the worker has died"
        return json.loads(line)


@contextmanager
def workers(directory, count, **options):
    """One process for each of `count` ranks; rank r has seed `seed` + r.

    With `is_shared` all hold the same KV, of `seed`, and share host memory, except those that are `unable`;
    with `is_divided` each holds one group. `scarcity` divides the number of slots.
    """
    seed, is_shared = options.pop("seed", 0), options.get("is_shared", False)
    started = []
    try:
        for rank in range(count):
            started.append(Worker(directory, rank=rank, ranks=count, seed=seed + rank * (not is_shared), **options))
        for _ in range(2 * is_shared):
            told = [worker.read() for worker in started]
            for worker in started:
                worker.write(told)
        for worker in started:
            worker.handshake = worker.handshake or worker.read()
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
