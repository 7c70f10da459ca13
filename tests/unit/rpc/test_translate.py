"""Commands, events and errors survive the wire; what cannot be read is answered and never raised at the wrong place."""

import math
import struct
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId, WireRange
from prfaas.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.request import AttemptId, FinishReason, Permit, RequestId, Sampling, Score
from prfaas.rpc.commands import (
    Cancel,
    Decode,
    Destination,
    Done,
    Failed,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    Tokens,
    WorkerDescription,
)
from prfaas.rpc.translate import (
    KEY_BYTES,
    MAX_COMMAND_BYTES,
    MAX_TICKET_BYTES,
    MAX_WEIGHT,
    encode_command,
    pack_attempt,
    pack_command,
    pack_description,
    pack_event,
    unpack_attempt,
    unpack_command,
    unpack_description,
    unpack_event,
)
from prfaas.rpc.v1 import worker_pb2 as pb

ATTEMPT = AttemptId("00ff" * 8)
WORKER = NodeId("d0")

texts = st.text(max_size=20)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
doubles = st.floats(allow_nan=False)
attempts = st.binary(min_size=16, max_size=16).map(lambda raw: AttemptId(raw.hex()))
packed_tokens = st.lists(uint32, max_size=20).map(lambda ids: struct.pack(f"<{len(ids)}I", *ids))
prompts = packed_tokens.filter(bool)
#: Deadlines cross in milliseconds.
deadlines = uint32.map(lambda ms: ms / 1000)
incarnations = uint64.map(Incarnation)
nodes = texts.map(NodeId)

samplings = st.builds(
    Sampling,
    max_tokens=uint32,
    temperature=doubles,
    top_p=doubles,
    seed=uint64,
    stop_token_ids=st.lists(uint32, max_size=5).map(tuple),
    constraint=texts,
)
handovers = st.binary(max_size=100)
keys = st.just(b"") | st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
permits = st.builds(Permit, ticket=st.binary(max_size=MAX_TICKET_BYTES), key_out=keys, key_back=keys)
destinations = st.builds(
    Destination,
    node=nodes,
    incarnation=incarnations,
    kv_address=texts,
    generation=uint32,
    permit=permits,
    network=texts,
)
commands = st.one_of(
    st.builds(
        Reserve,
        request_id=texts.map(RequestId),
        prompt=prompts,
        sampling=samplings,
        source_node=nodes,
        source_region=texts.map(RegionId),
        source_namespace=texts.map(Namespace),
        deadline_s=deadlines,
        traceparent=texts,
        network=texts,
    ),
    st.builds(
        Prefill,
        request_id=texts.map(RequestId),
        prompt=prompts,
        destination=st.none() | destinations,
        deadline_s=deadlines,
        tenant=texts,
        weight=st.floats(min_value=1e-9, max_value=MAX_WEIGHT),
        traceparent=texts,
    ),
    st.builds(Decode, top_logits=uint32, handover=handovers),
    st.just(Cancel()),
)
top_logits = st.lists(st.tuples(uint32, st.floats(allow_nan=False, width=32)), max_size=4).map(tuple)
events = st.one_of(
    st.builds(
        Reserved,
        kv_address=texts,
        generation=uint32,
        incarnation=incarnations,
        permit=permits,
        took_s=st.none() | doubles,
    ),
    st.builds(
        PrefillDone,
        queue_s=doubles,
        compute_s=doubles,
        exposed_s=doubles,
        prefill_tokens=uint32,
        kv_bytes=uint64,
        took_s=st.none() | doubles,
        handover=handovers,
    ),
    st.builds(
        Tokens,
        tokens=packed_tokens,
        top_logits=st.lists(top_logits, max_size=3).map(tuple),
        scores=st.lists(st.builds(Score, doubles, doubles), max_size=3).map(tuple),
        first_queue_s=st.none() | doubles,
        first_step_s=st.none() | doubles,
        first_took_s=st.none() | doubles,
    ),
    st.builds(Done, reason=st.sampled_from(FinishReason), recomputed_tokens=uint32, output_tokens=uint32),
)
some_text = texts.filter(bool)
errors = st.one_of(
    st.builds(InvalidRequest, texts, param=st.none() | some_text, code=st.none() | some_text),
    st.builds(Overloaded, texts, retry_after_s=deadlines),
    st.builds(PeerUnavailable, texts, texts),
    st.builds(TransferFailed, st.just(ATTEMPT), texts, texts),
    st.builds(EngineFailed, texts, texts),
    st.builds(DeadlineExceeded, texts, deadlines),
    st.builds(NamespaceMismatch, texts, texts),
)


