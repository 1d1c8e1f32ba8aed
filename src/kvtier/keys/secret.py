"""The secret that keys every root: random and kept beside a store, or configured for a cluster or tenant.

Whoever has it can compute names from tokens; without it a name tells nothing. It is never logged, no error message
shows it, and its `repr` hides it.
"""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final, NoReturn

from kvtier.errors import ConfigError

SECRET_BYTES: Final = 32
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_MODE_FORBIDDEN = stat.S_IRWXG | stat.S_IRWXO


class Secret(bytes):
    """32 secret bytes that do not print themselves."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Secret({len(self)} bytes)"

    __str__ = __repr__


def parse(text: str, origin: str = "secret") -> Secret:
    """A configured secret: 64 hexadecimal digits; white space around them is fine.

    Args:
        text: what was configured.
        origin: where it came from, for the error message.

    Raises:
        ConfigError: anything else. The message tells its length, never its content.
    """
    digits = text.strip()
    try:
        value = bytes.fromhex(digits)
    except ValueError:
        value = b""
    # fromhex allows blanks between bytes; a secret with blanks is a paste gone wrong.
    if len(value) != SECRET_BYTES or len(digits) != 2 * SECRET_BYTES:
        raise ConfigError(
            f"{origin} must be {2 * SECRET_BYTES} hexadecimal digits ({SECRET_BYTES} bytes), "
            f"got {len(digits)} characters, {sum(digit in _HEXADECIMAL for digit in digits)} of them such digits"
        )
    return Secret(value)


def load_or_create(path: str | os.PathLike[str], *, is_inside: bool = False) -> Secret:
    """The secret kept in the file `path`; a random one is made, mode 0600, when the file does not exist.

    Any number of processes may race: all get the secret of the one that came first. The new file is forced to the
    device before it is visible: a secret lost with the power would make a whole store unreadable.

    Args:
        path: the file; a link to one is followed, such as those of Kubernetes' secrets.
        is_inside: the file is in a store's directory: a link is refused.

    Raises:
        ConfigError: the file is readable by group or others, has another length, or is no regular file; or it can be
            neither read nor made.
    """
    place = Path(path)
    found = _load(place, is_inside=is_inside)
    if found is not None:
        return found
    _create(place)
    found = _load(place, is_inside=is_inside)
    if found is None:
        raise ConfigError(f"secret file {place} was removed while it was being made")
    return found


def _load(path: Path, *, is_inside: bool) -> Secret | None:
    """The secret in `path`; None when there is no such file."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer. On a regular file it does nothing.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if is_inside else 0)
        handle = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        if is_inside and error.errno == errno.ELOOP:
            _refuse(path, "is a link, which is not followed there; to use another file, set store.secret_file", error)
        _refuse(path, f"cannot be read: {error.strerror}", error)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            _refuse(path, "is not a regular file")
        if about.st_mode & _MODE_FORBIDDEN:
            mode = stat.S_IMODE(about.st_mode)
            _refuse(path, f"has mode {mode:04o}, which lets others read it; allowed is 0600 (chmod 600 {path})")
        if about.st_size != SECRET_BYTES:
            _refuse(path, f"must hold {SECRET_BYTES} bytes, holds {about.st_size}")
        return Secret(os.read(handle, SECRET_BYTES))
    finally:
        os.close(handle)


def _create(path: Path) -> None:
    """Make `path` with a random secret, whole or not at all; a file that is there already stays."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, secrets.token_bytes(SECRET_BYTES))
            os.fsync(handle)
        finally:
            os.close(handle)
        # A link, unlike a rename, fails when another process was faster, and then its secret is the one.
        path.hardlink_to(draft)
    except FileExistsError:
        pass
    except OSError as error:
        _refuse(path, f"cannot be made: {error.strerror}; make it by hand or configure the secret itself", error)
    finally:
        draft.unlink(missing_ok=True)


def _refuse(path: Path, why: str, cause: OSError | None = None) -> NoReturn:
    raise ConfigError(f"secret file {path} {why}") from cause
