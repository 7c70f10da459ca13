"""Which engine process a worker's settings ask for."""

from typing import Any

import pytest

from prfaas.config import WorkerConfig
from prfaas.errors import ConfigError
from prfaas.node.children import EMBEDDED, VLLM, engine_of

SERVER = {"vllm_server": "http://127.0.0.1:8001", "vllm_bridge": "/run/bridge.sock"}


def on_vllm(**settings: Any) -> WorkerConfig:
    return WorkerConfig(engine="vllm", **settings)


def test_each_engine_has_its_process():
    """A word for the server may look like an option of the process."""
    assert engine_of(WorkerConfig()) == EMBEDDED
    assert engine_of(on_vllm(vllm_arguments=("--dtype", "float32")))[0] == VLLM
    assert "--argument=--dtype" in engine_of(on_vllm(vllm_arguments=("--dtype", "float32")))
    assert engine_of(on_vllm(**SERVER))[:3] == (VLLM, "--server", "http://127.0.0.1:8001")
    assert "--network=nixl" in engine_of(on_vllm(vllm_network="nixl"))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (SERVER | {"vllm_network": "nixl"}, "worker.vllm_network"),
        (SERVER | {"vllm_arguments": ("--dtype", "float32")}, "worker.vllm_arguments"),
        ({"vllm_bridge": "/run/bridge.sock"}, "worker.vllm_bridge"),
        ({"vllm_events": ("tcp://127.0.0.1:5557",)}, "worker.vllm_events"),
        ({"vllm_network": "nixl", "rpc_host": "10.1.2.3"}, "worker.vllm_network_address"),
        ({"vllm_network": "nixl", "rpc_advertise": "node-3:7000"}, "worker.vllm_network_address"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], names: str):
    """One of them would be ignored, and nobody would know."""
    with pytest.raises(ConfigError) as refused:
        engine_of(on_vllm(**settings))
    assert refused.value.path == names


def test_a_network_of_the_engines_own_reaches_as_far_as_the_worker():
    others = {"vllm_network": "nixl", "rpc_host": "10.1.2.3", "vllm_network_address": "10.1.2.3:5600"}
    assert "--network-address=10.1.2.3:5600" in engine_of(on_vllm(**others))
