"""Which network carries KV between two nodes."""

import pytest

from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, RegionId, Role, own_network


def node(name: str, region: str, *capabilities: str) -> Node:
    return Node(
        id=NodeId(name),
        region=RegionId(region),
        kind=NodeKind.PD,
        role=Role.MIXED,
        incarnation=Incarnation(1),
        namespace=Namespace("n"),
        model="m",
        rpc_address="127.0.0.1:1",
        max_context_tokens=1,
        capabilities=capabilities,
    )


@pytest.mark.parametrize(
    ("other", "network"),
    [
        (node("p", "b", "logprobs", "network:nixl"), "nixl"),
        (node("p", "a", "logprobs", "network:nixl"), ""),
        (node("p", "b", "logprobs"), ""),
        (node("p", "b", "network:other"), ""),
        (node("d", "b", "network:nixl"), ""),
    ],
    ids=["beside it", "another region", "none", "another network", "the node itself"],
)
def test_engines_use_their_own_network_inside_a_region(other: Node, network: str):
    """Where both have the same one; between regions KV always goes over ours."""
    assert own_network(other, node("d", "b", "logprobs", "network:nixl")) == network
