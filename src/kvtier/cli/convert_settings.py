"""Converts settings of LMCache, vLLM's own offloading, Mooncake and HiCache to kvtier's, and reports the result.

`conversion_tables` lists the keys. Values of secrets are never printed.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click

from kvtier.cli.conversion_tables import (
    ALLOWED,
    HICACHE_FOLDER,
    KINDS,
    LMCACHE,
    LOST,
    NO_DISK,
    NO_KINDS,
    NOT_NEEDED,
    OFF,
    OFFLOADING,
    REPLACED,
    S3_PARTS,
    SECRETS,
    SHARED,
    STAYS,
    TIER_KEYS,
    UNKNOWN,
    Fate,
    Table,
    answers,
    fate,
    final,
    names,
    reason,
    s3_tier,
    shown,
)
from kvtier.cli.engine_settings import HOST_BYTES
from kvtier.cli.options import Quantity
from kvtier.config.loader import AND, Loaded, load
from kvtier.config.schema import FILE_BYTES_MAX, short
from kvtier.config.tier_list import HOST, SettingOrigin
from kvtier.config.value_types import parse_count, parse_size
from kvtier.connect.sglang.installed_engine import EXTRA, OWN_KEYS
from kvtier.errors import ConfigError
from kvtier.keys.secret import redacted
from kvtier.report import table as report

PASSWORD_FILE = "valkey.password"  # noqa: S105 - the name of a file

FOLDER = "kvtier"
"""Name of the folder that is added to a given path, because a store refuses a directory with other files."""

workers_option = click.option(
    "--workers",
    type=Quantity(1, 4096),
    help="Workers of one engine, tensor x pipeline parallel, by which converted sizes are multiplied.  [1]",
)


class Conversion:
    """The result of converting another cache's settings.

    Args:
        workers: number of workers of an engine, by which sizes per worker are multiplied; None if it was not given,
            which counts as 1.
        environ: the environment.
    """

    def __init__(self, workers: int | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.settings: dict[str, object] = {}
        """The converted settings by ``section.key``, without settings of tiers."""
        self.tiers: list[dict[str, Any]] = []
        self.kept: dict[str, object] = {}
        """SGLang's own keys in the configuration of its storage backend."""
        self.role, self.page_tokens = "", 0
        """vLLM's `kv_role` and SGLang's page size, if known."""
        self.workers, self.disk_bytes = workers, 0
        self._environ = environ
        self._sources: list[str] = []
        """The options and their files. The last one is being read."""
        self._rows: list[tuple[str, Fate]] = []
        self._keys: dict[str, str] = {}
        """For messages: each foreign key with its source, by the setting that it becomes."""
        self._order: list[str] = []
        """Keys in the order of the user's file."""

    def load(self, tiers: Sequence[str], flags: Sequence[str]) -> Loaded:
        """Return all settings, and print to stderr a table of what becomes of each key.

        `--tier` and `--set` override converted settings.

        Raises:
            ConfigError: a setting is wrong.
        """
        if not self._sources:
            return load(flags=flags, tiers=tiers)
        hosts = [text for text in tiers if text.partition("=")[0] == HOST]
        is_replaced, named = len(hosts) < len(tiers), {flag.partition("=")[0] for flag in flags}
        converted = [s3_tier(tier) if tier["kind"] == "s3" else tier for tier in self.tiers]
        uncapped = [it.get("name", it["kind"]) for it in converted if "path" in it and "capacity_bytes" not in it]
        for key in (f"tiers.{name}.capacity_bytes" for name in uncapped):
            if key not in named and not is_replaced:
                self._rows.append(
                    (
                        "(no cap)",
                        Fate(f"{key}: its default", f"a tier always has a cap; to change it: --set {key}=SIZE"),
                    )
                )
        kinds = {text.partition(":")[0] for text in tiers} if is_replaced else {tier["kind"] for tier in converted}
        given = " ".join((*flags, *self._environ)).lower().replace("__", ".")
        if kinds & SHARED and "store.secret" not in given:
            self._keys["store.secret_file"] = self._sources[-1]
            self._rows.append(
                ("(secret)", self.set("store.secret_file", "kv.secret", "one secret for all engines that share a tier"))
            )
        by = dict.fromkeys(named, "--set") | ({HOST_BYTES: "--tier"} if hosts else {})
        values = self.settings | {
            f"tiers.{tier.get('name', tier['kind'])}.{key}": it for tier in converted for key, it in tier.items()
        }
        if is_replaced:
            by |= {
                name: "--tier" for _, it in self._rows for name in names(it) if name.startswith(("tiers.", "a tier "))
            }
        self._print([(key, final(becomes, values, by)) for key, becomes in self._rows])
        keys = {name: key for name, key in self._keys.items() if name in values and name not in by}
        made = [f"{name}={value}" for name, value in self.settings.items() if not (hosts and name == HOST_BYTES)]
        try:
            loaded = load(flags=(*made, *flags), tiers=tiers if is_replaced else [*converted, *hosts])
        except ConfigError as error:
            known = {f"flag --set {name}": f"flag {key}" for name, key in keys.items()} | {
                "flag --tier": f"flag {keys.get(error.setting, '--tier' if tiers else ', '.join(self._sources))}"
            }
            error.origin = AND.join(known.get(it, it) for it in error.origin.split(AND))
            raise
        return replace(
            loaded, origins={**loaded.origins, **{name: SettingOrigin("flag", it) for name, it in keys.items()}}
        )

    def _print(self, rows: Sequence[tuple[str, Fate]]) -> None:
        """Print the table: first the converted keys, then the others, both in the order of the user's file."""
        words, order = [STAYS, LOST, UNKNOWN, NOT_NEEDED], {key: place for place, key in enumerate(self._order)}
        found = sorted(dict.fromkeys(rows), key=lambda row: order.get(re.split(r"[ .]", row[0])[0], len(order)))
        found.sort(key=lambda row: words.index(row[1].becomes) if row[1].becomes in words else -1)
        lines = [(key, *becomes) for key, becomes in found]
        with redirect_stdout(sys.stderr):
            report.print_table(report.Table((", ".join(self._sources), "kvtier", ""), lines))

    def lmcache(self, given: str) -> None:
        """Convert the settings of LMCache: its YAML file, ``env``, or the flags of ``lmcache server``.

        ``env`` stands for the file that the variable LMCACHE_CONFIG_FILE names, if any. Variables override the file, as
        in LMCache.

        Raises:
            ConfigError: a value is wrong, or cannot be read.
        """
        self._sources.append("--from-lmcache")
        if given.lstrip().startswith(("--", "lmcache ")):
            flags = {flag[2:].replace("-", "_"): text for flag, text in self._flags(given).items()}
            adapters = flags.pop("l2_adapter", "").splitlines()
            self._walk(flags, LMCACHE)
            for each in adapters:
                self._place(self._read(each), "--l2-adapter.")
            return
        self._sources[-1] += f" {given}"
        variables = {name[8:].lower(): name for name in self._environ if name.startswith("LMCACHE_")}
        file = self._environ.get("LMCACHE_CONFIG_FILE") if given == "env" else given
        settings: dict[str, Any] = self._read(self._content(file)) if file else {}
        settings |= {key: self._environ[name] for key, name in variables.items()} | {"PYTHONHASHSEED": ""}
        if settings.pop("config_file", None):
            why = "this file was read" if given == "env" else f"{given} was read instead"
            self._rows.append((variables["config_file"], Fate(NOT_NEEDED, why)))
        if "max_local_cpu_size" not in settings:
            settings["max_local_cpu_size"], variables["max_local_cpu_size"] = 5, "(max_local_cpu_size)"
        self._order = [variables.get(str(key), str(key)) for key in settings]
        extra = self._read(settings.pop("extra_config", None))
        # The size of a disk comes before its path, local tiers before remote ones, and a tier before its keys.
        first = {"max_local_disk_size": 0, "local_disk": 1, "remote_url": 3}
        ordered = sorted(settings, key=lambda key: first.get(key, 2))
        self._walk({key: settings[key] for key in ordered}, LMCACHE, known_as=variables)
        self._walk(extra, LMCACHE, "extra_config.")

    def transfer(self, given: str) -> None:
        """Convert vLLM's ``--kv-transfer-config``: JSON, or a file that contains it.

        Raises:
            ConfigError: a value is wrong, or cannot be read.
        """
        self._sources.append("--from-transfer-config")
        self._connector(self._read(given if given.lstrip().startswith("{") else self._content(given), form="JSON"))

    def _connector(self, given: dict[str, Any], *, is_inner: bool = False) -> None:
        name, role = str(given.pop("kv_connector", None)), str(given.pop("kv_role", ""))
        extra = self._read(given.pop("kv_connector_extra_config", None))
        self.role = self.role or role
        self._walk(given, OFFLOADING)
        if name == "MultiConnector":
            self._rows.append((name, Fate(NOT_NEEDED, "kvtier's JSON replaces the connectors that store")))
            for each in self._read(extra.get("connectors", False), list):
                self._connector(self._read(each), is_inner=True)
        elif name in REPLACED:
            file = self._environ.get("MOONCAKE_CONFIG_PATH") if name == "MooncakeStoreConnector" else None
            is_followed = bool(file) or (len(self._sources) > 1 and name.startswith("LMCache"))
            self._rows.append((name, Fate("KvtierConnector", "" if is_followed else REPLACED[name])))
            if file:
                self._place({"type": "mooncake"} | self._read(self._content(file)), "")
            tiers = self._read(extra.pop("secondary_tiers", []), list)
            known = {key.removeprefix("lmcache."): extra[key] for key in sorted(extra, key="disk_path".__ne__)}
            self._walk(known, LMCACHE if name.startswith("LMCache") else OFFLOADING)
            for number, tier in enumerate(tiers):
                self._place(self._read(tier), f"secondary_tiers[{number}].")
        elif is_inner:
            self._rows.append((name, Fate(STAYS, "keep it in a MultiConnector, beside kvtier's JSON")))
        else:
            raise self._error(
                "kv_connector", short(name), f"MultiConnector, {', '.join(REPLACED)}", "kvtier does not replace it"
            )

    def hicache(self, given: str) -> None:
        """Convert the command line of SGLang's server, which may begin with environment variables.

        Raises:
            ConfigError: a value is wrong, or cannot be read.
        """
        self._sources.append("--from-flags")
        flags = self._flags(given)
        self.page_tokens = Quantity(1, 1 << 16).convert(flags.get("--page-size", "64"), None, None)
        text = flags.get(EXTRA, "")
        extra = self._read(self._content(text[1:]) if text.startswith("@") else text)
        self.kept = {key: extra.pop(key) for key in OWN_KEYS if key in extra}
        words = [*self._environ.items(), *(word.split("=", 1) for word in shlex.split(given) if "=" in word)]
        starts = ("SGLANG_HICACHE_", *(["MOONCAKE_"] if flags.get("--hicache-storage-backend") == "mooncake" else []))
        named: dict[str, Any] = {name: it for name, it in words if name.startswith(starts)}
        if file := named.get("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"):
            named |= self._read(self._content(file))
        if backend := flags.get("--hicache-storage-backend"):
            path = named.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", extra.pop("file_storage_path", HICACHE_FOLDER))
            folder = {"file_storage_path": path} if backend == "file" else {}
            self._place({"type": backend} | folder | named | extra, "")
        own = {flag: it for flag, it in flags.items() if "hicache" in flag or fate(flag, OFFLOADING).becomes != UNKNOWN}
        self._walk(own, OFFLOADING)
        self._rows += [(key, Fate(STAYS, "it is SGLang's own, and printed again")) for key in self.kept]
        self._rows += [(flag, Fate(STAYS, "it is not a flag of HiCache")) for flag in flags if flag not in own]

    def _place(self, given: dict[str, Any], label: str) -> None:
        """Add a tier for a secondary tier of vLLM, an adapter of LMCache's server, or a backend of SGLang."""
        name = str(given.pop("type", None))
        kind = KINDS.get(name, "")
        if kind == "directory" and (given.get("locality") == "REMOTE" or given.get("shared")):
            kind = "shared_directory"
        lost = Fate(LOST, NO_KINDS.get(name, "kvtier has no such tier; name another: --tier"))
        self._rows.append((f"{label}{name}", self.tier(kind, {}) if kind else lost))
        if name == "resp":
            given["startup_nodes"] = f"{given.pop('host', '')}:{given.pop('port', '')}"
        start = {"scheme": "http"} if name == "obj" else {}
        known = start | self._read(given.pop("store_config", None)) | given
        self._walk(known if kind else {}, OFFLOADING, label)

    def _walk(
        self, given: Mapping[str, Any], table: Table, label: str = "", known_as: Mapping[str, str] | None = None
    ) -> None:
        """Convert each key and add its row. `known_as` maps keys to the names under which rows show them."""
        for key, value in ((str(key), it) for key, it in given.items()):
            given_as = label + (known_as or {}).get(key, key)
            own = TIER_KEYS[self.tiers[-1]["kind"]].get(key) if self.tiers else None
            try:
                if value in (None, "None", []) and key != "PYTHONHASHSEED":
                    continue
                if key in SECRETS:
                    becomes = Fate(f"{SECRETS[key]} of the server's environment", "not printed here")
                elif own:
                    becomes = TIER_VALUES[own](self, value) if own in TIER_VALUES else self.put({own: value})
                else:
                    becomes = VALUES[key](self, value) if key in VALUES else fate(key, table, value)
            except (ValueError, TypeError):
                raise self._error(
                    given_as, short(value), ALLOWED.get(key, "a number of at least 0"), "not valid"
                ) from None
            self._keys |= dict.fromkeys(names(becomes), f"{self._sources[-1]}: {given_as}")
            self._rows.append((given_as, becomes))

    # ---- what a value becomes ----------------------------------------------------------------------------------------

    def set(self, name: str, value: object, why: str = "") -> Fate:
        """Set the setting `name` (``section.key``), overriding other sources. None leaves the setting's default."""
        lost = Fate(f"{name}: (overridden by {self._sources[-1]})")
        self._rows[:] = [(key, lost if names(it)[0] == name else it) for key, it in self._rows]
        self.settings.pop(name, None)
        self.settings |= {} if value is None else {name: value}
        return Fate(f"{name}: its default" if value is None else shown(name, value), why)

    def tier(self, kind: str, values: Mapping[str, object], why: str = "") -> Fate:
        """Add a tier."""
        number = 1 + sum(tier["kind"] == kind for tier in self.tiers)
        self.tiers.append({"kind": kind} | ({"name": f"{kind}_{number}"} if number > 1 else {}))
        return self.put(values, why) if values else Fate(f"a tier {kind}", why)

    def put(self, values: Mapping[str, object], why: str = "") -> Fate:
        """Set values of the tier that was added last."""
        self.tiers[-1] |= values
        label = f"tiers.{self.tiers[-1].get('name', self.tiers[-1]['kind'])}"
        return Fate(", ".join(shown(f"{label}.{key}", value) for key, value in values.items()), why)

    def put_part(self, key: str, value: object, of: str) -> Fate:
        """Set a part of the tier's setting `of`. `s3_tier` joins the parts."""
        self.put({key: value})
        return Fate(f"tiers.s3.{of}")

    def folder(self, path: object, kind: str = "", **values: object) -> Fate:
        """Set the directory of the tier that was added last, or of a new one of `kind`."""
        if kind:
            self.tier(kind, values)
        return self.put({"path": f"{str(path).rstrip('/')}/{FOLDER}"}, "kvtier stores in a subfolder of its own")

    def chunk(self, value: object, least: int = 1) -> Fate:
        """Set the chunk size. Leave kvtier's default if `value` equals it or is below `least` tokens."""
        tokens = parse_count(str(value))
        is_default = tokens == 256 or tokens < least
        why = "at least 256 tokens, in whole blocks" if is_default else ""
        return self.set("store.chunk_tokens", None if is_default else tokens, why)

    def host(self, size: str, why: str, workers: int = 1) -> Fate:
        """Set the engine's host memory. `size` is the size per worker."""
        total = parse_size(size) * workers
        return self.set(HOST_BYTES, total or None, why if total else "all KV passes through host memory")

    def each_gib(self, value: object) -> tuple[int, str]:
        """Return LMCache's size per worker in bytes, and a remark for the table. `value` is in GiB."""
        more = "; for more workers: --workers N" if self.workers is None else ""
        remark = f"{value} GiB per worker x {self.workers or 1}, kvtier's size is per engine{more}"
        return parse_size(f"{value}GiB"), remark

    def disk_size(self, value: object) -> Fate:
        """Keep the size of the disk until `disk` adds the tier."""
        size, why = self.each_gib(value)
        self.disk_bytes = size * (self.workers or 1)
        return Fate(shown("tiers.disk.capacity_bytes", self.disk_bytes), why)

    def disk(self, value: object) -> Fate:
        """Add the tier for LMCache's `local_disk`."""
        first, *others = [part.strip().removeprefix("file://") for part in str(value).split(",")]
        if value in OFF:
            return Fate(NOT_NEEDED, "it is off")
        if first.lower() in {"", "true", "yes", "on"} or "://" in first or not isinstance(value, str):
            raise ValueError
        if not self.disk_bytes:
            return NO_DISK
        self._rows += [
            (each, Fate(LOST, "a tier has one directory: join the drives into one volume")) for each in others
        ]
        return self.folder(first, "disk", capacity_bytes=self.disk_bytes)

    def policy(self, value: object) -> Fate:
        """Set the eviction policy of host memory."""
        name = str(value).lower()
        is_known = name in {"lru", "fifo"}
        why = "kvtier's default: adaptive" if is_known else f"adaptive; kvtier has no {name}"
        return self.set("host.evictor", name if is_known else None, why)

    def remote(self, value: object) -> Fate:
        """Add the tier for LMCache's `remote_url`.

        Raises:
            ConfigError: part of the password could be read as another part of the URL.
        """
        scheme, _, rest = str(value).partition("://")
        place, _, path = rest.partition("/")
        login, _, hosts = place.rpartition("@")
        if "@" in path or "#" in rest or "?" in place:
            allowed = f"{scheme}://[USER:PASSWORD@]HOST[:PORT], with %2F, %23 and %3F for / # ? in a password"
            raise self._error("remote_url", f"{scheme}://(hidden)", allowed, "not valid")
        user, _, password = unquote(login).partition(":")
        path, _, query = path.partition("?")
        self._rows += [("remote_url ?", Fate(LOST, "set the tier's settings by name"))] * bool(query)
        kind = KINDS.get(scheme, "")
        bucket, _, prefix = path.partition("/")
        if kind == "s3" and ":" in hosts and not bucket:
            allowed = "s3://BUCKET.HOST[/PREFIX], or s3://HOST:PORT/BUCKET[/PREFIX]"
            raise self._error("remote_url", f"s3://{hosts}", allowed, "names no bucket")
        made = {
            "valkey": {"addresses": hosts, "tls": scheme == "rediss", "username": password and user},
            "s3": {"url": bucket, "endpoint": hosts, "prefix": prefix}
            if ":" in hosts
            else {"url": hosts, "prefix": path},
            "mooncake": {"master": hosts},
        }
        if kind == "directory":
            return self.folder(f"/{path}", "shared_directory")
        if kind not in made:
            return Fate(LOST, NO_KINDS.get(scheme, "kvtier has valkey, s3, mooncake and shared_directory"))
        number = {"database": int(path)} if kind == "valkey" and path else {}
        becomes = self.tier(kind, {key: it for key, it in made[kind].items() if it} | number)
        self._rows += [("remote_url (password)", self.password())] if kind == "valkey" and password else []
        return Fate(", ".join(f"tiers.s3.{key}" for key in S3_PARTS)) if kind == "s3" else becomes

    def password(self) -> Fate:
        """Set the file of the tier's password. The password is not printed."""
        return self.put({"password_file": PASSWORD_FILE}, f"not printed: write it into {PASSWORD_FILE}, mode 0600")

    # ---- parsing -----------------------------------------------------------------------------------------------------

    def _flags(self, text: str) -> dict[str, str]:
        """Return the flags of a command line. Newlines separate the values of a repeated flag."""
        words = self._read(text.replace("\\\n", " "), list, "a command line")
        found: dict[str, str] = {}
        for word, following in zip(words, [*words[1:], "--"], strict=True):
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                value = value if equals or following.startswith("--") else following
                found[name] = f"{found[name]}\n{value}" if name in found else value
        return found

    def _content(self, file: str) -> str:
        try:
            with Path(file).open("rb") as stream:
                return stream.read(FILE_BYTES_MAX).decode()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "is not UTF-8 text"
            option = self._sources[-1].partition(" ")[0]
            raise ConfigError(why, setting=option, value=redacted(file), allowed="a readable file") from None

    def _read(self, given: object, wanted: type = dict, form: str = "YAML") -> Any:  # noqa: ANN401 - it is `wanted`
        """Parse `given` if it is a string; otherwise take it as it is. If the result is None, return an empty `wanted`.

        Raises:
            ConfigError: `given` is not valid `form`, or not a `wanted`. The message omits it, because it may be secret.
        """
        try:
            read = READERS[form](given) if isinstance(given, str) else given
        except ModuleNotFoundError:
            raise ConfigError(
                "needs PyYAML, which is installed with vLLM and SGLang", setting=self._sources[-1]
            ) from None
        except Exception as error:  # noqa: BLE001 - PyYAML's errors, ValueError and RecursionError
            raise ConfigError(f"is not valid {form}{reason(error)}", setting=self._sources[-1], allowed=form) from None
        value = wanted() if read is None else read
        if not isinstance(value, wanted):
            what = "keys with values" if wanted is dict else "a list"
            raise ConfigError(f"has the type {type(value).__name__}", setting=self._sources[-1], allowed=what)
        return value

    def _error(self, key: str, value: str, allowed: str, problem: str = "") -> ConfigError:
        """Return an error about a foreign key of the source that is being read."""
        return ConfigError(problem, setting=key, value=value, origin=self._sources[-1], allowed=allowed)


