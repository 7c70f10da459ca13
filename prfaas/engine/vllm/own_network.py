"""The network of the engines' own: it carries KV between vLLM servers of one region, as ours does between regions.

Both live in one server, as members of vLLM's MultiConnector. Which of them a request means is said by the parameters
that it comes with: ours name an attempt, NIXL's ask to hand over what was prefilled, or say where that is. What NIXL
says of that is for the engine that decodes, and nobody else reads it.
"""

import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from prfaas.errors import ConfigError

NIXL = "nixl"
#: Servers that differ in it have other states, and so other namespaces.
CONVOLUTIONS = "VLLM_SSM_CONV_STATE_LAYOUT"
#: A request to prefill carries it; what its answer carries is the hand-over.
GIVE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Routers take no longer one.
MAX_HANDOVER_BYTES = 1 << 20
_RECOMPUTE = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def beside(ours: Mapping[str, Any], network: str) -> dict[str, Any]:
    """The server's transfer configuration: `ours` alone, or with the connector of the engines' own network."""
    if not network:
        return dict(ours)
    assert network == NIXL, network
    members = [dict(ours), {"kv_connector": "NixlConnector", **_RECOMPUTE}]
    return {"kv_connector": "MultiConnector", **_RECOMPUTE, "kv_connector_extra_config": {"connectors": members}}


def surroundings(network: str, address: str) -> dict[str, str]:
    """Of the server. `address`: where other servers ask it for what they need to read its memory; with port 0 at a free
    one. NIXL wants the convolutions of recurrent layers in an order that is not the usual one. Raises ConfigError."""
    if not network:
        return {}
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError("worker.vllm_network_address", f"{address!r} is not host:port")
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": port if int(port) else str(_free_port(host)),
        CONVOLUTIONS: "DS",
    }


def taken(answer: bytes) -> bytes:
    """The hand-over out of a server's answer to a request that had GIVE. Raises ValueError."""
    handover = msgspec.json.encode(msgspec.json.decode(answer).get("kv_transfer_params"))
    given(handover)
    if len(handover) > MAX_HANDOVER_BYTES:
        raise ValueError(f"a hand-over of {len(handover)} bytes")
    return handover


def given(handover: bytes) -> dict[str, Any]:
    """The parameters of a request that decodes what was handed over. Raises ValueError."""
    params = msgspec.json.decode(handover)
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        raise ValueError("a hand-over that says nothing")
    return params


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as found:
        port: int = found.getsockname()[1]
        return port
