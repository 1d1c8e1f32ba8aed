"""A rank in a process of its own: a small engine in host memory, the mover, the server. Run by the tests of the wire.

python -m tests.rank_worker JSON      prints its handshake, then answers each line it reads with one JSON line

Workers that share host memory first exchange two lines with all others (`runtime.shared_memory`).
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

from tests.rig import (
    CHUNK_BLOCKS,
    CHUNK_TOKENS,
    DEADLINE_S,
    FINGERPRINT,
    LAYOUT,
    PAGE_BYTES,
    STAGES,
    Engine,
    config,
    load_places,
)
from tests.waiting import wait_until

from kvtier.layout import ELSEWHERE, GroupLayout, History, KvLayout, Part
from kvtier.runtime import shared_memory
from kvtier.runtime.arena import chunk_bytes
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer
from kvtier.tier.directory.tier import DirectoryTier

ROOT = Path(__file__).resolve().parents[1]

SHARED = [
    LAYOUT.with_parts((Part(0, len(group.layer_bytes), 0, 1), rank) for group in LAYOUT.groups) for rank in range(3)
]
"""The layout on each of three ranks that all have the same KV."""

DIVIDED = [
    LAYOUT.with_parts(
        (Part(0, len(group.layer_bytes), 0, 1), rank // 2 if number == rank % 2 else ELSEWHERE)
        for number, group in enumerate(LAYOUT.groups)
    )
    for rank in range(3)
]
"""The layout on each of three ranks. The first and the last have the first group, and the other has the second."""

DCP = [
    LAYOUT.with_parts((Part(0, len(group.layer_bytes), 0, 1, rank, 2), 0) for group in LAYOUT.groups)
    for rank in range(2)
]
"""The layout on each of two ranks that have the same heads and divide the tokens (decode context parallelism)."""

SHARES = 4


def of_shares(holds):
    """Return the layout on each of three ranks for a history whose tokens are split into groups
    (`store.token_shares`).

    Args:
        holds: which copy of a share each rank has.
    """
    share = GroupLayout(History(), (PAGE_BYTES * CHUNK_BLOCKS,), "rig/share")
    return [
        KvLayout(CHUNK_TOKENS, (share,) * SHARES).with_parts(
            (Part(0, 1, 0, 1, number, SHARES), holds(rank, number)) for number in range(SHARES)
        )
        for rank in range(3)
    ]


SHAPES = {
    "one": (LAYOUT,) * 3,
    "stages": STAGES,
    "copies": SHARED,
    "divided": DIVIDED,
    "dcp": DCP,
    "shares": of_shares(lambda rank, share: rank // 2 if share % 2 == rank % 2 else ELSEWHERE),
    # Wrong claims, for the controls.
    "dcp, swapped": DCP[::-1],
    "shares, swapped": of_shares(lambda rank, share: rank // 2 if share % 2 != rank % 2 else ELSEWHERE),
    "shares, all held": of_shares(lambda rank, share: rank // 2 if share % 2 == rank % 2 else 1 + rank),
}
"""The layout on each rank."""

HAVE_COPIES = ("copies", "divided", "shares", "shares, swapped", "shares, all held")
"""Shapes in which ranks have the same KV, and share host memory."""


class Gate:
    """Blocks work until the file `path` is removed. `path`.held has a byte for each blocked piece of work.

    The file's text names the work, such as ``gather 0`` for rank 0. An empty file means ``scatter``.
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
    """A copier whose copies first pass a gate."""

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
    """Make reads and writes of directories pass the gate first."""
    for method, work in (("read_many", "promote"), ("write_many", "demote")):
        inner = getattr(DirectoryTier, method)

        def held(tier, *arguments, inner=inner, work=work):
            gate.enter(work)
            return inner(tier, *arguments)

        setattr(DirectoryTier, method, held)


def exchange(own):
    """Exchange values with all ranks, through lines to and from the test (`workers`)."""
    print(json.dumps(pickle.dumps(own).hex()), flush=True)
    return [pickle.loads(bytes.fromhex(it)) for it in json.loads(sys.stdin.readline())]


def main(about):
    layout, shared = SHAPES[about["shape"]][about["rank"]], {}
    if about["shape"] == "stages":
        shared = {"engine_chunk_bytes": sum(map(chunk_bytes, STAGES))}
    engine = Engine(about["blocks"], seed=about["seed"], layout=layout)
    gate = Gate(Path(about["gate"]) if about.get("gate") else None, about["rank"])
    hold_tiers(gate)
    made = config(
        Path(about["directory"]),
        host_chunks=about["host_chunks"],
        disk=Path(about["disk"]) if about["disk"] else None,
    )
    if about["shape"] in HAVE_COPIES:
        if about["rank"] in about["unable"]:
            shared_memory._opened = shared_memory._made = unable
        memory = shared_memory.share(layout, made.host.capacity_bytes, exchange)
        shared = {"engine_chunk_bytes": memory.chunk_bytes, "shared": memory.regions}
    if about["slots"]:
        shared["engine_chunk_bytes"] = made.host.capacity_bytes // about["slots"]
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
        elif order == "fork":  # the child keeps the connection and outlives its parent
            until_s = time.monotonic() + DEADLINE_S
            while server._peer is None and time.monotonic() < until_s:  # a thread accepts it
                time.sleep(0.01)
            os.dup(server._peer.fileno())  # the server's own socket closes in children
            child = os.fork()
            if child == 0:
                signal.alarm(int(DEADLINE_S))
                signal.pause()
            print(json.dumps(child), flush=True)
        elif order == "fork and close":  # the child exits as an interpreter does, and closes what it finds open
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
    """Return for each group a checksum of each block over all its layers."""
    return [
        [crc32(b"".join(layer[block] for layer in group)) for block in range(engine.blocks)] for group in engine.groups
    ]


def unable(*_):
    raise OSError("planned")


class Worker:
    """The process as a test sees it."""

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
        shape="one",
        unable=(),
        slots=None,
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
            "shape": shape,
            "unable": unable,
            "slots": slots,
        }
        self.engine = {"blocks": blocks, "seed": seed, "layout": SHAPES[shape][rank]}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_worker", json.dumps(about)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.handshake = None if shape in HAVE_COPIES else self.read()

    def ask(self, *order):
        self.write(order)
        return self.read()

    def write(self, value):
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def end(self):
        """Close the rank in order. Return whether nothing was left running."""
        answer = self.ask("end")
        self.process.wait(DEADLINE_S)
        return answer

    def signal(self, number):
        self.process.send_signal(number)

    def stop(self):
        """Make the process hang. On return every thread stands still."""
        self.signal(signal.SIGSTOP)
        tasks = list(Path(f"/proc/{self.process.pid}/task").iterdir())
        wait_until(lambda: all((task / "stat").read_text().rpartition(") ")[2][0] == "T" for task in tasks), "the stop")

    def read(self):
        line = self.process.stdout.readline()
        assert line, "the worker has died"
        return json.loads(line)


@contextmanager
def workers(directory, count, **options):
    """Start a process for each of `count` ranks. Rank r has seed `seed` + r, or `seed` in a shape of `HAVE_COPIES`.

    In such a shape they share host memory, except those that are `unable`. `slots` sets the number of slots.
    """
    seed, have_copies = options.pop("seed", 0), options.get("shape") in HAVE_COPIES
    started = []
    try:
        for rank in range(count):
            started.append(Worker(directory, rank=rank, ranks=count, seed=seed + rank * (not have_copies), **options))
        for _ in range(2 * have_copies):
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
