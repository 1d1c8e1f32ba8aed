"""A server whose certificate is not trusted: the message names the setting that trusts it."""

import shutil
import ssl
import subprocess

import pytest
from tests.small_s3 import BUCKET, SmallS3, open_tier

from kvtier.errors import KvError

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture
def serve(tmp_path):
    servers = []

    def started(*extensions):
        """A server with a self-signed certificate; its endpoint, and the certificate's file."""
        file, key = tmp_path / "server.pem", tmp_path / "server.key"
        options = [it for extension in extensions for it in ("-addext", extension)]
        new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
        made = (*new, "-subj", "/CN=localhost", "-keyout", key, "-out", file, *options)
        subprocess.run(["openssl", *made], check=True, capture_output=True, timeout=60)
        server = SmallS3()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file, key)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        servers.append(server.__enter__())
        return server.endpoint.replace("http:", "https:"), file

    yield started
    for server in servers:
        server.__exit__()


def test_a_self_signed_certificate_is_trusted_with_ca_file_only(serve):
    endpoint, file = serve(NAMES, "basicConstraints=critical,CA:FALSE")
    with pytest.raises(KvError, match=r"certificate is not trusted \(UnknownIssuer\).*ca_file"):
        open_tier(endpoint)
    open_tier(endpoint, ca_file=file).close()


def test_one_that_no_setting_makes_trusted_is_explained(serve):
    endpoint, file = serve(NAMES)  # an authority's own, as openssl makes it without more
    with pytest.raises(KvError, match=r"\(CaUsedAsEndEntity\).*ca_file.*CA:FALSE"):
        open_tier(endpoint, ca_file=file)


def test_another_failure_of_a_bucket_with_that_name_is_none(serve):
    """The URL is in the client's errors, too."""
    with SmallS3() as server:
        endpoint = server.endpoint
    with pytest.raises(KvError) as raised:
        open_tier(f"{endpoint}/certificate")
    assert "ca_file" not in str(raised.value), BUCKET
