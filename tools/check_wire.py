"""Wire compatibility: compares the protos with the committed baseline. Fields are only added.

A field may leave only when its number is reserved, and a reserved number never returns. Everything else that the
baseline knows (messages, enum values, methods) stays as it is. `--update` adds what is new to the baseline; it refuses,
as the check does, while something known was broken. Part of the `make check` gate, so that what was released once is
also protected from the next change.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet

from tools.generate_stubs import PROTOS, compile_protos

BASELINE = PROTOS / "baseline.json"


class Field(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    type: str
    label: str
    oneof: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields by number, and the numbers that are reserved."""

    fields: dict[int, Field] = {}
    reserved: tuple[int, ...] = ()


class Wire(msgspec.Struct, frozen=True):
    """All that two versions must agree on, by full name."""

    messages: dict[str, Message] = {}
    enums: dict[str, dict[int, str]] = {}
    methods: dict[str, str] = {}


def read(descriptors: FileDescriptorSet) -> Wire:
    wire = Wire()
    for file in descriptors.file:
        for message in file.message_type:
            _read_message(wire, f"{file.package}.{message.name}", message)
        for enum in file.enum_type:
            wire.enums[f"{file.package}.{enum.name}"] = _enum(enum)
        for service in file.service:
            for method in service.method:
                streams = ("stream " * method.client_streaming, "stream " * method.server_streaming)
                wire.methods[f"{file.package}.{service.name}/{method.name}"] = (
                    f"{streams[0]}{method.input_type} -> {streams[1]}{method.output_type}"
                )
    return wire


def _read_message(wire: Wire, name: str, message: DescriptorProto) -> None:
    fields = {field.number: _field(message, field) for field in message.field}
    # A range's end is exclusive, and `max` is beyond anything worth listing.
    reserved = {
        number for each in message.reserved_range for number in range(each.start, min(each.end, each.start + 1000))
    }
    wire.messages[name] = Message(fields, tuple(sorted(reserved)))
    for nested in message.nested_type:
        _read_message(wire, f"{name}.{nested.name}", nested)
    for enum in message.enum_type:
        wire.enums[f"{name}.{enum.name}"] = _enum(enum)


def _field(message: DescriptorProto, field: FieldDescriptorProto) -> Field:
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    label = FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
    real_oneof = field.HasField("oneof_index") and not field.proto3_optional
    oneof = message.oneof_decl[field.oneof_index].name if real_oneof else ""
    return Field(field.name, field.type_name or kind, "presence" if field.proto3_optional else label, oneof)


def _enum(enum: EnumDescriptorProto) -> dict[int, str]:
    return {value.number: value.name for value in enum.value}


def broken(baseline: Wire, current: Wire) -> Iterator[str]:
    """What an old peer, speaking the baseline, would read wrongly or miss."""
    for name, message in baseline.messages.items():
        if name not in current.messages:
            yield f"message {name} was removed"
        else:
            yield from _broken_fields(name, message, current.messages[name])
    for name, values in baseline.enums.items():
        now = current.enums.get(name, {})
        yield from (
            f"enum {name}: value {number} was {value}, is {now.get(number, 'gone')}"
            for number, value in values.items()
            if now.get(number) != value
        )
    for name, signature in baseline.methods.items():
        if (now_signature := current.methods.get(name, "gone")) != signature:
            yield f"method {name} was {signature}, is {now_signature}"


def _broken_fields(name: str, before: Message, now: Message) -> Iterator[str]:
    for number, field in before.fields.items():
        if number not in now.fields and number not in now.reserved:
            yield f"{name}.{field.name} = {number} was removed without `reserved {number};`"
        elif number in now.fields and now.fields[number] != field:
            yield f"{name}: field {number} was {_show(field)}, is {_show(now.fields[number])}"
    for number in before.reserved:
        if number not in now.reserved:
            yield f"{name}: number {number} is no longer reserved"


def _show(field: Field) -> str:
    return f"{field.label} {field.type} {field.name}" + (f" (oneof {field.oneof})" if field.oneof else "")


def compiled() -> Wire:
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "descriptors.binpb"
        compile_protos(f"--descriptor_set_out={output}")
        return read(FileDescriptorSet.FromString(output.read_bytes()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="add what is new to the baseline")
    update = parser.parse_args().update
    baseline = msgspec.json.decode(BASELINE.read_bytes(), type=Wire) if BASELINE.exists() else Wire()
    current = compiled()
    complaints = list(broken(baseline, current))
    if not complaints and update:
        BASELINE.write_bytes(msgspec.json.format(msgspec.json.encode(current), indent=1) + b"\n")
    elif not complaints and current != baseline:
        complaints = [f"the protos have more than {BASELINE.name}: run `make stubs`"]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
