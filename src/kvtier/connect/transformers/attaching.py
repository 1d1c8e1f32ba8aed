"""`attach`: a model gets its cache."""

from pathlib import Path

from kvtier.config.sections import Config
from kvtier.connect.transformers.adapter import Attachment
from kvtier.connect.transformers.opening import settled
from kvtier.connect.transformers.support import check_model
from kvtier.connect.transformers.upstream import Model
from kvtier.errors import ConfigError


def attach(
    model: Model,
    directory: str | Path | None = None,
    *,
    config: Config | None = None,
    checkpoint: str | Path | None = None,
    revision: str = "",
    epoch: int = 0,
    held_calls: int = 4,
    layerwise: bool = True,
    **settings: object,
) -> "Attachment":
    """Give `model` a KV cache that outlives calls and processes.

    Args:
        model: a decoder-only model of the Transformers library, in evaluation mode.
        directory: where KV is kept on disk; None keeps it in host memory only, unless the settings name a place.
        config: all settings; None reads the file that ``KVTIER_CONFIG`` names and the ``KVTIER_…`` environment.
        checkpoint: file or directory with the weights that the model was loaded from and still has. Digesting files is
            remembered from process to process; without it the tensors in memory are digested at every attach.
        revision: the name the weights go by; another revision shares nothing.
        epoch: counts in-place updates of the weights (`Attachment.set_epoch`).
        held_calls: calls whose KV may still be on its way to host memory, keeping their tensors alive; a call beyond
            them is not stored.
        layerwise: let the model compute while later layers of its prompt still arrive. It then needs memory for the
            restored KV twice until the last one has come; where there is none it waits for all of them, as with False.
        settings: single settings by section and name, such as ``host__capacity_bytes="8GiB"``.

    Raises:
        UnsupportedModelError: the model cannot be served correctly; the message says what is allowed.
        ConfigError: a setting is unknown, impossible, or names a place that cannot be used.
    """
    checked = check_model(model)
    if held_calls < 1:
        raise ConfigError(f"held_calls must be at least 1, got {held_calls}")
    return Attachment(
        checked,
        settled(config, directory, settings),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        revision=revision,
        epoch=epoch,
        held_calls=held_calls,
        layerwise=layerwise,
    )
