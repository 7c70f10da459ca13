"""Two networks in one server: what it is configured with, and what a hand-over is."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.vllm.own_network import GIVE, MAX_HANDOVER_BYTES, NIXL, given, surroundings, taken
from prfaas.engine.vllm.server import CONNECTOR, bridge_socket, command
from prfaas.engine.vllm.wish import Wish, params_of, wish_of
from prfaas.errors import ConfigError
from prfaas.rpc import translate

FOLDER = Path("/folder")


def transfer(network: str) -> dict[str, Any]:
    words = command("python", Path("/model"), FOLDER, ("--dtype", "float32"), network)
    configured: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return configured


def test_without_another_network_our_connector_is_the_servers():
    assert transfer("") == {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"bridge": str(bridge_socket(FOLDER))},
    }


def test_with_nixl_both_are_members_and_failures_are_computed_again():
    """What fails is for the server to decide, so that it must be said outside; ours is asked first."""
    whole = transfer(NIXL)
    assert (whole["kv_connector"], whole["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
    ours, theirs = whole["kv_connector_extra_config"]["connectors"]
    assert ours == transfer("")
    assert (theirs["kv_connector"], theirs["kv_role"]) == ("NixlConnector", "kv_both")


def test_a_server_is_asked_where_it_was_told_or_at_a_free_port():
    assert surroundings("", "127.0.0.1:0") == {}
    assert surroundings(NIXL, "10.1.2.3:5600") == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    }
    port = int(surroundings(NIXL, "127.0.0.1:0")["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("address", ["", "5600", "10.1.2.3", "10.1.2.3:", ":5600", "10.1.2.3:nixl"])
def test_what_is_no_address_is_refused(address: str):
    with pytest.raises(ConfigError, match="is not host:port"):
        surroundings(NIXL, address)


def test_what_was_handed_over_comes_back():
    """Beside our own parameters, which it does not touch."""
    params = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "remote_host": "10.1.2.3", "remote_port": 5600}
    answer = json.dumps({"choices": [], "kv_transfer_params": params}).encode()
    assert given(taken(answer)) == params
    assert wish_of({**params_of(Wish("a", load=3)), **GIVE}) == Wish("a", load=3)


@pytest.mark.parametrize("answer", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}])
def test_a_server_that_hands_nothing_over_is_an_error(answer: dict[str, object]):
    with pytest.raises(ValueError, match="says nothing"):
        taken(json.dumps(answer).encode())


def test_a_hand_over_that_no_router_takes_fails_its_request():
    """And not the link to the router, which other requests have as well."""
    assert MAX_HANDOVER_BYTES <= translate.MAX_HANDOVER_BYTES
    params = {"do_remote_prefill": True, "remote_block_ids": [1 << 20] * (MAX_HANDOVER_BYTES // 8)}
    with pytest.raises(ValueError, match="a hand-over of"):
        taken(json.dumps({"kv_transfer_params": params}).encode())
