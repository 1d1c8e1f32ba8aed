"""Reads Dynamo's request trace (schema `dynamo.request.trace.v1`), which has a record for each event.

Source: https://docs.nvidia.com/dynamo/dev/observability/request-traces, and the crate dynamo-data-gen. A request's
record has the type `request_end`, and a field `replay` with a hash for each block of the prompt, including the partial
last one. Records of other types (`request_payload`, `tool_…`) are skipped. A record may be inside an `event`.
"""

from typing import Any, cast

from kvtier.errors import ConfigError
from kvtier.tools.trace.formats.request_lines import Names, RequestLines
from kvtier.tools.trace.trace_files import short

SCHEMA = "dynamo.request.trace.v1"


class DynamoTrace(RequestLines):
    """Reads Dynamo's records, which are in the order of the requests' ends, and sorts them by time."""

    options = ()
    names = Names("request_received_ms", "input_length", "output_tokens", "input_sequence_hashes", "trace_block_size")
    is_sorted = False

    def _flat(self, line: dict[str, Any]) -> dict[str, Any] | None:
        record = _part(line, "event") or line
        if record.get("schema") != SCHEMA:
            raise ConfigError(f"schema is {short(record.get('schema'))}; allowed: {SCHEMA}")
        if record["event_type"] != "request_end":
            return None
        request = _part(record, "request")
        replay = _part(request, "replay")
        if not replay:
            raise ConfigError("'replay' is missing, which names the prompt's blocks; allowed: requests with it")
        return {**request, **replay, "session_id": _part(record, "agent_context").get("session_id")}


def _part(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object in the field `name`, or an empty one if there is none."""
    value = fields.get(name)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
