"""Arms of `kvtier bench serve`: servers that differ in what happens to KV that leaves the device."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from kvtier.config.value_types import parse_size
from kvtier.errors import ConfigError
from kvtier.runtime.open import CHUNK_TOKENS_MIN
from kvtier.tools.bench.serve.server import LMCACHE_CONNECTOR, VllmPython

Kind = Literal["none", "native", "lmcache", "kvtier", "url"]

OWN: dict[str, str] = {
    "none": "no connector",
    "native": "vLLM's tiered offloading: host memory and its fs tier on the drive",
    "lmcache": "LMCache's connector and its server beside vLLM: host memory and its fs_native tier on the drive",
    "kvtier": "kvtier: host memory and its disk tier on the drive",
}
ON_CPU = {
    "native": "; its copies by memcpy of ours, because vLLM's are for CUDA alone",
    "lmcache": "; LMCache's own CPU path, unmodified",
}
LMCACHE_START_S, LMCACHE_MESSAGE_S = 300.0, 60.0
"""Time limits for starting LMCache's server, and for a message to it."""
LMCACHE_FREE_BYTES = 192 << 20
"""LMCache keeps this much host memory free, but at least its default of a fifth, and at most half.

LMCache evicts once a second, and drops objects that do not fit before the next eviction."""
LMCACHE_WORKERS = 4
"""Number of threads of LMCache's file tier. It is LMCache's default."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]{0,31}")
_SHARED = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the servers to compare."""

    name: str
    kind: Kind
    url: str = ""
    """For kind ``url``, the address of a server that the benchmark neither starts nor limits."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """For kind ``kvtier``: settings that override those of the benchmark (`transfer_config`)."""

    @property
    def is_ours(self) -> bool:
        """Whether this program starts the server."""
        return self.kind != "url"

    @property
    def is_local(self) -> bool:
        """Whether the server certainly runs on this machine. If so, its drive and meters can be read here."""
        host = urlsplit(self.url).hostname or ""
        return self.is_ours or host in {"localhost", "::1"} or host.startswith("127.")

    @property
    def has_tiers(self) -> bool:
        """Whether the speed of the drive affects the arm's figures."""
        return self.kind in {"native", "lmcache", "kvtier"}

    def means(self, *, is_cpu: bool) -> str:
        """Return a description of the arm for the report. `is_cpu` says whether vLLM computes on the CPU."""
        if self.kind == "url":
            return f"a server at {self.url}, neither started nor limited here"
        more = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return OWN[self.kind] + (ON_CPU.get(self.kind, "") if is_cpu else "") + (f"; {more}" if more else "")


def parse_arm(text: str) -> Arm:
    """Return the arm that ``--arm`` names: ``none``, ``native``, ``lmcache``, ``kvtier`` or ``NAME=URL``.

    Raises:
        ConfigError: `text` names no arm.
    """
    if text in OWN:
        return Arm(text, text)  # pyright: ignore[reportArgumentType] - a key of OWN
    name, equals, url = text.partition("=")
    parts = urlsplit(url)
    if not equals or not _NAME.fullmatch(name) or parts.scheme not in {"http", "https"} or not parts.hostname:
        allowed = f"{', '.join(OWN)}, or NAME=URL such as mine=http://127.0.0.1:8000"
        raise ConfigError(
            f"--arm {text} is not an arm; allowed: {allowed}, where NAME has at most 32 letters, digits, '_', '.' and "
            "'+', and begins with a letter or a digit"
        )
    if name in OWN:
        raise ConfigError(f"--arm {text}: the name {name} is that of a built-in arm; use another name")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            f"--arm {name}=…: the URL has a user, a password or a query; allowed: only scheme, host and port"
        )
    return Arm(name, "url", url.rstrip("/"))


def parse_arms(texts: Sequence[str], settings: Mapping[str, Any] | None = None) -> list[Arm]:
    """Return the arms of all ``--arm`` options. kvtier's own arm gets `settings`.

    Raises:
        ConfigError: an arm is given twice, or there are settings but no arm that takes them.
    """
    arms = [parse_arm(text) for text in texts]
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--arm {twice[0]} is given twice; give each name once")
    given = settings or {}
    if given and "kvtier" not in names:
        raise ConfigError(f"--set {next(iter(given))} applies to no arm; add --arm kvtier")
    return [Arm(it.name, it.kind, it.url, given if it.kind == "kvtier" else {}) for it in arms]


