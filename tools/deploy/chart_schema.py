"""Puts the product's settings into the schema of the chart's values, so that a setting that is none is refused there.

    python -m tools.deploy.chart_schema            writes deploy/helm/prfaas/values.schema.json
    python -m tools.deploy.chart_schema --check    fails when it is out of date

All but its `definitions` of settings is written by hand. What the chart sets itself is no value.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from prfaas.config import Config

SCHEMA = Path(__file__).parents[2] / "deploy/helm/prfaas/values.schema.json"
#: Definitions with this prefix are made here.
PREFIX = "settings"
#: What the chart sets from other values, from the pod, or from secrets, by section.
SET_BY_CHART: dict[str, frozenset[str]] = {
    "cluster": frozenset({"name", "pd_region"}),
    "store": frozenset({"endpoints", "ca", "cert", "key", "username", "password"}),
    "router": frozenset(
        {
            *("host", "port", "model_dir", "tls_cert", "tls_key", "metrics_host", "metrics_port"),
            *("admin_key", "admin_host", "admin_port"),
        }
    ),
    "admission": frozenset({"keys_file"}),
    "worker": frozenset(
        {
            *("id", "region", "role", "hardware", "model_dir", "rpc_host", "rpc_port", "rpc_advertise"),
            *("link_port", "link_advertise", "metrics_host", "metrics_port"),
        }
    ),
    "kv": frozenset({"host", "port", "advertise"}),
    "cache": frozenset({"secret", "secret_file"}),
    "pool": frozenset(
        {
            *("id", "region", "model_dir", "rpc_host", "rpc_port", "rpc_advertise", "metrics_host", "metrics_port"),
            *("kv_host", "kv_port", "kv_advertise", "disk_dir", "mooncake_host"),
        }
    ),
    "security": frozenset({"mode", "ca", "cert", "key", "allow_plain"}),
}


def definitions() -> dict[str, Any]:
    """Of `config`, and of what it refers to."""
    _, made = msgspec.json.schema_components([Config], ref_template=f"#/definitions/{PREFIX}.{{name}}")
    sections = {field.type.__name__: field.name for field in msgspec.structs.fields(Config)}
    for name, definition in made.items():
        if name in sections:
            for field in SET_BY_CHART.get(sections[name], frozenset()):
                del definition["properties"][field]
        for field in definition.get("properties", {}).values():
            field.pop("default", None)
    config = made["Config"]
    config["properties"] = {
        name: each
        for name, each in config["properties"].items()
        if made[each["$ref"].rpartition(".")[2] if "$ref" in each else _only(each)]["properties"]
    }
    kept = {name: each for name, each in made.items() if name not in sections or sections[name] in config["properties"]}
    return {f"{PREFIX}.{name}": each for name, each in sorted(kept.items())}


def _only(field: dict[str, Any]) -> str:
    [choice] = field["allOf"]
    return str(choice["$ref"]).rpartition(".")[2]


def updated(text: str) -> str:
    schema = json.loads(text)
    by_hand = {name: each for name, each in schema["definitions"].items() if not name.startswith(f"{PREFIX}.")}
    schema["definitions"] = by_hand | definitions()
    return json.dumps(schema, indent=2) + "\n"


def main() -> int:
    before = SCHEMA.read_text()
    after = updated(before)
    if "--check" in sys.argv[1:]:
        if before != after:
            print(f"{SCHEMA.name} is out of date: python -m tools.deploy.chart_schema")
        return 0 if before == after else 1
    SCHEMA.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
