"""valkey-py, for comparison with the tier, which does not use it."""

from typing import Any

from kvtier.errors import ConfigError, install_hint
from kvtier.tier.valkey.connection import Access, Node
from kvtier.types import ObjectName

try:
    import valkey as library
except ImportError as error:
    raise ConfigError(f"the comparison with valkey-py needs its package: {install_hint('valkey')}") from error


class RawValkey:
    """A `RawClient` that uses only valkey-py, with one value per object.

    Args:
        node: the server.
        access: how to connect; without TLS.
        deadline_s: longest time of a request.
        prefix: prefix of the keys.
    """

    def __init__(self, node: Node, access: Access, deadline_s: float, prefix: str) -> None:
        self._prefix = prefix
        self._client: Any = library.Valkey(  # its types do not match its answers
            host=node.host,
            port=node.port,
            db=access.database,
            username=access.username or None,
            password=access.password.reveal() or None,
            socket_timeout=deadline_s,
        )

    def is_cluster(self) -> bool:
        """Return whether the server is part of a cluster."""
        return bool(self._client.info("cluster")["cluster_enabled"])

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """Write `frame`, atomically if the tier writes atomically."""
        self._client.set(self._key(name), frame, nx=True)

    def get(self, name: ObjectName, into: memoryview) -> None:
        """Load an object that is as large as `into`."""
        into[:] = self._client.get(self._key(name))

    def has(self, name: ObjectName) -> bool:
        """Return whether the object exists, with one request."""
        return self._client.exists(self._key(name)) == 1

    def delete(self, name: ObjectName) -> None:
        """Delete an object that exists."""
        self._client.delete(self._key(name))

    def close(self) -> None:
        """Release all resources."""
        self._client.close()

    def _key(self, name: ObjectName) -> str:
        return f"{self._prefix}raw/{name.hex()}"