READERS: Mapping[str, Callable[[str], object]] = {
    "JSON": json.loads,
    "YAML": lambda text: import_module("yaml").safe_load(text),  # only an engine's environment must have PyYAML
    "a command line": shlex.split,
}


VALUES: Mapping[str, Callable[[Conversion, Any], Fate]] = {
    "chunk_size": Conversion.chunk,
    "block_size": lambda it, value: it.chunk(value, 256),
    "max_local_cpu_size": lambda it, value: it.host(f"{value}GiB", it.each_gib(value)[1], it.workers or 1),
    "l1_size_gb": lambda it, value: it.host(
        f"{value}GiB", "the server's memory is for all its engines, kvtier's for one"
    ),
    "cpu_bytes_to_use": lambda it, value: it.host(str(int(float(value))), "both sizes are for the whole engine"),
    **dict.fromkeys(("cache_policy", "eviction_policy"), Conversion.policy),
    "max_local_disk_size": Conversion.disk_size,
    "local_disk": Conversion.disk,
    "remote_serde": lambda _, value: Fate(
        *(NOT_NEEDED, "naive is kvtier's raw, which is the default")
        if value == "naive"
        else (LOST, "it is lossy; store.loss selects a lossy codec of kvtier for the engine")
    ),
    "save_decode_cache": lambda _, value: answers(is_wanted=value not in OFF),
    "offload_prompt_only": lambda _, value: answers(is_wanted=value in OFF),
    "disk_path": lambda it, value: it.folder(Path(str(value)).parent, "disk"),  # names vLLM's files, one for each rank
    "enable_lookup": lambda _, value: Fate(
        LOST if value in OFF else NOT_NEEDED, "a request opts out itself: load false in kv_transfer_params"
    ),
    **dict.fromkeys(("remote_url", "redis_url", "remote_storage_plugin.redis.redis_url"), Conversion.remote),
    **dict.fromkeys(
        ("fs_base_path", "remote_storage_plugin.fs.base_path"), lambda it, value: it.folder(value, "shared_directory")
    ),
    "remote_storage_plugin.mooncakestore.master_server_address": lambda it, it_is: it.tier(
        "mooncake", {"master": it_is}
    ),
}
"""Functions that convert values to settings."""

TIER_VALUES: Mapping[str, Callable[[Conversion, Any], Fate]] = {
    "path": Conversion.folder,
    "password": lambda it, _: it.password(),
    "GiB": lambda it, value: it.put({"capacity_bytes": parse_size(f"{value}GiB")} if value else {}),
    "each_bytes": lambda it, value: it.put(
        {"capacity_bytes": parse_size(str(value)) * (it.workers or 1)},
        f"{value} per worker x {it.workers or 1}, kvtier's size is per engine",
    ),
    "prefix": lambda it, value: it.put_part("prefix", f"{it.tiers[-1].get('prefix', '')}/{value}".strip("/"), "url"),
    "scheme": lambda it, value: it.put_part("scheme", value, "endpoint"),
}
"""Functions that convert values to settings of the tier that was added last."""
