"""Mooncake's client library, for comparison with the tier."""

from kvtier.tier.mooncake.client import BAD_SIZE, OK, MooncakeClient, address_of
from kvtier.types import ObjectName


class RawMooncake:
    """A `RawClient` of the library's zero-copy calls, which registers memory once.

    Args:
        client: the client of the library.
        root: prefix of the objects' keys.
    """

    def __init__(self, client: MooncakeClient, root: str) -> None:
        self._client, self._root = client, root
        self._known: dict[int, memoryview] = {}

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """Write `frame`, atomically if the tier writes atomically."""
        self._check(self._client.store.put_from(self._key(name), self._place(frame), frame.nbytes))

    def get(self, name: ObjectName, into: memoryview) -> None:
        """Load an object that is as large as `into`."""
        count: int = self._client.store.get_into(self._key(name), self._place(into), into.nbytes)
        self._check(OK if count == into.nbytes else min(count, BAD_SIZE))

    def has(self, name: ObjectName) -> bool:
        """Return whether the object exists, with one request."""
        code: int = self._client.store.is_exist(self._key(name))
        self._check(min(code, OK))
        return code == 1

    def delete(self, name: ObjectName) -> None:
        """Delete an object that exists."""
        self._check(self._client.store.remove(self._key(name), True))

    def close(self) -> None:
        """Release all resources."""
        self._client.close()
        self._known.clear()

    def _check(self, code: int) -> None:
        if code != OK:
            raise OSError(None, f"Mooncake answered with code {code}")

    def _place(self, view: memoryview) -> int:
        place = address_of(view)
        if place not in self._known:
            self._client.register(view)
            self._known[place] = view
        return place

    def _key(self, name: ObjectName) -> str:
        return f"{self._root}raw/{name.hex()}"
