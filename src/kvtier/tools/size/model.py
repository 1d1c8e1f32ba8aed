"""A model with the caches of each layer, from the catalogue or from a config.json."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.tools.size import catalogue, hub
from kvtier.tools.size.caches import LayerCache
from kvtier.tools.size.families import read_layers
from kvtier.tools.size.model_config import ModelConfig, language_model, load, routed_experts, weight_format

NEAREST = 5
"""Maximum number of names that the message about an unknown model suggests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The part of a model's configuration that determines its KV."""

    name: str
    source: str
    """Source of the configuration: a file, or a repository and the site from which the copy was read."""
    date: str
    """Date on which the copy was read, YYYY-MM-DD; empty for a local file."""
    layers: tuple[tuple[LayerCache, ...], ...]
    """The caches of each layer, in order; a layer with only an MLP has none."""
    fields: Mapping[str, object]
    """The fields of the configuration from which the sizes follow."""
    notes: tuple[str, ...]
    ignored: Mapping[str, object]
    """Fields that were ignored on request. They might have changed the sizes."""
    attention_heads: int | None
    hidden_size: int | None
    expanded_elements: int | None
    """Elements in the keys and values of all heads of an MLA layer with an expanded latent; None without MLA."""
    tokens_max: int | None
    """Longest context that the configuration states."""
    parameters_billion: float | None
    """Billions of parameters, from the model's name or card; None if unknown."""
    active_billion: float | None
    weights: str
    """Format of most weights of the checkpoint: ``bf16``, ``fp8`` or ``fp4``."""
    experts: tuple[int, int]
    """Routed experts per layer, and experts that a token uses; zeros if there are none, or they are unknown."""

    @property
    def runs(self) -> tuple[tuple[LayerCache, int], ...]:
        """Each distinct cache and its number of layers, in the order of the first layers."""
        return tuple(Counter(cache for layer in self.layers for cache in layer).items())


def names() -> list[str]:
    """Return the names of all models in the catalogue."""
    return list(catalogue.entries())


def model(name: str | Path, ignore: Collection[str] = ()) -> Model:
    """Find the model `name`: a config.json, its folder, or a name, alias or repository in the catalogue.

    Other names are looked up in the local cache of the Hub (`kvtier.tools.size.hub`).

    Args:
        name: name of the model or path of the file.
        ignore: fields to read as if they were not there.

    Raises:
        ConfigError: there is no such model, or its configuration is incomplete or contradicts itself.
    """
    entry = catalogue.find(name) if isinstance(name, str) else None
    if entry is not None:
        config = language_model(ModelConfig({"sliding_window": None, **entry.config}, entry.name), ignore)
        return _model(config, entry.name, f"{entry.repository} ({entry.via})", entry)
    path = Path(name)
    if not path.exists():
        if isinstance(name, Path) or path.suffix == ".json" or len(path.parts) > 2:
            raise ConfigError(f"{path}: no such file or folder; it must be a config.json or its folder")
        config = hub.cached(name)
        if config is None:
            raise ConfigError(
                f"unknown model {name!r}; {_nearest(name)}, or give a config.json or its folder{hub.advice(name)}"
            )
        return _model(load(config, ignore), name, str(config))
    folder = path.resolve().parent if path.is_file() else path.resolve()
    return _model(load(path, ignore), folder.name, str(path))


def from_config(values: Mapping[str, object], name: str, ignore: Collection[str] = ()) -> Model:
    """Build the model that the fields of a config.json describe.

    Args:
        values: the fields of the JSON object.
        name: name of the model, also in error messages.
        ignore: fields to read as if they were not there.

    Raises:
        ConfigError: a field is missing, wrong, or contradicts another.
    """
    return _model(language_model(ModelConfig(values, name), ignore), name, name)


def _model(config: ModelConfig, name: str, source: str, entry: catalogue.ModelEntry | None = None) -> Model:
    layers = tuple(read_layers(config))
    return Model(
        name=name,
        source=source,
        date=entry.date if entry else "",
        layers=layers,
        fields=dict(config.used),
        notes=tuple(config.notes),
        ignored=config.ignored,
        attention_heads=config.optional_integer("num_attention_heads"),
        hidden_size=config.optional_integer("hidden_size"),
        expanded_elements=_expanded_elements(config),
        tokens_max=config.optional_integer("max_position_embeddings"),
        parameters_billion=entry.parameters_billion if entry else None,
        active_billion=entry.active_billion if entry else None,
        weights=entry.weights if entry else weight_format(config),
        experts=entry.experts if entry else routed_experts(config),
    )


def _expanded_elements(config: ModelConfig) -> int | None:
    keys = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, *dims = (value if isinstance(value := config.values.get(key), int) else 0 for key in keys)
    return heads * sum(dims) if config.has("kv_lora_rank") and heads and all(dims) else None


def _nearest(name: str) -> str:
    near = get_close_matches(name.lower().rpartition("/")[2], sorted(catalogue.by_any_name()), n=NEAREST, cutoff=0.5)
    if near:
        return f"the nearest names are {', '.join(near)}"
    return f"known are {', '.join(names()[:NEAREST])} and {len(names()) - NEAREST} more (kvtier size --list)"