def over_the_wire(error: PrfaasError) -> PrfaasError:
    message = pb.Event.FromString(pack_event(pack_attempt(ATTEMPT), Failed(error)).SerializeToString())
    failed = unpack_event(message, ATTEMPT, WORKER)
    assert isinstance(failed, Failed)
    return failed.error


@given(attempts, commands)
def test_a_command_arrives_as_it_was_sent(attempt, command):
    """Every field of every command crosses, and so does the attempt it belongs to."""
    message = pb.Command.FromString(pack_command(attempt, command).SerializeToString())
    assert (unpack_attempt(message.attempt), unpack_command(message)) == (attempt, command)


@given(attempts, events)
def test_an_event_arrives_as_it_was_sent(attempt, event):
    """Every field of every event crosses, absent durations as absent ones and logits as the float32 they are."""
    message = pb.Event.FromString(pack_event(pack_attempt(attempt), event).SerializeToString())
    assert (unpack_attempt(message.attempt), unpack_event(message, attempt, WORKER)) == (attempt, event)


#: Times 1000 they are a little more than whole milliseconds.
AWKWARD_S = (2.023, 2.047, 4294967.281)


@given(errors)
@example(Overloaded("cpu", retry_after_s=AWKWARD_S[0]))
@example(DeadlineExceeded("prefill", AWKWARD_S[0]))
def test_an_error_keeps_its_facts(error):
    """The router acts on the same error that the worker met: same kind, same fields, same text."""
    found = over_the_wire(error)
    assert type(found) is type(error)
    assert vars(found) == vars(error)
    assert str(found) == str(error)


def test_older_versions_say_neither_weights_nor_how_long_they_took():
    """A tenant of a router that knows no weights has as much as any other; a worker's silence is not taken for no
    time."""
    prefill = unpack_command(pb.Command(prefill=pb.Prefill(prompt=bytes(4))))
    assert isinstance(prefill, Prefill) and (prefill.weight, prefill.traceparent) == (1.0, "")
    done = unpack_event(pb.Event(prefill_done=pb.PrefillDone(queue_s=1.0)), ATTEMPT, WORKER)
    assert isinstance(done, PrefillDone) and done.took_s is None


@pytest.mark.parametrize("seconds", AWKWARD_S)
def test_a_whole_millisecond_stays_one(seconds):
    """A deadline does not grow on its way because of how a float is stored."""
    prefill = Prefill(request_id=RequestId("r"), prompt=bytes(4), destination=None, deadline_s=seconds)
    assert unpack_command(pack_command(ATTEMPT, prefill)) == prefill


def test_a_missing_model_crosses_as_the_refusal_it_is():
    """A special invalid request keeps the code and the parameter that a client is shown."""
    found = over_the_wire(ModelNotFound("m"))
    assert isinstance(found, InvalidRequest)
    assert (found.param, found.code) == ("model", "model_not_found")


def test_an_error_that_no_request_can_cause_does_not_cross():
    """A configuration error in answer to a command is our bug."""
    with pytest.raises(AssertionError):
        pack_event(pack_attempt(ATTEMPT), Failed(ConfigError("kv.port", "in use")))


def test_a_failure_of_a_kind_not_known_here_still_fails_the_attempt():
    """A newer worker may have new codes; the attempt ends all the same, and another node may do better."""
    message = pb.Event(failed=pb.Failed(code="on_fire", detail="smoke"))
    assert unpack_event(message, ATTEMPT, WORKER) is not None
    error = unpack_event(message, ATTEMPT, WORKER).error
    assert isinstance(error, EngineFailed)
    assert (error.node, error.detail) == (WORKER, "on_fire: smoke")


def test_news_from_a_newer_worker_is_no_event():
    """An event of a kind that this version does not have is passed over."""
    assert unpack_event(pb.Event(attempt=pack_attempt(ATTEMPT)), ATTEMPT, WORKER) is None


