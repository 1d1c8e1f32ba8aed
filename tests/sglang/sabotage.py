"""What is broken on purpose in SGLang's processes: `sglang_cpu` calls what a test names, before the engine starts.

Nothing is broken until the file at `FLAG` says so.
"""

import os
import shutil
from ctypes import memmove
from pathlib import Path
from typing import Any

FLAG = "SABOTAGE_FLAG"
"""Environment variable with the file's path."""
REPEATED = "repeated pages"


def repeat_pages() -> None:
    """kvtier gives every second page the bytes of the page before."""
    from kvtier.connect.sglang.storage import KvtierStorage

    inner = KvtierStorage.batch_get_v1

    def get(storage: KvtierStorage, keys: Any, indices: Any, *further: Any) -> list[bool]:
        arrived = inner(storage, keys, indices, *further)
        if _flag() == REPEATED:
            pages = storage._pools["kv"].pieces(indices)
            for right, wrong in zip(pages[::2], pages[1::2], strict=False):
                for source, target in zip(right, wrong, strict=True):
                    memmove(target, source, len(source))
        return arrived

    KvtierStorage.batch_get_v1 = get


def borrow_identity() -> None:
    """kvtier identifies the model in the folder that the file names, in place of this one."""
    from kvtier.connect.sglang import checkpoint_reads, identity

    checkpoint_reads.doubt = lambda *_: ""
    inner = identity._folder

    def folder(*given: Any) -> Path:
        return Path(_flag()) if _flag().startswith("/") else inner(*given)

    identity._folder = folder


def replace_checkpoint() -> None:
    """The folder of the model gets the files of the one that the file names, as soon as SGLang has read its own."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    inner = DefaultModelLoader.load_model

    def load_model(loader: DefaultModelLoader, *, model_config: Any, device_config: Any) -> Any:
        model = inner(loader, model_config=model_config, device_config=device_config)
        for file in Path(_flag()).glob("*.safetensors"):
            new = Path(model_config.model_path) / "new"
            shutil.copy(file, new)
            new.replace(new.with_name(file.name))
        return model

    DefaultModelLoader.load_model = load_model


def _flag() -> str:
    flag = Path(os.environ[FLAG])
    return flag.read_text() if flag.exists() else ""
