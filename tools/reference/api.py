"""`docs/reference/api.md`, from the OpenAPI document that a router serves."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.router.openai.document import openapi
from tools.reference.table import code, table

Schema = Mapping[str, Any]

INTRODUCTION = """# HTTP API

Generated from the OpenAPI document that every router serves at `/openapi.json`, by `make docs`. It is the API of
OpenAI; [clients.md](../clients.md) has examples, [admission.md](../admission.md) is about keys, limits and deadlines.
Where there is a file of keys, requests need `authorization: Bearer KEY`, but for those marked *open*. The admin API is
another one, on a port of its own ([operations.md](../operations.md#admin-api)).
"""
#: A field that is there to be refused takes nothing but what asks for nothing.
NOTE = """Fields that take only `null` and a value that changes nothing are known so that clients may send them; what
they would ask for is refused with 400, and never ignored."""


def page() -> str:
    document = openapi(needs_key=True)
    components = document["components"]
    parts = [INTRODUCTION, "## Requests", "", _operations(document), "", NOTE, ""]
    parts += ["## Headers", "", _headers(components), "", "## Errors", "", _errors(components), "", "## Schemas", ""]
    for name, schema in sorted(components["schemas"].items()):
        parts += _schema(name, schema)
    return "\n".join(parts)


def _operations(document: Schema) -> str:
    rows = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            answers = ", ".join(_answer(kind, told) for kind, told in operation["responses"]["200"]["content"].items())
            opened = " *(open)*" if operation.get("security") == [] else ""
            errors = ", ".join(status for status in operation["responses"] if status != "200")
            rows.append(
                (f"{code(f'{method.upper()} {path}')}{opened}", operation["summary"], _type(body), answers, errors)
            )
    return table(("request", "does", "body", "answer", "errors"), rows)


def _answer(kind: str, told: Schema) -> str:
    if kind != "text/event-stream":
        return _type(told["schema"]) if kind == "application/json" else code(kind)
    chunk, error = told["itemSchema"]["properties"]["data"]["anyOf"][0]["contentSchema"]["anyOf"]
    return f"events of {_type(chunk)} or {_type(error)}"


def _headers(components: Schema) -> str:
    asked = [
        (code(name), "request", facts["description"], _type(facts["schema"]))
        for name, facts in components["parameters"].items()
    ]
    told = [
        (code(name), "answer", facts["description"], _type(facts["schema"]))
        for name, facts in components["headers"].items()
    ]
    return table(("header", "of", "meaning", "value"), [*asked, *told])


def _errors(components: Schema) -> str:
    return table(
        ("status", "meaning"), [(status, facts["description"]) for status, facts in components["responses"].items()]
    )


def _schema(name: str, schema: Schema) -> Iterable[str]:
    yield from (f"### {name}", "")
    if described := schema.get("description"):
        yield from (" ".join(described.split()), "")
    properties = schema.get("properties")
    if properties is None:
        yield from (_type(schema), "")
        return
    needed = set(schema.get("required", ()))
    rows = [
        (code(field), _type(facts), "yes" if field in needed else "", facts.get("description", ""))
        for field, facts in properties.items()
    ]
    told = any(row[3] for row in rows)
    head = ("field", "type", "always there", "meaning")
    yield from (table(head if told else head[:3], rows if told else [row[:3] for row in rows]), "")


def _type(schema: Schema | None) -> str:
    match schema:
        case None:
            return ""
        case {"$ref": place}:
            name = str(place).rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        case {"anyOf": choices}:
            return " or ".join(_type(choice) for choice in choices)
        case {"enum": values}:
            return ", ".join(code(_literal(value)) for value in values)
        case {"const": value}:
            return code(_literal(value))
        case {"type": "array", "items": items}:
            return f"list of {_type(items)}{_limits(schema)}"
        case {"type": kind}:
            return f"{kind}{_limits(schema)}"
        case _:
            return "anything"


def _literal(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _limits(schema: Schema) -> str:
    signs = (
        ("minimum", "≥"),
        ("exclusiveMinimum", ">"),
        ("maximum", "≤"),
        ("minLength", "length ≥"),
        ("maxLength", "length ≤"),
        ("minItems", "items ≥"),
        ("maxItems", "items ≤"),
    )
    said = [f"{sign} {schema[name]}" for name, sign in signs if name in schema]
    return f" ({', '.join(said)})" if said else ""
