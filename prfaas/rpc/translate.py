"""Our commands and events as protobuf messages and back. Nothing above this module sees a message's fields.

What comes from the wire is checked here: a command that cannot be read is an InvalidRequest to be answered, an event
that cannot be read is the failure of its attempt, and an event of an unknown kind is None (fields are only ever added,
and an older router may ignore news). Prompts and tokens stay the packed bytes they are.
"""

import struct
from typing import assert_never

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId, WireRange
from prfaas.errors import InvalidRequest, PeerUnavailable
from prfaas.request import TOKEN_BYTES, AttemptId, FinishReason, Permit, RequestId, Sampling, Score
from prfaas.rpc.commands import (
    Cancel,
    Command,
    Decode,
    Destination,
    Done,
    Event,
    Failed,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    Tokens,
    WorkerDescription,
)
from prfaas.rpc.failures import milliseconds, pack_failure, unpack_failure
from prfaas.rpc.v1 import worker_pb2 as pb

ATTEMPT_BYTES = 16
#: A gRPC message; room for several prompts of a million tokens.
MAX_MESSAGE_BYTES = 64 << 20
#: One command: a prompt of four million tokens. A sender adds to a message until it holds as much.
MAX_COMMAND_BYTES = 16 << 20

#: Of an attempt's keys, and at most of its ticket.
KEY_BYTES = 16
MAX_TICKET_BYTES = 256
#: A digest's worth.
MAX_SALT_BYTES = 64
#: It lists the blocks of the longest prompts.
MAX_HANDOVER_BYTES = 1 << 20
#: Of a tenant, against others.
MAX_WEIGHT = 1e6

TopLogits = tuple[tuple[int, float], ...]


def pack_attempt(attempt: AttemptId) -> bytes:
    packed = bytes.fromhex(attempt)
    assert len(packed) == ATTEMPT_BYTES, attempt
    return packed


def unpack_attempt(packed: bytes) -> AttemptId:
    if len(packed) != ATTEMPT_BYTES:
        raise InvalidRequest(f"an attempt is {ATTEMPT_BYTES} bytes, not {len(packed)}", param="attempt")
    return AttemptId(packed.hex())


def pack_command(attempt: AttemptId, command: Command) -> pb.Command:
    packed = pack_attempt(attempt)
    match command:
        case Reserve():
            return pb.Command(attempt=packed, reserve=_pack_reserve(command))
        case Prefill():
            return pb.Command(attempt=packed, prefill=_pack_prefill(command))
        case Decode():
            return pb.Command(
                attempt=packed, decode=pb.Decode(top_logits=command.top_logits, handover=command.handover)
            )
        case Cancel():
            return pb.Command(attempt=packed, cancel=pb.Cancel())
        case _:
            assert_never(command)


def encode_command(attempt: AttemptId, command: Command) -> bytes:
    """A serialized pb.Command. Raises InvalidRequest when it is larger than a worker accepts."""
    encoded: bytes = pack_command(attempt, command).SerializeToString()
    _check_size(len(encoded))
    return encoded


def unpack_command(message: pb.Command) -> Command:
    """Raises InvalidRequest for what no worker can carry out."""
    _check_size(message.ByteSize())
    match message.WhichOneof("kind"):
        case "reserve":
            return _unpack_reserve(message.reserve)
        case "prefill":
            return _unpack_prefill(message.prefill)
        case "decode":
            return Decode(message.decode.top_logits, _handover(message.decode.handover))
        case "cancel":
            return Cancel()
        case _:
            raise InvalidRequest("unknown command", param="kind")


def pack_event(attempt: bytes, event: Event) -> pb.Event:
    """`attempt` is packed already: a failure is answered under whatever bytes the command came with."""
    match event:
        case Reserved():
            return pb.Event(attempt=attempt, reserved=pack_reserved(event))
        case PrefillDone():
            return pb.Event(attempt=attempt, prefill_done=_pack_prefill_done(event))
        case Tokens():
            return pb.Event(attempt=attempt, tokens=_pack_tokens(event))
        case Done(reason=reason, recomputed_tokens=recomputed, output_tokens=output):
            done = pb.Done(reason=reason.value, recomputed_tokens=recomputed, output_tokens=output)
            return pb.Event(attempt=attempt, done=done)
        case Failed(error):
            return pb.Event(attempt=attempt, failed=pack_failure(error))
        case _:
            assert_never(event)


def unpack_event(message: pb.Event, attempt: AttemptId, worker: NodeId) -> Event | None:
    try:
        return _unpack_event(message, attempt, worker)
    except (ValueError, struct.error, InvalidRequest) as error:
        return Failed(PeerUnavailable(worker, f"malformed {message.WhichOneof('kind')}: {error}"))


