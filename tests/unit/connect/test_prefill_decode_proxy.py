"""The example proxy beside small servers that fail. With vLLM's servers: `tests/vllm/test_vllm_prefill_decode.py`."""

import asyncio
import importlib.util
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientError, ClientSession, TCPConnector, web

PATH = Path(__file__).parents[3] / "examples" / "prefill_decode_proxy.py"
GENERATE = "/v1/completions"
AT_ONCE = 120
END_S = 20.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

spec = importlib.util.spec_from_file_location("prefill_decode_proxy", PATH)
assert spec is not None
assert spec.loader is not None
proxy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(proxy)


@asynccontextmanager
async def serving(app: web.Application) -> AsyncGenerator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def run(use: Callable[[ClientSession, str], Awaitable[None]], prefill: Handler, *decode: Handler | None) -> None:
    """Call `use` with a client and the address of a proxy. None: a decode server that takes no connection."""

    async def main() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(END_S):
            addresses = []
            for handler in (prefill, *decode):
                app = web.Application()
                if handler is None:
                    addresses.append("http://127.0.0.1:1")
                    continue
                app.router.add_route("*", "/{path:.*}", handler)
                addresses.append(await stack.enter_async_context(serving(app)))
            app = proxy.make_app(proxy.Proxy(addresses[:1], addresses[1:], 5.0))
            address = await stack.enter_async_context(serving(app))
            client = await stack.enter_async_context(ClientSession(connector=TCPConnector(limit=0)))
            await use(client, address)

    asyncio.run(main())


async def announcing(_request: web.Request) -> web.Response:
    return web.json_response({"kv_transfer_params": {"kvtier": {"tokens": 512}}})


async def echo(request: web.Request) -> web.Response:
    kept = {name: request.headers.get(name) for name in ("Content-Type", "Authorization", "Cookie")}
    return web.json_response({**kept, "body": await request.json()})


@pytest.mark.parametrize("status", [200, 500])
def test_the_announcement_reaches_the_decode_server_with_the_key_of_the_client(status: int) -> None:
    async def prefill(request: web.Request) -> web.Response:
        assert (await request.json())["max_tokens"] == 1
        answer = await announcing(request)
        answer.set_status(status)
        return answer

    async def use(client: ClientSession, address: str) -> None:
        headers = {"Authorization": "Bearer of a client", "Cookie": "a=b"}
        async with client.post(address + GENERATE, json={"prompt": ["a"]}, headers=headers) as answer:
            got = await answer.json()
        params = {"kv_transfer_params": {"kvtier": {"tokens": 512}}} if status == 200 else {}
        assert got["body"] == {"prompt": ["a"], **params}
        assert (got["Authorization"], got["Cookie"]) == ("Bearer of a client", None)

    run(use, prefill, echo)


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    async def use(client: ClientSession, address: str) -> None:
        for kind in ("application/json", "application/json; charset=none"):
            async with client.post(address + GENERATE, data=body, headers={"Content-Type": kind}) as answer:
                assert answer.status == 400

    run(use, announcing, echo)


def test_another_request_keeps_its_content_type() -> None:
    async def use(client: ClientSession, address: str) -> None:
        async with client.post(address + "/tokenize", json={"prompt": "a"}) as answer:
            assert await answer.json() == {
                "Content-Type": "application/json",
                "Authorization": None,
                "Cookie": None,
                "body": {"prompt": "a"},
            }

    run(use, announcing, echo)


def test_a_decode_server_that_takes_no_connection_is_passed_over() -> None:
    async def use(client: ClientSession, address: str) -> None:
        for _ in range(3):
            async with client.post(address + GENERATE, json={}) as answer:
                assert answer.status == 200

    run(use, announcing, None, echo)

    async def none(client: ClientSession, address: str) -> None:
        async with client.post(address + GENERATE, json={}) as answer:
            assert answer.status == 502

    run(none, announcing, None, None)


def test_an_answer_that_ends_early_is_no_whole_answer() -> None:
    async def decode(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.abort()
        return answer

    async def use(client: ClientSession, address: str) -> None:
        async with client.post(address + GENERATE, json={}) as answer:
            with pytest.raises(ClientError):
                await answer.read()

    run(use, announcing, decode)


def test_many_requests_run_at_once_and_end_when_their_clients_leave() -> None:
    inside, full, empty = 0, asyncio.Event(), asyncio.Event()

    async def decode(_request: web.Request) -> web.Response:
        nonlocal inside
        inside += 1
        if inside == AT_ONCE:
            full.set()
        try:
            await asyncio.sleep(2 * END_S)
        finally:
            inside -= 1
            if not inside:
                empty.set()
        return web.Response()

    async def use(client: ClientSession, address: str) -> None:
        tasks = [asyncio.create_task(client.post(address + GENERATE, json={}).__aenter__()) for _ in range(AT_ONCE)]
        await full.wait()
        for task in tasks:
            task.cancel()
        await empty.wait()

    run(use, announcing, decode)
