"""A file system that passes everything on to another directory, and lets one kind of call hang on demand.

Speaks the kernel's FUSE protocol itself, so that it needs /dev/fuse and `fusermount3` and nothing else. The kernel
gives each call the id of the thread that made it: a test sees which threads were inside.

    python hanging_fs.py SOURCE MOUNT      one JSON line on stdin for each question, one on stdout for each answer
"""

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WAIT_S = 60.0
THREADS = 64

# ---- the kernel's side: linux/fuse.h, version 7.31 -----------------------------------------------------------------

IN = struct.Struct("<IIQQIIIHH")
OUT = struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4QII")
OPENED = struct.Struct("<QII")
SET_ATTR = struct.Struct("<II6Q8I")
READ = struct.Struct("<QQIIQII")
LOCK = struct.Struct("<QQQQIIII")
DIRENT = struct.Struct("<QQII")

MESSAGE_BYTES = (1 << 20) + 4096
FOPEN_DIRECT_IO = 1
INIT_FLAGS = 1 | 8 | 32 | 1 << 10 | 1 << 15 | 1 << 22
"""Async read, atomic O_TRUNC, big writes, flock, async direct I/O, max pages."""
LOCKS = {0: fcntl.LOCK_SH, 1: fcntl.LOCK_EX, 2: fcntl.LOCK_UN}

NO_ANSWER = {2, 36, 42}  # forget and interrupt
CALLS = {
    1: ("getattr", "lookup"),
    3: ("getattr", "getattr"),
    4: ("utimens", "setattr"),
    9: ("mkdir", "mkdir"),
    10: ("unlink", "unlink"),
    11: ("rmdir", "rmdir"),
    12: ("rename", "rename"),
    13: ("link", "link"),
    14: ("open", "open"),
    15: ("read", "read"),
    16: ("write", "write"),
    17: ("statfs", "statfs"),
    18: ("release", "release"),
    20: ("fsync", "fsync"),
    25: ("flush", "nothing"),
    26: ("init", "init"),
    27: ("open", "open"),
    28: ("readdir", "readdir"),
    29: ("release", "release"),
    32: ("flock", "flock"),
    33: ("flock", "flock"),
    35: ("open", "create"),
    45: ("rename", "rename2"),
}
"""By the protocol's number: the kind of a call, and the method of `Server`. A change of size or mode is a "utimens"."""


