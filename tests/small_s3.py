"""A server on loopback that speaks as much S3 as a tier needs, and answers as a test tells it to."""

import hashlib
import http.server
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from kvtier.config.value_types import PrivateText
from kvtier.tier.s3.address import Credentials
from kvtier.tier.s3.bucket import connect
from kvtier.tier.s3.tier import S3Tier
from kvtier.types import ObjectName

BUCKET = "bucket"
KEY_ID = bytes(range(16))
MODEL = hashlib.sha256(b"model").digest()[:16]
LAST_MODIFIED = "Mon, 05 Jan 2026 10:00:00 GMT"
MIB = 1 << 20
BLOCK = b"%x\r\n" % MIB + bytes(MIB) + b"\r\n"
"""A block of a chunked body."""

Answer = Callable[["Request"], bool]
"""Answers a request, or returns False to let the server answer as S3 does."""


class Request(http.server.BaseHTTPRequestHandler):
    """One request of a client."""

    server: "SmallS3"
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def key(self) -> str:
        """The object's key. Empty for a listing."""
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").removeprefix("/")

    def head(self, status: int, **headers: object) -> None:
        """Send status and headers. An underscore in a name stands for a hyphen."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def endless(self, status: int, **headers: object) -> None:
        """Send a body in blocks of 1 MiB until the client closes the connection."""
        self.head(status, ETag='"1"', Last_Modified=LAST_MODIFIED, Transfer_Encoding="chunked", **headers)
        self.close_connection = True
        with suppress(OSError):
            while True:
                self.wfile.write(BLOCK)

    def handle_request(self) -> None:
        self.content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with suppress(OSError):
            if not any(answer(self) for answer in list(self.server.answers)):
                getattr(self, f"_{self.command.lower()}")()

    do_GET = do_HEAD = do_PUT = do_DELETE = handle_request  # noqa: N815 - names that http.server calls

    def log_message(self, *_: object) -> None:
        pass

    def _get(self) -> None:
        if not self.key:
            self._list()
        elif (content := self.server.objects.get(self.key)) is None:
            body = b"<Error><Code>NoSuchKey</Code></Error>"
            self.head(404, Content_Length=len(body))
            self.wfile.write(body if self.command == "GET" else b"")
        else:
            self._send(content)

    _head = _get

    def _send(self, content: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        same = {"ETag": '"1"', "Last_Modified": LAST_MODIFIED}
        if wanted is None:
            self.head(200, Content_Length=len(content), **same)
        elif int(wanted[1]) >= len(content):
            self.head(416, Content_Length=0)
            return
        else:
            start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
            ranged = f"bytes {start}-{end - 1}/{len(content)}"
            content = content[start:end]
            self.head(206, Content_Length=len(content), Content_Range=ranged, **same)
        if self.command == "GET":
            self.wfile.write(content)

    def _put(self) -> None:
        if self.headers.get("If-None-Match") and self.key in self.server.objects:
            self.head(412, Content_Length=0)
        else:
            self.server.objects[self.key] = self.content
            self.head(200, Content_Length=0, ETag='"1"')

    def _delete(self) -> None:
        self.server.objects.pop(self.key, None)
        self.head(204)

    def _list(self) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        prefix, end = query.get("prefix", ""), query.get("delimiter")
        keys = sorted(key for key in self.server.objects if key.startswith(prefix))
        written = {key: number for number, key in enumerate(self.server.objects)}
        # Objects are a minute apart, in the order of writing.
        folders: dict[str, None] = {}
        rows = []
        for key in keys:
            first, slash, _ = key.removeprefix(prefix).partition("/")
            if end and slash:
                folders[f"{prefix}{first}/"] = None
            else:
                size = len(self.server.objects[key])
                hour, minute = divmod(written[key] % 1440, 60)
                rows.append(
                    f"<Contents><Key>{key}</Key><LastModified>2026-01-05T{hour:02}:{minute:02}:00.000Z</LastModified>"
                    f"<ETag>1</ETag><Size>{size}</Size></Contents>"
                )
        rows += [f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>" for folder in folders]
        body = f"<ListBucketResult>{''.join(rows)}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()
        self.head(200, Content_Length=len(body), Content_Type="application/xml")
        self.wfile.write(body)


class SmallS3(http.server.ThreadingHTTPServer):
    """A server of one bucket in memory, as a context manager."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Request)
        self.objects: dict[str, bytes] = {}
        self.answers: list[Answer] = []
        """Functions that may answer a request before S3 does."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        pass  # tests make clients close connections on purpose


def open_tier(endpoint: str, ca_file: Path | None = None, name: str = "s3", **settings) -> S3Tier:
    """Open a tier with short deadlines."""
    deadlines = {"deadline_s": 4.0, "probe_deadline_s": 2.0} | settings
    bucket = connect(
        name,
        f"s3://{BUCKET}/kv",
        endpoint=endpoint,
        region="us-east-1",
        credentials=Credentials(PrivateText("key"), PrivateText("secret")),
        allow_http=True,
        authorities=None if ca_file is None else ca_file.read_bytes(),
        **deadlines,
    )
    return S3Tier(bucket, key_id=KEY_ID, model=MODEL, name=name, **deadlines)


def refusing(status: int, code: str = "", *commands: str) -> Answer:
    """Return a function that answers requests of `commands`, or all, with an S3 error."""
    body = f"<Error><Code>{code}</Code></Error>".encode()

    def answer(request: Request) -> bool:
        if commands and request.command not in commands:
            return False
        request.head(status, Content_Length=len(body))
        request.wfile.write(b"" if request.command == "HEAD" else body)
        return True

    return answer


def marker_key(key_id: bytes = KEY_ID) -> str:
    """Return the key of a secret's marker."""
    return f"kv/{key_id.hex()}/kvtier"


def key_of(name: ObjectName) -> str:
    """Return the object's key in the bucket."""
    return f"kv/{KEY_ID.hex()}/{MODEL.hex()}/{name.hex()}"


def name_of(number: int) -> ObjectName:
    return ObjectName(hashlib.sha256(b"object %d" % number).digest())


def peak_bytes(act: Callable[[], object]) -> int:
    """Return by how much the process's resident memory rises while `act` runs, sampled every 5 ms."""
    done = threading.Event()
    before = peak = _resident_bytes()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, _resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        act()
    finally:
        done.set()
        thread.join()
    return peak - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096
