"""On a GPU: KV goes from device memory through SGLang's host pool to a tier, and back to the device."""

from collections.abc import Callable

import pytest
import torch
from engines import PAGE, Engine, chain, mha
from tests.waiting import wait_until

pytestmark = pytest.mark.gpu

PROMPT = range(8 * PAGE)
WAIT_S = 30.0


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        ("layer_first", "kernel"),
        ("page_first", "kernel"),
        ("page_head", "kernel"),
        ("page_first_direct", "direct"),
        ("layer_first", "direct"),
    ],
)
def test_load_back_to_the_device(start: Callable[..., Engine], layout: str, backend: str) -> None:
    """Device to host to tier, all wiped, and back: every layer's keys and values are equal."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    device, host = mha(layout, device="cuda")
    engine = start(pools=(device, host), layout=layout, io_backend=backend)
    controller = engine.controller
    places = torch.arange(PAGE, PAGE + len(PROMPT), device="cuda")
    layers = [*device.k_buffer, *device.v_buffer]
    for number, layer in enumerate(layers):
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(number)).to(layer.dtype))
    expected = [layer[places].clone() for layer in layers]
    indices = controller.write(places)
    wait_until(controller.ack_write_queue[-1].finish_event.query, "the copies", WAIT_S)
    controller.write_storage(indices, list(PROMPT), hash_value=chain(PROMPT))
    assert controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens == len(PROMPT)
    for buffer in [*layers, host.kv_buffer]:
        buffer.zero_()
    assert engine.storage.batch_get_v1(chain(PROMPT), indices) == [True] * 8
    controller.mem_pool_device_allocator.alloc = lambda count: places[:count]
    controller.load(indices)
    controller.start_loading()
    wait_until(controller.ack_load_queue[-1].finish_event.query, "the copies", WAIT_S)
    torch.cuda.synchronize()
    assert all(torch.equal(layer[places], one) for layer, one in zip(layers, expected, strict=True))
