"""One model: what each of its layers keeps, read from the catalogue or from a config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.size import catalogue
from kvtier.size.config import Config, load, speaking_part
from kvtier.size.families import read
from kvtier.size.kinds import Cache

NEAREST = 5
"""Names that are offered for one that is unknown."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Equal caches of several layers."""

    cache: Cache
    count: int

    @property
    def kind(self) -> str:
        """``full``, ``window``, ``chunked``, ``mla``, ``indexer``, ``mamba2``, ..."""
        return self.cache.kind

    @property
    def kv_heads(self) -> int | None:
        """KV heads; 1 for a latent that all heads share, None where there is no token axis."""
        return self.cache.kv_heads

    @property
    def head_dim(self) -> int | None:
        """Elements of a key."""
        return self.cache.head_dim

    @property
    def window(self) -> int | None:
        """Tokens that are kept at most; None when all are."""
        return self.cache.window


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a configuration says of a model's KV."""

    name: str
    source: str
    """Where the configuration came from: a file, or whose it is and where the copy was read."""
    date: str
    """When the copy was read, YYYY-MM-DD; empty for a file of yours."""
    model_type: str
    layers: tuple[tuple[Cache, ...], ...]
    """What each layer keeps, in order; a layer without a cache (an MLP alone) keeps nothing."""
    fields: Mapping[str, object]
    """The fields of the configuration that the sizes rest on."""
    notes: tuple[str, ...]
    attention_heads: int | None
    hidden_size: int | None
    spread_elements: int | None
    """Elements that the keys and values of all heads of a layer would take if MLA's latent were spread out."""
    tokens_max: int | None
    """Longest context by the configuration."""
    parameters_billion: float | None
    """As the model's name or card says; None where that is not known."""
    active_billion: float | None

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """Equal caches counted together, in the order of their first layer."""
        counts: dict[Cache, int] = {}
        for layer in self.layers:
            for cache in layer:
                counts[cache] = counts.get(cache, 0) + 1
        return tuple(LayerRun(cache, count) for cache, count in counts.items())

    @property
    def layer_count(self) -> int:
        """Layers, those without a cache among them."""
        return len(self.layers)


def names() -> list[str]:
    """Names of the models in the catalogue."""
    return list(catalogue.entries())


def model(name: str | Path) -> Model:
    """The model that `name` means: a config.json, its folder, or a name, alias or repository in the catalogue.

    Raises:
        ConfigError: there is no such model, or its configuration is incomplete or contradicts itself.
    """
    entry = catalogue.find(name) if isinstance(name, str) else None
    if entry is not None:
        source = f"{entry.repository} ({entry.via})"
        found = (entry.parameters_billion, entry.active_billion)
        return _model(Config(entry.config, entry.name), entry.name, source, date=entry.date, parameters=found)
    path = Path(name)
    if not path.exists():
        if isinstance(name, Path) or path.suffix == ".json" or len(path.parts) > 2:
            raise ConfigError(f"{path}: no such file or folder; it must be a config.json or its folder")
        raise ConfigError(f"unknown model {name!r}; {_nearest(str(name))}, or give a config.json or its folder")
    return _model(load(path), path.resolve().parent.name if path.is_file() else path.resolve().name, str(path))


def from_config(values: Mapping[str, object], name: str) -> Model:
    """The model that the fields of a config.json describe.

    Args:
        values: the fields, as JSON has them.
        name: what to call it, also in messages.

    Raises:
        ConfigError: a field is missing, wrong, or contradicts another.
    """
    return _model(speaking_part(Config(values, name)), name, name)


def _model(
    config: Config,
    name: str,
    source: str,
    *,
    date: str = "",
    parameters: tuple[float | None, float | None] = (None, None),
) -> Model:
    layers, notes = read(config)
    fields = dict(config.used)
    return Model(
        name=name,
        source=source,
        date=date,
        model_type=config.text("model_type") or "not said",
        layers=tuple(layers),
        fields=fields,
        spread_elements=_spread(config),
        notes=tuple(notes),
        attention_heads=config.integer("num_attention_heads") if config.has("num_attention_heads") else None,
        hidden_size=config.integer("hidden_size") if config.has("hidden_size") else None,
        tokens_max=config.integer("max_position_embeddings") if config.has("max_position_embeddings") else None,
        parameters_billion=parameters[0],
        active_billion=parameters[1],
    )


def _spread(config: Config) -> int | None:
    dims = [config.values.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    heads = config.values.get("num_attention_heads")
    if not config.has("kv_lora_rank") or not isinstance(heads, int):
        return None
    return (
        heads * sum(dim for dim in dims if isinstance(dim, int)) if all(isinstance(dim, int) for dim in dims) else None
    )


def _nearest(name: str) -> str:
    known = catalogue.all_names()
    near = get_close_matches(name.lower().rpartition("/")[2], known, n=NEAREST, cutoff=0.5)
    if near:
        return f"the nearest names are {', '.join(near)}"
    return f"known are {', '.join(names()[:NEAREST])} and {len(names()) - NEAREST} more (kvtier size --list)"