class Server:
    """The file system's process."""

    def __init__(self, source: str, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._go_on = threading.Event()
        self._go_on.set()
        self._hung: set[str] = set()
        self._waiting: list[tuple[str, int]] = []
        self._calls: set[tuple[str, int]] = set()
        self._nodes = {1: os.open(source, os.O_PATH)}  # never forgotten: a test makes few
        self._ids: dict[tuple[int, int], int] = {}
        self._lists: dict[int, list[os.DirEntry[str]]] = {}

    def run(self) -> None:
        """Serve until the file system is unmounted."""
        threading.Thread(target=self._listen, daemon=True).start()
        with ThreadPoolExecutor(THREADS) as pool:
            while True:
                try:
                    message = os.read(self._device, MESSAGE_BYTES)
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        continue  # the caller has been killed meanwhile
                    return
                pool.submit(self._serve, message)

    def _listen(self) -> None:
        for line in sys.stdin:
            print(json.dumps(self._answer(json.loads(line))), flush=True)

    def _answer(self, question: dict[str, Any]) -> object:
        with self._lock:
            if "hang" in question:
                self._hung.update(question["hang"])
                self._go_on.clear()
            elif "only_these" in question:
                self._hung.clear()
            elif "go_on" in question:
                self._hung.clear()
                self._go_on.set()
            elif "forget" in question:
                self._calls.clear()
            return {"calls": sorted(self._calls), "waiting": list(self._waiting)}

    def _serve(self, message: bytes) -> None:
        _, number, unique, node, _, _, thread, _, _ = IN.unpack_from(message)
        if number in NO_ANSWER:
            return
        what, method = CALLS.get(number, ("other", "not_here"))
        self._enter((what, thread))
        body, code = b"", 0
        try:
            body = getattr(self, f"_{method}")(node, message[IN.size :])
        except OSError as error:
            code = error.errno or errno.EIO
        with contextlib.suppress(OSError):  # the asking process was killed
            os.write(self._device, OUT.pack(OUT.size + len(body), -code, unique) + body)

    def _enter(self, call: tuple[str, int]) -> None:
        with self._lock:
            self._calls.add(call)
            if not self._hung & {call[0], "everything"}:
                return
            self._waiting.append(call)
        self._go_on.wait()
        with self._lock:
            self._waiting.remove(call)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self._nodes[node]}"

    def _entry(self, parent: int, name: str) -> bytes:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent])
        told = os.fstat(descriptor)
        with self._lock:
            node = self._ids.setdefault((told.st_dev, told.st_ino), descriptor + 1)
            if node == descriptor + 1:
                self._nodes[node] = descriptor  # holds the inode, so its number is given to no other
            else:
                os.close(descriptor)
        return ENTRY.pack(node, 0, 0, 0, 0, 0) + _attributes(told)

    def _init(self, _node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<4I", body)[3]
        return struct.pack("<4I2H2I2H8I", 7, 31, 0, flags & INIT_FLAGS, 64, 48, 1 << 20, 1, 256, 0, *[0] * 8)

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(node, body[:-1].decode())

    def _getattr(self, node: int, _body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attributes(os.fstat(self._nodes[node]))

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = SET_ATTR.unpack_from(body)
        path = self._path(node)
        if valid & 8:
            os.truncate(path, size)
        if valid & 1:
            os.chmod(path, mode & 0o7777)
        if valid & (16 | 32):
            told, now_ns = os.stat(path), time.time_ns()
            accessed = now_ns if valid & 128 else atime * 10**9 + atime_ns if valid & 16 else told.st_atime_ns
            changed = now_ns if valid & 256 else mtime * 10**9 + mtime_ns if valid & 32 else told.st_mtime_ns
            os.utime(path, ns=(accessed, changed))
        return self._getattr(node, b"")

    def _mkdir(self, node: int, body: bytes) -> bytes:
        mode, name = struct.unpack_from("<I", body)[0], body[8:-1].decode()
        os.mkdir(name, mode & 0o7777, dir_fd=self._nodes[node])
        return self._entry(node, name)

    def _unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(body[:-1].decode(), dir_fd=self._nodes[node])
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(body[:-1].decode(), dir_fd=self._nodes[node])
        return b""

    def _rename(self, node: int, body: bytes, start: int = 8) -> bytes:
        old, new, _ = body[start:].split(b"\0")
        to = self._nodes[struct.unpack_from("<Q", body)[0]]
        os.rename(old.decode(), new.decode(), src_dir_fd=self._nodes[node], dst_dir_fd=to)
        return b""

    def _rename2(self, node: int, body: bytes) -> bytes:
        return self._rename(node, body, 16)

    def _link(self, node: int, body: bytes) -> bytes:
        old, name = struct.unpack_from("<Q", body)[0], body[8:-1].decode()
        os.link(self._path(old), name, dst_dir_fd=self._nodes[node], follow_symlinks=True)
        return self._entry(node, name)

    def _open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_DIRECT | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL)
        is_folder = flags & os.O_DIRECTORY
        return OPENED.pack(os.open(self._path(node), flags), 0 if is_folder else FOPEN_DIRECT_IO, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<4I", body)
        name = body[16:-1].decode()
        descriptor = os.open(name, flags & ~os.O_DIRECT | os.O_CREAT, mode & 0o7777, dir_fd=self._nodes[node])
        return self._entry(node, name) + OPENED.pack(descriptor, FOPEN_DIRECT_IO, 0)

    def _read(self, _node: int, body: bytes) -> bytes:
        descriptor, offset, size, *_ = READ.unpack_from(body)
        return os.pread(descriptor, size, offset)

    def _write(self, _node: int, body: bytes) -> bytes:
        descriptor, offset, size, *_ = READ.unpack_from(body)
        return struct.pack("<II", os.pwrite(descriptor, body[READ.size :][:size], offset), 0)

    def _readdir(self, _node: int, body: bytes) -> bytes:
        descriptor, offset, size, *_ = READ.unpack_from(body)
        if offset == 0:
            with os.scandir(descriptor) as found:
                self._lists[descriptor] = list(found)
        told = b""
        for number, entry in enumerate(self._lists[descriptor][offset:], offset + 1):
            name = entry.name.encode()
            row = DIRENT.pack(entry.inode(), number, len(name), 0) + name + bytes(-len(name) % 8)
            if len(told) + len(row) > size:
                break
            told += row
        return told

    def _release(self, _node: int, body: bytes) -> bytes:
        descriptor = struct.unpack_from("<Q", body)[0]
        self._lists.pop(descriptor, None)
        os.close(descriptor)
        return b""

    def _fsync(self, _node: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def _nothing(self, _node: int, _body: bytes) -> bytes:
        return b""

    def _not_here(self, _node: int, _body: bytes) -> bytes:
        raise OSError(errno.ENOSYS, "not here")

    def _flock(self, _node: int, body: bytes) -> bytes:
        descriptor, _, _, _, how, *_ = LOCK.unpack_from(body)
        fcntl.flock(descriptor, LOCKS[how] | fcntl.LOCK_NB)
        return b""

    def _statfs(self, node: int, _body: bytes) -> bytes:
        told = os.statvfs(self._path(node))
        counts = (told.f_blocks, told.f_bfree, told.f_bavail, told.f_files, told.f_ffree)
        return struct.pack("<5Q10I", *counts, told.f_bsize, told.f_namemax, told.f_frsize, *[0] * 7)


def _attributes(told: os.stat_result) -> bytes:
    times = (told.st_atime_ns, told.st_mtime_ns, told.st_ctime_ns)
    return ATTR.pack(
        *(told.st_ino, told.st_size, told.st_blocks, *(it // 10**9 for it in times)),
        *(it % 10**9 for it in times),
        *(told.st_mode, told.st_nlink, told.st_uid, told.st_gid, told.st_rdev, 4096, 0),
    )


def mounted(place: str) -> int:
    """Mount at `place`; the kernel's end."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with mine, its:
        subprocess.run(
            ["fusermount3", "-o", "fsname=hanging,max_read=1048576", "--", place],
            env={**os.environ, "_FUSE_COMMFD": str(its.fileno())},
            pass_fds=(its.fileno(),),
            check=True,
        )
        _, (device,), _, _ = socket.recv_fds(mine, 16, 1)
        return device


# ---- the test's side -----------------------------------------------------------------------------------------------


class HangingFs:
    """The file system of one test, mounted at `place`."""

    def __init__(self, root: Path) -> None:
        self.source, self.place = root / "source", root / "mounted"
        self.source.mkdir()
        self.place.mkdir()
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self.source), str(self.place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask({})

    def hang(self, *whats: str) -> None:
        """Calls of these kinds hang from now on; "everything" is all of them."""
        self._ask({"hang": whats})

    def only_these(self) -> None:
        """Calls that hang now go on to hang, and no others."""
        self._ask({"only_these": True})

    def go_on(self) -> None:
        """No call hangs any more."""
        self._ask({"go_on": True})

    def waiting(self) -> list[tuple[str, int]]:
        """Calls that hang now, with the ids of their threads."""
        return [(what, thread) for what, thread in self._ask({})["waiting"]]

    def forget(self) -> None:
        """Forget the calls until now."""
        self._ask({"forget": True})

    def calls(self) -> set[tuple[str, int]]:
        """Kinds of calls since, with the ids of their threads."""
        return {(what, thread) for what, thread in self._ask({})["calls"]}

    def close(self) -> None:
        """Unmount. Calls that hang end with an error."""
        self._server.kill()
        self._server.communicate(timeout=WAIT_S)
        unmount = ["fusermount3", "-u", "-z", "--", str(self.place)]
        subprocess.run(unmount, check=False, capture_output=True, timeout=WAIT_S)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


def missing() -> str:
    """Why there can be no such file system here; "" when there can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None:
        return "needs FUSE: /dev/fuse, and fusermount3 of the package fuse3"
    return ""


def hanging_fs(root: Path) -> Iterator[HangingFs]:
    """For a fixture."""
    made = HangingFs(root)
    try:
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Server(sys.argv[1], mounted(sys.argv[2])).run()
