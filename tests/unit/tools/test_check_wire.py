"""A change of the protos that an old peer would misread is caught; additions are not."""

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from tools.check_wire import Wire, broken, compiled, read

Change = Callable[[FileDescriptorProto], None]


def released() -> FileDescriptorProto:
    """A release with a message of two fields, a nested one, an enum and a method."""
    file = FileDescriptorProto(name="x.proto", package="x", syntax="proto3")
    message = file.message_type.add(name="Offer")
    add_field(message, "bytes", 1, FieldDescriptorProto.TYPE_UINT64)
    add_field(message, "deadline_ms", 2, FieldDescriptorProto.TYPE_UINT32)
    add_field(message.nested_type.add(name="Part"), "offset", 1, FieldDescriptorProto.TYPE_UINT64)
    message.reserved_range.add(start=9, end=10)
    file.enum_type.add(name="Cause").value.add(name="LOST", number=0)
    file.service.add(name="Worker").method.add(name="Link", input_type=".x.Offer", output_type=".x.Offer")
    return file


def add_field(message: DescriptorProto, name: str, number: int, kind: "FieldDescriptorProto.Type.ValueType") -> None:
    message.field.add(name=name, number=number, type=kind, label=FieldDescriptorProto.LABEL_OPTIONAL)


def wire(file: FileDescriptorProto) -> Wire:
    return read(FileDescriptorSet(file=[file]))


def complaints_after(change: Change) -> list[str]:
    file = released()
    change(file)
    return list(broken(wire(released()), wire(file)))


def remove(file: FileDescriptorProto) -> None:
    del file.message_type[0].field[1]


def retype(file: FileDescriptorProto) -> None:
    file.message_type[0].field[1].type = FieldDescriptorProto.TYPE_STRING


def renumber(file: FileDescriptorProto) -> None:
    file.message_type[0].field[1].number = 3


def rename(file: FileDescriptorProto) -> None:
    file.message_type[0].field[1].name = "ttl_ms"


def repeat(file: FileDescriptorProto) -> None:
    file.message_type[0].field[1].label = FieldDescriptorProto.LABEL_REPEATED


def move_into_a_oneof(file: FileDescriptorProto) -> None:
    file.message_type[0].oneof_decl.add(name="kind")
    file.message_type[0].field[1].oneof_index = 0


def remove_nested_field(file: FileDescriptorProto) -> None:
    del file.message_type[0].nested_type[0].field[0]


def remove_message(file: FileDescriptorProto) -> None:
    del file.message_type[0]


def free_a_reserved_number(file: FileDescriptorProto) -> None:
    del file.message_type[0].reserved_range[0]


def change_an_enum(file: FileDescriptorProto) -> None:
    file.enum_type[0].value[0].name = "FOUND"


def stream_a_method(file: FileDescriptorProto) -> None:
    file.service[0].method[0].client_streaming = True


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (remove, "deadline_ms = 2 was removed without"),
        (retype, "field 2 was optional uint32 deadline_ms, is optional string deadline_ms"),
        (renumber, "deadline_ms = 2 was removed without"),
        (rename, "is optional uint32 ttl_ms"),
        (repeat, "is repeated uint32 deadline_ms"),
        (move_into_a_oneof, "(oneof kind)"),
        (remove_nested_field, "x.Offer.Part.offset = 1 was removed without"),
        (remove_message, "message x.Offer was removed"),
        (free_a_reserved_number, "number 9 is no longer reserved"),
        (change_an_enum, "value 0 was LOST, is FOUND"),
        (stream_a_method, "method x.Worker/Link was"),
    ],
)
def test_a_change_that_an_old_peer_would_misread_is_named(change: Change, complaint: str):
    """Every way to break the wire is a complaint that names the place."""
    assert any(complaint in each for each in complaints_after(change))


def test_a_field_may_be_added():
    """An old peer skips what it does not know."""
    assert (
        complaints_after(lambda file: add_field(file.message_type[0], "tenant", 3, FieldDescriptorProto.TYPE_STRING))
        == []
    )


def test_a_field_may_leave_when_its_number_is_reserved():
    """A reserved number cannot come back with another meaning."""

    def retire(file: FileDescriptorProto) -> None:
        remove(file)
        file.message_type[0].reserved_range.add(start=2, end=3)

    assert complaints_after(retire) == []


def test_the_protos_of_this_tree_are_read():
    """The check compiles what is really there: the token link is among it."""
    current = compiled()
    assert current.methods["prfaas.rpc.v1.Worker/Link"].startswith("stream .prfaas.rpc.v1.ToWorker")
    assert current.messages["prfaas.rpc.v1.Command"].fields[2].oneof == "kind"
    assert current.messages["prfaas.rpc.v1.Tokens"].fields[3].label == "presence"
