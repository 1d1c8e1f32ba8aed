"""Dynamo's SelectionService, spoken to by lines of JSON: `python dynamo_selection.py`, with a Python that has Dynamo.

    {"add": WORKER}      subscribe to a worker's KV events
    {"score": TOKENS}    what each worker holds of a prompt
    {"select": TOKENS}   the worker for a prompt

Each line is answered by one. It ends with its input.
"""

import asyncio
import json
import sys
from typing import Any

from dynamo.llm import SelectionService  # pyright: ignore[reportMissingImports, reportUnknownVariableType]


async def answer(service: Any, line: dict[str, Any]) -> Any:
    """What the service says."""
    if "add" in line:
        return await service.upsert_worker({"model_name": "m", **line["add"]})
    if "score" in line:
        return await service.overlap_scores({"model_name": "m", "token_ids": line["score"]})
    return await service.select({"model_name": "m", "token_ids": line["select"]})


async def main() -> None:
    """Answer every line of the input."""
    service: Any = SelectionService(indexer_threads=1)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            said = await answer(service, json.loads(line))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            said = {"error": repr(error)}
        print(json.dumps(said), flush=True)
    service.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
