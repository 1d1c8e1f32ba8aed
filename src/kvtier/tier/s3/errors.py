"""Finds out why a request to an S3 server failed, without revealing secrets, and whether to try again."""

import random
import re
from typing import NamedTuple

ATTEMPTS_MAX = 6
TEXT_MAX = 1 << 16
"""Maximum number of characters of an error that are searched. The body of an answer, which may be long, comes last."""
BACKOFF_S, BACKOFF_MAX_S = 0.05, 1.0

NO_ANSWER = "no answer in time"

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_IO_ERROR = re.compile(r'message: "([^"\n]{1,120})"')
_CERTIFICATE = re.compile(r"InvalidCertificate\((?:\s*Other\(\s*OtherError\()?\s*(\w{1,40})|peer certificate")
_METADATA = ("/latest/api/token", "/latest/meta-data", "//169.254.")
"""Parts of the URLs at which a machine or container gets its credentials."""
_PASSING = frozenset({408, 409, 429, 500, 502, 503, 504})
"""HTTP statuses worth a retry. 409 means that two conditional writes of one name collided."""
INSUFFICIENT_STORAGE = 507
_FULL = frozenset({"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"})
_HINTS = {
    "NoSuchBucket": "create the bucket, or correct the URL",
    "InvalidAccessKeyId": "the access key is unknown there",
    "SignatureDoesNotMatch": "the secret access key is wrong",
    "AccessDenied": "the credentials need GetObject, PutObject and DeleteObject there, and ListBucket: without the "
    "last, S3 refuses requests for absent objects",
    "NoCredentials": "set access_key_id and secret_access_key, or a profile",
    "Certificate": "set ca_file to the certificate of the authority that signed it. A self-signed certificate is its "
    "own authority; it must be made with basicConstraints=CA:FALSE, and for the endpoint's name",
    "Protocol": "check the endpoint's scheme and port",
    "Answer": "this is not an S3 server",
    "Region": "set the bucket's region",
}


class Refusal(NamedTuple):
    """Why a request failed. The request is omitted, because S3 repeats key ids and signatures in its errors."""

    cause: str
    status: int
    """HTTP status; 0 without an answer."""
    code: str
    """S3's code, such as ``NoSuchBucket``; may be empty."""
    is_passing: bool
    """Whether another attempt may succeed."""

    @property
    def is_mistake(self) -> bool:
        """Whether only a change of settings helps. A full bucket or server may have room later."""
        return not self.is_passing and self.status < 500 and not self.is_full

    @property
    def is_full(self) -> bool:
        """Whether the bucket's quota or the server has no room."""
        return self.code in _FULL or self.status == INSUFFICIENT_STORAGE


def refusal_of(error: BaseException) -> Refusal:
    """Return the refusal that an exception of the client stands for."""
    text = str(error)[:TEXT_MAX]
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        number, name = int(status[1]), code[1] if code else ""
        return Refusal(f"HTTP {number} {name}".strip(), number, name, number in _PASSING)
    if any(part in text for part in _METADATA):
        cause = "there are no credentials in the settings, the environment or the machine's metadata"
        return Refusal(cause, 0, "NoCredentials", is_passing=False)
    if (found := _CERTIFICATE.search(text)) is not None:
        cause = f"the server's certificate is not trusted ({found[1] or 'without a reason'})"
        return Refusal(cause, 0, "Certificate", is_passing=False)
    if "InvalidContentType" in text or "Parse(" in text or "InvalidMessage" in text:
        return Refusal(
            "the server does not speak HTTP, or does not use TLS as the endpoint says", 0, "Protocol", is_passing=False
        )
    if "NotPartial" in text or "Header(" in text or "Metadata {" in text:
        return Refusal("its answer lacks fields that S3 sends", 0, "Answer", is_passing=False)
    if "redirect" in text.lower():
        return Refusal("the server redirects the request, as it does for a wrong region", 0, "Region", is_passing=False)
    io_error = _IO_ERROR.search(text)
    if io_error is not None:
        return Refusal(io_error[1], 0, "", is_passing=True)
    if "dns error" in text or "lookup address" in text:
        return Refusal("the endpoint's name cannot be resolved", 0, "", is_passing=True)
    if isinstance(error, TimeoutError) or "TimedOut" in text or "Timeout" in text:
        return Refusal(NO_ANSWER, 0, "", is_passing=True)
    return Refusal(f"the connection failed ({type(error).__name__})", 0, "", is_passing=True)


def pause_s(refusal: Refusal, attempts: int) -> float | None:
    """Return the random pause in seconds after `attempts` attempts, or None to give up."""
    if not refusal.is_passing or attempts == ATTEMPTS_MAX:
        return None
    longest_s = min(BACKOFF_MAX_S, BACKOFF_S * 2**attempts)
    return random.uniform(longest_s / 2, longest_s)  # noqa: S311 - no secret


def hint(refusal: Refusal) -> str:
    """Return advice on how to fix the cause of a refusal."""
    if refusal.status == 403 and not refusal.code:  # an answer to HEAD has no body
        return _HINTS["AccessDenied"]
    if refusal.status == 407:
        return "the proxy asks for a user name and a password"
    if refusal.status and not refusal.code:
        return "this is not the answer of an S3 server"
    return _HINTS.get(refusal.code, "check the tier's settings")
