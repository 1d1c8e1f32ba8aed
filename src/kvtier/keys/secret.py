"""The secret that keys every root: random and kept in a store's directory, or configured for a cluster or tenant.

With the secret, names can be computed from tokens. Without it, names reveal nothing. The secret is never logged, and
neither error messages nor its `repr` show it.
"""

import errno
import hmac
import os
import re
import secrets
import shlex
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

from kvtier.errors import UnusablePathError

SECRET_BYTES: Final = 32
ANY_OWNER: Final = "the tier's setting any_owner = true"
BYTES_MAX: Final = 1 << 20
"""Maximum size of a private file that is read whole."""
_MODE_FORBIDDEN = stat.S_IRWXG | stat.S_IRWXO
_WHAT = "secret file"

# No pattern has nested repetitions, so the time grows linearly with the text.
_DIGITS = re.compile(r"[0-9A-Fa-f]{16,}")
_NAMED = re.compile(
    r"((?:pass|secret|token|credential|auth)[A-Za-z_]{0,20}['\"]? ?[=:]|api.?key[ =:]).*", re.DOTALL | re.IGNORECASE
)

_KEY_ID_OF = b"kvtier.key-id"
_ID_BYTES = 16
_MODEL_DOMAIN = b"kvtier.model\0"


class Secret(bytes):
    """32 secret bytes with a `repr` that hides them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Secret({len(self)} bytes)"

    __str__ = __repr__


def redacted(text: str) -> str:
    """Return `text` for messages, without likely secrets. It may be a URL, a tier's setting, or a program's output.

    The result hides the text between a colon and the last ``@``, unless that is the start of a path; everything after a
    word such as ``password=``; and long hexadecimal numbers.
    """
    head, colon, rest = text.partition(":")
    at = max(rest.rfind("@"), rest.rfind("%40"))
    login = rest[: max(at, 0)]
    is_path = login.startswith("/") and not (login.startswith("//") or ":" in login or "%3" in login)  # %3A is a colon
    if colon and at >= 0 and not is_path:
        text = f"{head}:(hidden)@{rest[at:].removeprefix('@').removeprefix('%40')}"
    return _DIGITS.sub("(hidden)", _NAMED.sub(r"\1(hidden)", text))


def key_id(secret: Secret) -> bytes:
    """Return 16 public bytes that are equal for equal secrets: the first part of a shared store's prefix."""
    return hmac.digest(secret, _KEY_ID_OF, "sha256")[:_ID_BYTES]


def model_id(secret: bytes | None, fingerprint: bytes) -> bytes:
    """Return 16 public bytes for one model under one secret: the second part of a shared store's prefix.

    A fingerprint can be computed from a public checkpoint. Without the secret, no reader of a store can tell which
    model an id stands for.

    Args:
        secret: the configured secret; None if none is configured. The HMAC key is then empty, and the id hides nothing.
            Only stores of one machine have no configured secret, and their directories hold the secret anyway.
        fingerprint: 32 bytes, `Fingerprint.digest`.
    """
    return hmac.digest(secret or b"", _MODEL_DOMAIN + fingerprint, "sha256")[:_ID_BYTES]