def _unpack_event(message: pb.Event, attempt: AttemptId, worker: NodeId) -> Event | None:
    match message.WhichOneof("kind"):
        case "reserved":
            return unpack_reserved(message.reserved)
        case "prefill_done":
            return _unpack_prefill_done(message.prefill_done)
        case "tokens":
            return _unpack_tokens(message.tokens)
        case "done":
            done = message.done
            reason = FinishReason(done.reason)
            return Done(reason=reason, recomputed_tokens=done.recomputed_tokens, output_tokens=done.output_tokens)
        case "failed":
            return Failed(unpack_failure(message.failed, attempt, worker))
        case _:
            return None


def pack_description(description: WorkerDescription) -> pb.DescribeResponse:
    return pb.DescribeResponse(
        node=description.node,
        incarnation=description.incarnation,
        namespace=description.namespace,
        oldest_wire=description.wire.oldest,
        newest_wire=description.wire.newest,
    )


def unpack_description(message: pb.DescribeResponse) -> WorkerDescription:
    return WorkerDescription(
        node=NodeId(message.node),
        incarnation=Incarnation(message.incarnation),
        namespace=Namespace(message.namespace),
        wire=WireRange(message.oldest_wire, message.newest_wire),
    )


def _check_size(size: int) -> None:
    if size > MAX_COMMAND_BYTES:
        raise InvalidRequest(f"a command of {size} bytes; at most {MAX_COMMAND_BYTES} are accepted", param="prompt")


def _prompt(packed: bytes) -> bytes:
    if not packed or len(packed) % TOKEN_BYTES:
        raise InvalidRequest(f"{len(packed)} bytes are not a prompt of packed uint32 token ids", param="prompt")
    return packed


def _pack_reserve(command: Reserve) -> pb.Reserve:
    sampling = command.sampling
    return pb.Reserve(
        request=command.request_id,
        prompt=command.prompt,
        sampling=pb.Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            constraint=sampling.constraint,
        ),
        source_node=command.source_node,
        source_region=command.source_region,
        source_namespace=command.source_namespace,
        deadline_ms=milliseconds(command.deadline_s),
        salt=command.salt,
        tenant=command.tenant,
        use_cache=command.use_cache,
        traceparent=command.traceparent,
        network=command.network,
    )


def _unpack_reserve(message: pb.Reserve) -> Reserve:
    sampling = message.sampling
    return Reserve(
        request_id=RequestId(message.request),
        prompt=_prompt(message.prompt),
        sampling=Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=tuple(sampling.stop_token_ids),
            constraint=sampling.constraint,
        ),
        source_node=NodeId(message.source_node),
        source_region=RegionId(message.source_region),
        source_namespace=Namespace(message.source_namespace),
        deadline_s=message.deadline_ms / 1000,
        salt=_salt(message.salt),
        tenant=message.tenant,
        use_cache=message.use_cache,
        traceparent=message.traceparent,
        network=message.network,
    )


def _handover(handover: bytes) -> bytes:
    if len(handover) > MAX_HANDOVER_BYTES:
        raise InvalidRequest(f"a hand-over of {len(handover)} bytes", param="handover")
    return handover


def _salt(salt: bytes) -> bytes:
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"a salt of {len(salt)} bytes", param="salt")
    return salt


def _pack_prefill(command: Prefill) -> pb.Prefill:
    message = pb.Prefill(
        request=command.request_id,
        prompt=command.prompt,
        deadline_ms=milliseconds(command.deadline_s),
        salt=command.salt,
        tenant=command.tenant,
        use_cache=command.use_cache,
        pull_region=command.pull_region or "",
        weight=command.weight,
        traceparent=command.traceparent,
    )
    if command.destination is not None:
        message.destination.CopyFrom(pack_destination(command.destination))
    return message


def _unpack_prefill(message: pb.Prefill) -> Prefill:
    return Prefill(
        request_id=RequestId(message.request),
        prompt=_prompt(message.prompt),
        destination=unpack_destination(message.destination) if message.HasField("destination") else None,
        deadline_s=message.deadline_ms / 1000,
        salt=_salt(message.salt),
        tenant=message.tenant,
        use_cache=message.use_cache,
        pull_region=RegionId(message.pull_region) if message.pull_region else None,
        weight=_weight(message.weight),
        traceparent=message.traceparent,
    )


def _weight(weight: float) -> float:
    """A router of an older version does not say any."""
    if not 0 <= weight <= MAX_WEIGHT:
        raise InvalidRequest(f"a weight of {weight}", param="weight")
    return weight or 1.0