def transfer_config(
    arm: Arm,
    store: Path,
    host_bytes: int,
    store_bytes: int,
    *,
    is_cpu: bool,
    journal: Path | None = None,
    chunk_tokens: int = CHUNK_TOKENS_MIN,
    ports: Sequence[int] = (),
) -> dict[str, Any] | None:
    """Return the value of ``--kv-transfer-config``, or None for an arm without a connector.

    Args:
        arm: an arm whose server this program starts.
        store: directory of the tier on the drive.
        host_bytes: size of the tier in host memory, the same for every arm.
        store_bytes: capacity of the tier on the drive.
        is_cpu: whether vLLM computes on the CPU.
        journal: directory of kvtier's journal.
        chunk_tokens: tokens of kvtier's chunks. vLLM's own chunks and LMCache's get the same size.
        ports: two free ports for LMCache's server: one for messages and one for HTTP.
    """
    if arm.kind == "kvtier":
        extra: dict[str, Any] = {
            "tiers": [f"disk:{store}?capacity_bytes={store_bytes}"],
            "host.capacity_bytes": host_bytes,
            # vLLM's own offloading touches all host memory at start as well.
            "host.populate": True,
        }
        extra |= {} if journal is None else {"journal.path": str(journal)}
        named = {"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier.connect.vllm"}
        return _SHARED | named | {"kv_connector_extra_config": extra | dict(arm.settings)}
    if arm.kind == "native":
        extra = {
            "cpu_bytes_to_use": host_bytes,
            # By default, chunks have another size and generated tokens are not stored.
            "block_size": chunk_tokens,
            "offload_prompt_only": False,
            "secondary_tiers": [{"type": "fs", "root_dir": str(store)}],
        }
        if is_cpu:
            extra |= {"spec_name": "MemcpyTieringSpec", "spec_module_path": "kvtier.tools.bench.serve.native_tiering"}
        else:
            extra |= {"spec_name": "TieringOffloadingSpec"}
        return _SHARED | {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    if arm.kind == "lmcache":
        extra = _lmcache(store, host_bytes, store_bytes, chunk_tokens, *ports)
        named = {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": LMCACHE_CONNECTOR}
        return _SHARED | named | {"kv_connector_extra_config": extra}
    return None


def _lmcache(store: Path, host_bytes: int, store_bytes: int, chunk_tokens: int, port: int, http: int) -> dict[str, Any]:
    """Return LMCache's settings: direct I/O, answers stored, no metrics.

    Loaded objects leave LMCache's host memory after the copy, which is the default. With the policy ``retain`` they
    would fill it between two evictions, and loads would be dropped.
    """
    drive = {
        "type": "fs_native",
        "base_path": str(store),
        "use_odirect": True,
        "num_workers": LMCACHE_WORKERS,
        # Without an eviction policy the capacity is not a limit.
        "max_capacity_gb": store_bytes / (1 << 30),
        "eviction": {"eviction_policy": "LRU"},
    }
    options = {
        "chunk-size": chunk_tokens,
        "l1-size-gb": host_bytes / (1 << 30),
        "eviction-policy": "LRU",
        "eviction-trigger-watermark": round(max(0.5, min(0.8, 1 - LMCACHE_FREE_BYTES / host_bytes)), 3),
        "eviction-ratio": 0.4,
        "http-port": http,
        "l2-adapter": json.dumps(drive),
    }
    arguments = shlex.join(f"--{name}={value}" for name, value in options.items())
    return {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": port,
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.wait_timeout": LMCACHE_START_S,
        "lmcache.mp.autostart.server_args": f"--disable-observability {arguments}",
        "lmcache.mp.mq_timeout": LMCACHE_MESSAGE_S,
        # On a CPU the automatic choice is a mode that LMCache's server does not support.
        "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        "lmcache.mp.save_decode_cache": True,
    }


def chunk_tokens(arms: Sequence[Arm]) -> int:
    """Return the tokens per chunk that kvtier's arm sets, or else a default that is a multiple of the block size."""
    given = (arm.settings.get("store.chunk_tokens") for arm in arms if arm.kind == "kvtier")
    return next(filter(None, given), CHUNK_TOKENS_MIN)


def server_command(
    vllm: VllmPython,
    port: int,
    model: Path,
    transfer: Mapping[str, Any] | None,
    *,
    device_kv_bytes: int,
    context_tokens: int,
    running: int,
) -> list[str]:
    """Return the command that starts vLLM's server on loopback. Arms differ only in the connector.

    Args:
        vllm: the Python that runs the server.
        port: port of the server.
        model: directory of the checkpoint.
        transfer: the result of `transfer_config`.
        device_kv_bytes: KV memory of the device.
        context_tokens: tokens of the longest prompt with its answer.
        running: largest number of requests in a batch.
    """
    return [
        *(str(vllm.python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *(["--enforce-eager"] if vllm.is_cpu else []),
        *("--model", str(model), "--served-model-name", "m", "--dtype", "bfloat16"),
        *("--max-model-len", str(context_tokens), "--kv-cache-memory-bytes", str(device_kv_bytes)),
        *("--max-num-seqs", str(running), "--seed", "0", "--enable-prefix-caching"),
        *([] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]),
    ]


def model_context(model: Path) -> int:
    """Return the longest context of a checkpoint, in tokens.

    Raises:
        ConfigError: the checkpoint has no chat template, or no readable configuration.
    """
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
        tokenizer: dict[str, Any] = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {model}: {error}; allowed: a directory with a checkpoint and its tokenizer"
        ) from error
    if "chat_template" not in tokenizer and not any(model.glob("chat_template.*")):
        raise ConfigError(f"--model {model}: its tokenizer has no chat template, which conversations need")
    return int(config.get("text_config", config).get("max_position_embeddings") or parse_size("4KiB"))