@pytest.mark.parametrize(
    "message",
    [
        pb.Event(tokens=pb.Tokens(tokens=b"\x01\x00\x00")),
        pb.Event(tokens=pb.Tokens(top_logits=[pb.TopLogits(token_ids=b"\0" * 8, logits=b"\0" * 4)])),
        pb.Event(tokens=pb.Tokens(top_logits=[pb.TopLogits(token_ids=b"\0" * 5, logits=b"\0" * 4)])),
        pb.Event(done=pb.Done(reason="bored")),
    ],
    ids=["odd token bytes", "fewer logits than ids", "odd id bytes", "unknown finish"],
)
def test_an_event_that_cannot_be_read_fails_its_attempt(message):
    """Nonsense from a worker costs the one attempt, not the link."""
    failed = unpack_event(message, ATTEMPT, WORKER)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, PeerUnavailable)
    assert failed.error.peer == WORKER


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.Command(), "kind"),
        (pb.Command(prefill=pb.Prefill(prompt=bytes(4), weight=-1.0)), "weight"),
        (pb.Command(prefill=pb.Prefill(prompt=bytes(4), weight=math.nan)), "weight"),
        (pb.Command(prefill=pb.Prefill(prompt=bytes(4), weight=math.inf)), "weight"),
        (pb.Command(reserve=pb.Reserve(prompt=b"")), "prompt"),
        (pb.Command(prefill=pb.Prefill(prompt=b"12345")), "prompt"),
        (pb.Command(prefill=pb.Prefill(prompt=bytes(MAX_COMMAND_BYTES))), "prompt"),
    ],
    ids=["no kind", "negative", "nan", "endless", "no prompt", "odd prompt bytes", "too large"],
)
def test_a_command_that_cannot_be_carried_out_is_refused(message, param):
    """The refusal names what is wrong with it."""
    with pytest.raises(InvalidRequest) as refused:
        unpack_command(message)
    assert refused.value.param == param


@pytest.mark.parametrize("size", [0, 15, 17])
def test_an_attempt_is_sixteen_bytes(size):
    """Ids are 128 bits; anything else is nobody's."""
    with pytest.raises(InvalidRequest):
        unpack_attempt(bytes(size))


def test_a_prompt_that_no_worker_accepts_is_not_sent():
    """It is refused before it takes up the link that everybody shares."""
    prefill = Prefill(request_id=RequestId("r"), prompt=bytes(MAX_COMMAND_BYTES), destination=None, deadline_s=1.0)
    with pytest.raises(InvalidRequest):
        encode_command(ATTEMPT, prefill)


@pytest.mark.parametrize(
    ("deadline_s", "arrives_s"),
    [(0.0001, 0.001), (0.0, 0.0), (-1.0, 0.0), (1e12, 4294967.295), (float("inf"), 4294967.295)],
)
def test_what_remains_of_a_deadline_is_never_rounded_down_to_nothing(deadline_s, arrives_s):
    """A deadline that has passed is none left, and one beyond the field is the longest there is."""
    prefill = Prefill(request_id=RequestId("r"), prompt=b"1234", destination=None, deadline_s=deadline_s)
    assert unpack_command(pack_command(ATTEMPT, prefill)).deadline_s == arrives_s


@given(nodes, incarnations, texts.map(Namespace), uint32, uint32)
def test_a_worker_says_who_it_is(node, incarnation, namespace, oldest, newest):
    """Identity and wire versions cross unchanged."""
    told = WorkerDescription(node=node, incarnation=incarnation, namespace=namespace, wire=WireRange(oldest, newest))
    assert unpack_description(pb.DescribeResponse.FromString(pack_description(told).SerializeToString())) == told


@pytest.mark.parametrize(
    "wrong", [{"ticket": bytes(MAX_TICKET_BYTES + 1)}, {"key_out": b"short"}, {"key_back": bytes(32)}]
)
def test_what_is_no_ticket_or_key_goes_no_further(wrong):
    """A pump could not use it; the router is told so, or the attempt fails."""
    command = pb.Command(attempt=pack_attempt(ATTEMPT), prefill=pb.Prefill(prompt=bytes(4)))
    command.prefill.destination.CopyFrom(pb.Destination(kv_address="h:1", **wrong))
    with pytest.raises(InvalidRequest):
        unpack_command(command)
    event = pb.Event(attempt=pack_attempt(ATTEMPT), reserved=pb.Reserved(kv_address="h:1", **wrong))
    failed = unpack_event(event, ATTEMPT, WORKER)
    assert isinstance(failed, Failed) and isinstance(failed.error, PeerUnavailable)


@given(permits)
def test_a_permit_does_not_show_itself(permit):
    """Whatever is logged with it: the text of an event or a command holds neither ticket nor keys."""
    nothing = Reserved(kv_address="h:1", generation=1, incarnation=Incarnation(1))
    assert repr(replace(nothing, permit=permit)) == repr(nothing)