def pack_destination(to: Destination) -> pb.Destination:
    return pb.Destination(
        node=to.node,
        incarnation=to.incarnation,
        kv_address=to.kv_address,
        generation=to.generation,
        region=to.region,
        ticket=to.permit.ticket,
        key_out=to.permit.key_out,
        key_back=to.permit.key_back,
        held_tokens=to.held_tokens,
        network=to.network,
    )


def unpack_destination(message: pb.Destination) -> Destination:
    """Raises InvalidRequest for what is no ticket, or no key."""
    return Destination(
        node=NodeId(message.node),
        incarnation=Incarnation(message.incarnation),
        kv_address=message.kv_address,
        generation=message.generation,
        region=RegionId(message.region),
        permit=_permit(message),
        held_tokens=message.held_tokens,
        network=message.network,
    )


def pack_reserved(event: Reserved) -> pb.Reserved:
    return pb.Reserved(
        kv_address=event.kv_address,
        generation=event.generation,
        incarnation=event.incarnation,
        ticket=event.permit.ticket,
        key_out=event.permit.key_out,
        key_back=event.permit.key_back,
        held_tokens=event.held_tokens,
        took_s=event.took_s,
    )


def unpack_reserved(message: pb.Reserved) -> Reserved:
    return Reserved(
        kv_address=message.kv_address,
        generation=message.generation,
        incarnation=Incarnation(message.incarnation),
        permit=_permit(message),
        held_tokens=message.held_tokens,
        took_s=message.took_s if message.HasField("took_s") else None,
    )


def _permit(message: pb.Reserved | pb.Destination) -> Permit:
    """Raises InvalidRequest for what is no ticket, or no key."""
    if len(message.ticket) > MAX_TICKET_BYTES or not {len(message.key_out), len(message.key_back)} <= {0, KEY_BYTES}:
        raise InvalidRequest("neither a ticket nor keys", param="destination")
    return Permit(ticket=message.ticket, key_out=message.key_out, key_back=message.key_back)


def _pack_prefill_done(event: PrefillDone) -> pb.PrefillDone:
    return pb.PrefillDone(
        queue_s=event.queue_s,
        compute_s=event.compute_s,
        exposed_s=event.exposed_s,
        prefill_tokens=event.prefill_tokens,
        kv_bytes=event.kv_bytes,
        cached_tokens=event.cached_tokens,
        pulled_bytes=event.pulled_bytes,
        took_s=event.took_s,
        handover=event.handover,
    )


def _unpack_prefill_done(message: pb.PrefillDone) -> PrefillDone:
    return PrefillDone(
        queue_s=message.queue_s,
        compute_s=message.compute_s,
        exposed_s=message.exposed_s,
        prefill_tokens=message.prefill_tokens,
        kv_bytes=message.kv_bytes,
        cached_tokens=message.cached_tokens,
        pulled_bytes=message.pulled_bytes,
        took_s=message.took_s if message.HasField("took_s") else None,
        handover=_handover(message.handover),
    )


def _pack_tokens(event: Tokens) -> pb.Tokens:
    return pb.Tokens(
        tokens=event.tokens,
        top_logits=[_pack_top_logits(top) for top in event.top_logits],
        logits=[score.logit for score in event.scores],
        log_normalisers=[score.log_normaliser for score in event.scores],
        first_queue_s=event.first_queue_s,
        first_step_s=event.first_step_s,
        first_took_s=event.first_took_s,
    )


def _unpack_tokens(message: pb.Tokens) -> Tokens:
    if len(message.tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(message.tokens)} bytes of token ids")
    return Tokens(
        tokens=message.tokens,
        top_logits=tuple(_unpack_top_logits(top) for top in message.top_logits),
        scores=tuple(Score(*pair) for pair in zip(message.logits, message.log_normalisers, strict=True)),
        first_queue_s=message.first_queue_s if message.HasField("first_queue_s") else None,
        first_step_s=message.first_step_s if message.HasField("first_step_s") else None,
        first_took_s=message.first_took_s if message.HasField("first_took_s") else None,
    )


def _pack_top_logits(top: TopLogits) -> pb.TopLogits:
    count = len(top)
    token_ids = struct.pack(f"<{count}I", *(token_id for token_id, _ in top))
    return pb.TopLogits(token_ids=token_ids, logits=struct.pack(f"<{count}f", *(logit for _, logit in top)))


def _unpack_top_logits(message: pb.TopLogits) -> TopLogits:
    count = len(message.token_ids) // TOKEN_BYTES
    token_ids = struct.unpack(f"<{count}I", message.token_ids)
    return tuple(zip(token_ids, struct.unpack(f"<{count}f", message.logits), strict=True))
