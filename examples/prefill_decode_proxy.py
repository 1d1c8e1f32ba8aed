"""A proxy that prefills in one vLLM server and decodes in another, with kvtier between them.

    python prefill_decode_proxy.py --prefill http://a:8001 --decode http://b:8002 --port 8000

Each request of /v1/completions and /v1/chat/completions goes to a prefill server first, for one token. That server
stores its KV in a tier that both share, and announces in `kv_transfer_params` of its response how many tokens. Then the
request goes to a decode server, with the announcement. That server loads what is announced, computes the rest, and its
response goes to the client as it comes. A prefill server that fails or is late costs only time: the decode server then
computes the prompt. A decode server that takes no connection is passed over for the next one. Other requests go to the
first decode server.

Needs aiohttp, which vLLM brings along. See docs/internals/prefill-decode.md.
"""

# ruff: noqa: INP001 - a program to read and run

import argparse
import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    TCPConnector,
    web,
)

logger = logging.getLogger("prefill_decode_proxy")

BODY_BYTES_MAX = 64 << 20
BODY_S = 60.0
"""Longest time in which a client sends its request."""
CONNECT_S = 5.0
SILENCE_S = 600.0
"""Longest time without a byte from a decode server, or in which a client takes none."""

WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
"""Asks a prefill server for an announcement; also by the convention of vLLM's other connectors."""

ONLY_DECODE = ("stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo")
"""Fields that concern the answer alone."""

PASSED_ON = ("Authorization", "X-Request-Id")
"""Headers of a client for both servers."""


class Proxy:
    """The two steps of a request.

    Args:
        prefill: addresses of prefill servers; they take turns.
        decode: addresses of decode servers; they take turns.
        prefill_s: how long a prefill may take before the decode server computes the prompt.
    """

    def __init__(self, prefill: list[str], decode: list[str], prefill_s: float) -> None:
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode = decode
        self._turns = itertools.count()
        self._prefill_s = prefill_s
        self._session: ClientSession | None = None

    async def run_session(self, _app: web.Application) -> AsyncGenerator[None]:
        """Keep connections to the servers while the proxy runs."""
        limits = ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        # aiohttp's own limit of 100 connections would hold up further requests.
        async with ClientSession(timeout=limits, connector=TCPConnector(limit=0)) as self._session:
            yield

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode."""
        await _receive(request)
        try:
            body: Any = await request.json()
        except (ValueError, LookupError, RecursionError):  # not JSON, an unknown charset, nested too deeply
            return web.json_response({"error": {"message": "the body is not JSON"}}, status=400)
        if isinstance(body, dict) and not _has_several_prompts(body):
            announced = await self._announced(request, body)
            if announced:
                body["kv_transfer_params"] = {**_params(body), **announced}
        first = next(self._turns) % len(self._decode)
        return await self._pass_on(request, self._decode[first:] + self._decode[:first], json=body)

    async def other(self, request: web.Request) -> web.StreamResponse:
        """Any other request."""
        body = await _receive(request)
        return await self._pass_on(request, self._decode, ("Content-Type", *PASSED_ON), data=body or None)

    async def _announced(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """Prefill the request; returns what the server announces, or None."""
        asked = {key: value for key, value in body.items() if key not in ONLY_DECODE}
        asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {**_params(body), **WANTED}}
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        server = next(self._prefill)
        try:
            async with asyncio.timeout(self._prefill_s):
                async with self._client.post(server + request.path, json=asked, headers=_headers(request)) as answer:
                    if answer.status != 200:
                        logger.warning("prefill server %s: status %d", server, answer.status)
                        return None
                    announced: Any = (await answer.json(content_type=None)).get("kv_transfer_params")
                    return announced if isinstance(announced, dict) else None
        except (ClientError, OSError, TimeoutError, ValueError, AttributeError) as error:
            logger.warning("prefill server %s: %r; the decode server computes the prompt", server, error)
            return None

    async def _pass_on(
        self, request: web.Request, servers: list[str], names: tuple[str, ...] = PASSED_ON, **content: object
    ) -> web.StreamResponse:
        """Send a request to the first server that takes it, and its response to the client as it comes."""
        headers = _headers(request, names)
        for server in servers:
            response: web.StreamResponse | None = None
            try:
                async with self._client.request(
                    request.method, server + request.path_qs, headers=headers, **content
                ) as answer:
                    kind = answer.headers.get("Content-Type", "application/json")
                    response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
                    await response.prepare(request)
                    async for part in answer.content.iter_any():
                        async with asyncio.timeout(SILENCE_S):
                            await response.write(part)
                    await response.write_eof()
                    return response
            except (ClientConnectorError, ConnectionTimeoutError) as error:
                logger.warning("decode server %s takes no connection: %r", server, error)
            except (ClientError, OSError, TimeoutError) as error:
                logger.warning("decode server %s: %r", server, error)
                if response is not None:
                    raise  # the client has a part of the answer and must see that it ends early
                break  # it may have begun: a request is not computed twice
        return web.json_response({"error": {"message": "no decode server answers"}}, status=502)

    @property
    def _client(self) -> ClientSession:
        assert self._session is not None, "the proxy does not run"
        return self._session


def _has_several_prompts(body: dict[str, Any]) -> bool:
    """Whether one request has several prompts: an announcement is for one."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt)


def _params(body: dict[str, Any]) -> dict[str, Any]:
    params = body.get("kv_transfer_params")
    return params if isinstance(params, dict) else {}


def _headers(request: web.Request, names: tuple[str, ...] = PASSED_ON) -> dict[str, str]:
    return {name: request.headers[name] for name in names if name in request.headers}


async def _receive(request: web.Request) -> bytes:
    """The body of a request; `request` keeps it."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


def make_app(proxy: Proxy) -> web.Application:
    """The routes of the proxy."""
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.cleanup_ctx.append(proxy.run_session)
    app.router.add_post("/v1/completions", proxy.generate)
    app.router.add_post("/v1/chat/completions", proxy.generate)
    app.router.add_route("*", "/{path:.*}", proxy.other)
    return app


def main() -> None:
    """Run the proxy until it is interrupted."""
    parser = argparse.ArgumentParser(description="Prefill in one vLLM server, decode in another.")
    parser.add_argument("--prefill", action="append", required=True, help="URL of a prefill server; may be repeated")
    parser.add_argument("--decode", action="append", required=True, help="URL of a decode server; may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-seconds", type=float, default=60.0, help="longest prefill (default 60)")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    urls = [[url.rstrip("/") for url in many] for many in (given.prefill, given.decode)]
    proxy = Proxy(urls[0], urls[1], given.prefill_seconds)
    # A client that has gone ends its request in the servers, too.
    web.run_app(make_app(proxy), host=given.host, port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
