"""Opposite `prfaas/membership/records.py`."""

import json
from dataclasses import fields
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import Egress, Incarnation, Namespace, Node, NodeId, NodeKind, NodeLoad, RegionId, Role, WireRange
from prfaas.membership.records import (
    Kind,
    Measured,
    NodeRecord,
    TelemetryRecord,
    encode,
    key_of,
    parse_key,
    read_node,
    read_telemetry,
)

SENDS = Egress(
    region=RegionId("pd"),
    queued_bytes=11,
    sent_bytes_per_s=12.5,
    backlogged_bytes_per_s=13.5,
    rtt_s=0.03,
    retransmitted_bytes_per_s=1.5,
    queue_age_s=0.25,
    unsent_bytes=5,
    lanes=4,
    congestion="bbr",
    stalled_s=0.75,
)
NODE = Node(
    id=NodeId("p0"),
    region=RegionId("far"),
    kind=NodeKind.PREFILL_WORKER,
    role=Role.PREFILL,
    incarnation=Incarnation(0xFEDC_BA98_7654_3210),
    namespace=Namespace("ns"),
    model="tiny",
    rpc_address="127.0.0.1:1",
    link_address="127.0.0.1:4",
    max_sequences=64,
    kv_addresses=MappingProxyType({"": "127.0.0.1:2", "pd": "127.0.0.1:3"}),
    wire=WireRange(1, 3),
    max_context_tokens=4096,
    eos_token_ids=(2, 7),
    hardware="h200",
    prefill_share=0.25,
    capabilities=("logprobs",),
    tokenizer="digest",
    load=NodeLoad(7, 2, 300, 4000, 5000, draining=True, egress=(SENDS,)),
)
MEASURED = Measured(NODE.load, {"prefilled_tokens": 11})


def test_a_node_comes_back_as_it_was_written():
    """Record and telemetry together are the node, all 64 bits of its incarnation included. The example sets every
    field, so that one forgotten in the record shows."""
    for example in (NODE, SENDS):
        assert all(getattr(example, field.name) != field.default for field in fields(example))
    record = NodeRecord.of(NODE)
    telemetry = TelemetryRecord.of(MEASURED, record, seq=5)
    read, measured = read_node(NODE.id, encode(record)), read_telemetry(encode(telemetry))
    assert read is not None and measured is not None
    assert read.to_node(measured.load()) == NODE
    assert (measured.seq, measured.counters) == (5, {"prefilled_tokens": 11})


def test_values_can_be_read_by_people():
    """JSON with the incarnation as hex, as `etcdctl get` shows it."""
    shown = json.loads(encode(NodeRecord.of(NODE)))
    assert (shown["id"], shown["role"], shown["incarnation"]) == ("p0", "prefill", "fedcba9876543210")


def test_fields_of_newer_versions_are_ignored_and_of_older_ones_filled_in():
    """Old and new versions read each other's records."""
    shown = json.loads(encode(NodeRecord.of(NODE)))
    shown["accelerator"] = {"kind": "new"}
    del shown["newest_wire"], shown["oldest_wire"]
    record = read_node(NODE.id, json.dumps(shown).encode())
    assert record is not None and record.to_node(NodeLoad()).wire == WireRange(1, 1)
    telemetry = read_telemetry(b'{"incarnation": "fedcba9876543210", "role": "mixed", "seq": 1, "watts": 3.5}')
    assert telemetry is not None and telemetry.load() == NodeLoad()


def test_a_sender_that_knows_nothing_of_its_lanes_is_read_as_one():
    """An older version writes three numbers per region; round trip and retransmissions are then unknown, not 0."""
    sends = b'{"region": "pd", "queued_bytes": 9, "sent_bytes_per_s": 8.5, "backlogged_bytes_per_s": null}'
    value = b'{"incarnation": "fedcba9876543210", "role": "prefill", "seq": 1, "egress": [' + sends + b"]}"
    telemetry = read_telemetry(value)
    assert telemetry is not None and telemetry.load().egress == (Egress(RegionId("pd"), 9, 8.5),)
    assert telemetry.load().egress[0].rtt_s is telemetry.load().egress[0].retransmitted_bytes_per_s is None


@pytest.mark.parametrize(
    ("field", "value"), [("incarnation", "xyz"), ("incarnation", 5), ("role", "chef"), ("id", "p1"), ("region", None)]
)
def test_a_record_that_is_wrong_in_one_field_is_no_record(field: str, value: object):
    """Half a record would be worse than none. A record under another node's key is wrong as well."""
    shown = json.loads(encode(NodeRecord.of(NODE)))
    assert read_node(NODE.id, json.dumps(shown).encode()) is not None
    assert read_node(NODE.id, json.dumps(shown | {field: value}).encode()) is None


@given(st.binary() | st.text().map(str.encode) | st.integers(1, 200_000).map(lambda depth: b"[" * depth))
def test_no_bytes_can_make_reading_fail(value: bytes):
    """What is no record is None, whatever it is."""
    for padded in (value, b'{"counters": ' + value + b"}"):
        assert read_node(NODE.id, padded) is None
        assert read_telemetry(padded) is None


def test_keys_name_their_kind_cluster_and_node():
    """Keys of other kinds and clusters are nobody's."""
    for kind in Kind:
        assert parse_key("c", key_of("c", kind, "p0")) == (kind, NodeId("p0"))
        assert parse_key("d", key_of("c", kind, "p0")) is None
    assert parse_key("c", "/prfaas/c/plan") is None
