"""The OpenAPI document."""

import json
from typing import Any

import msgspec
import pytest

from services.router.http.errors import TYPES
from services.router.openai.document import ERRORS, OPERATIONS, WITHOUT_KEY, Operation, openapi, openapi_json
from services.router.openai.schema import ChatBody, CompletionBody

DOCUMENT = openapi(needs_key=True)


def references(value: Any) -> set[str]:
    match value:
        case dict():
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*[references(inner) for inner in value.values()])
        case list():
            return set().union(*[references(inner) for inner in value])
    return set()


def test_every_reference_leads_somewhere():
    """To a component of the document."""
    names = {name.removeprefix("#/components/") for name in references(DOCUMENT)}
    assert names <= places(DOCUMENT["components"])
    assert {"schemas/ChatBody", "schemas/CompletionBody", "schemas/ResponsesBody", "schemas/ErrorAnswer"} <= names


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_the_schemas_are_those_that_bodies_are_decoded_with(body: type[msgspec.Struct]):
    """All fields, and no others."""
    schema = DOCUMENT["components"]["schemas"][body.__name__]
    assert set(schema["properties"]) == set(body.__struct_fields__)
    assert schema["additionalProperties"] is False


def test_operations_have_names_of_their_own():
    """So that clients can be generated from it; it is JSON."""
    shown = json.loads(openapi_json(needs_key=True))
    ids = [operation["operationId"] for path in shown["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids) == len(OPERATIONS)
    assert shown["openapi"] == "3.2.0"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_every_error_is_described(operation: Operation):
    """By its own status, not by one for all; the key only where one is asked for."""
    described = DOCUMENT["paths"][operation.path][operation.method]
    errors = set(described["responses"]) - {"200"}
    assert {"400", "413", "431", "500", "503"} <= errors
    assert ("401" in errors) == (operation.path not in WITHOUT_KEY)
    assert ("429" in errors) == ("504" in errors) == (operation.chunk is not None)
    assert all(named.removeprefix("#/components/") in places(DOCUMENT["components"]) for named in references(described))


def places(components: dict[str, Any]) -> set[str]:
    return {f"{kind}/{name}" for kind, named in components.items() for name in named}


def test_the_table_of_errors_has_all_that_the_api_tells():
    """And their headers."""
    assert set(TYPES) <= set(ERRORS)
    responses = DOCUMENT["components"]["responses"]
    assert all(responses[status]["headers"]["retry-after"]["required"] for status in ("429", "503"))


def test_a_key_is_asked_for_where_it_is():
    """An open endpoint's document says so."""
    assert DOCUMENT["security"] == [{"key": []}]
    assert openapi(needs_key=False)["security"] == [{}]
    assert DOCUMENT["paths"]["/live"]["get"]["security"] == []
    assert "security" not in DOCUMENT["paths"]["/v1/models"]["get"]


def test_what_is_not_served_may_only_say_so():
    """Its schema has the values that are accepted."""
    properties = DOCUMENT["components"]["schemas"]["CompletionBody"]["properties"]
    assert properties["best_of"]["enum"] == [None, 1]
    assert "enum" not in properties["max_tokens"]