@contextmanager
def private_file(
    path: Path, what: str, *, is_inside: bool = False, any_owner: bool | None = None, any_reader: bool = False
) -> Generator[int]:
    """Open a regular file that only this user or root can read, and yield its descriptor.

    Args:
        path: the file; links are followed, such as those of Kubernetes' secrets.
        what: the file's role or its setting, for messages.
        is_inside: whether the file is in a store's directory, where links are refused.
        any_owner: whether the file may belong to another ordinary user, who can then read and replace it. None also
            forbids that, and the message then names no setting that permits it.
        any_reader: whether other users may read it.

    Raises:
        FileNotFoundError: there is no such file.
        UnusablePathError: another user owns it, others can read it, it is not a regular file, or it cannot be read.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer. It has no effect on regular files.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if is_inside else 0)
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise
        if is_inside and error.errno == errno.ELOOP:
            _refuse(
                path, "is a link, which is not followed in a store; to use another file, set store.secret_file", error
            )
        _refuse(path, f"cannot be read: {error.strerror}", error, what)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            _refuse(path, "is not a regular file", what=what)
        if about.st_uid not in {0, os.geteuid()} and not any_owner:
            hint = owner_hint(path, about.st_uid) + ("" if any_owner is None else f", or {ANY_OWNER}")
            _refuse(path, f"belongs to user {about.st_uid}", what=what, allowed=f"this user and root ({hint})")
        if about.st_mode & _MODE_FORBIDDEN and not any_reader:
            mode, hint = stat.S_IMODE(about.st_mode), f"chmod 600 {shlex.quote(str(path))}"
            _refuse(path, f"has mode {mode:04o}, which lets others read it", what=what, allowed=f"0600 ({hint})")
        yield handle
    finally:
        os.close(handle)


def read_private(
    path: Path, what: str, bytes_max: int = BYTES_MAX, *, any_owner: bool | None = None, any_reader: bool = False
) -> bytes:
    """Return the content of a `private_file` of up to `bytes_max` bytes.

    Raises:
        UnusablePathError: as in `private_file`, or the file is longer or does not exist.
    """
    try:
        with (
            private_file(path, what, any_owner=any_owner, any_reader=any_reader) as handle,
            os.fdopen(handle, "rb", closefd=False) as file,
        ):
            content = file.read(bytes_max + 1)
            if len(content) > bytes_max:
                _refuse(path, f"has more than {bytes_max} bytes", what=what)
            return content
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", error, what)


def owner_hint(path: Path, owner: int) -> str:
    """Return the fix for a file that belongs to another user, `owner`.

    Root is first told to rerun as that user, because the file may be a running engine's.
    """
    mine = f"chown {os.geteuid()} {shlex.quote(str(path))}"
    return mine if os.geteuid() else f"run this as user {owner}, or if only root uses it, {mine}"


def load(path: str | os.PathLike[str], *, is_inside: bool = False, any_owner: bool | None = None) -> Secret | None:
    """Return the secret in the file `path`; None if there is no file. For arguments and errors see `load_or_create`."""
    path = Path(path)
    try:
        with private_file(path, _WHAT, is_inside=is_inside, any_owner=any_owner) as handle:
            if (size_bytes := os.fstat(handle).st_size) != SECRET_BYTES:
                _refuse(path, f"must hold {SECRET_BYTES} bytes, but holds {size_bytes}")
            return Secret(os.read(handle, SECRET_BYTES))
    except FileNotFoundError:
        return None


def load_or_create(path: str | os.PathLike[str], *, is_inside: bool = False, any_owner: bool | None = None) -> Secret:
    """Return the secret in the file `path`. Create it with a random secret and mode 0600 if it does not exist.

    Processes may race: all get the secret of the first one. The new file is synced to the device before it becomes
    visible. Otherwise a power failure could lose the secret and make its whole store unreadable.

    Args:
        path: the file; links are followed, such as those of Kubernetes' secrets.
        is_inside: whether the file is in a store's directory, where links are refused.
        any_owner: see `private_file`.

    Raises:
        UnusablePathError: others own or can read the file, it has the wrong length, is not a regular file, or can be
            neither read nor created.
    """
    found = load(path, is_inside=is_inside, any_owner=any_owner)
    if found is None:
        _create(Path(path))
        found = load(path, is_inside=is_inside, any_owner=any_owner)
    if found is None:
        _refuse(Path(path), "was removed while it was created")
    return found


def _create(path: Path) -> None:
    """Create `path` with a random secret, atomically. An existing file stays."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, secrets.token_bytes(SECRET_BYTES))
            os.fsync(handle)
        finally:
            os.close(handle)
        # Unlike a rename, a link fails if another process was faster. Then that process's secret is used.
        path.hardlink_to(temporary)
    except FileExistsError:
        pass
    except OSError as error:
        _refuse(path, f"cannot be created: {error.strerror}; create it by hand, or set store.secret", error)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _refuse(path: Path, why: str, cause: OSError | None = None, what: str = _WHAT, allowed: str = "") -> NoReturn:
    raise UnusablePathError(why, setting=what, value=repr(str(path)), allowed=allowed) from cause
