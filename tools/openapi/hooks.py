"""What schemathesis cannot know of this API: which model there is, that answers must be short to be quick, and what is
in the events of a stream."""

import json
import os
from typing import Any

import jsonschema_rs
import schemathesis

MODEL = os.environ["PRFAAS_MODEL"]
#: Of the answers asked for.
FEW_TOKENS, MOST_CHOICES = 4, 128
DEADLINE, PATIENCE_MS = "x-prfaas-ttft-deadline-ms", 60_000
#: The field for the length of the answer.
LENGTHS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Nobody can guess the name of the model."""
    bodies = [schema for schema in raw_schema["components"]["schemas"].values() if "additionalProperties" in schema]
    for properties in (body["properties"] for body in bodies if "model" in body["properties"]):
        properties["model"] = {"enum": [MODEL, None] if "anyOf" in properties["model"] else [MODEL]}
    [named] = [one for one in raw_schema["paths"]["/v1/models/{model}"]["get"]["parameters"] if "name" in one]
    named["schema"] = {"enum": [MODEL, "nobody"]}


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """A header that nobody knows is nothing bad, and a deadline that nobody can keep is not the server's fault."""
    headers = case.headers or {}
    deadline_ms = str(headers.get(DEADLINE, ""))
    hasty = deadline_ms.isdigit() and 0 < int(deadline_ms) < PATIENCE_MS
    return not hasty and not any("unknown-property" in name for name in headers)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Of what is right by the schema, make what is right by the rules between fields as well, and quick to answer, or
    little would come to an answer. What is wrong stays as it is."""
    if isinstance(case.body, dict):
        _shorten(case.body, LENGTHS.get(case.operation.path))
        _reconcile(case.body)
        if case.operation.path == "/tokenize" and case.body.get("prompt") is case.body.get("messages") is None:
            case.body["prompt"] = "x"


def _shorten(body: dict[str, Any], length: str | None) -> None:
    for name in ("max_tokens", *LENGTHS.values()):
        if type(body.get(name)) is int and body[name] > 0:
            body[name] = FEW_TOKENS
    if length is not None and body.get("max_tokens") is None and body.get(length) is None:
        body[length] = FEW_TOKENS
    if type(body.get("n")) is int and 2 < body["n"] <= MOST_CHOICES:
        body["n"] = 2


def _reconcile(body: dict[str, Any]) -> None:
    off = (None, False)
    if isinstance(body.get("stream_options"), dict) and body.get("stream") in off:
        body["stream"] = True
    if type(body.get("top_logprobs")) is int and "messages" in body and body.get("logprobs") in off:
        body["logprobs"] = True
    if body.get("echo") is True and type(body.get("logprobs")) is int:
        body["echo"] = False
    if isinstance(body.get("tools"), list) and all(isinstance(tool, dict) for tool in body["tools"]):
        body["tools"] = []
    if isinstance(body.get("tool_choice"), str | dict):
        body["tool_choice"] = "none"
    if isinstance(body.get("response_format"), dict):
        body["response_format"] = {"type": "text"}
    if isinstance(body.get("prompt"), list):
        body["prompt"] = [_known(one) for one in body["prompt"]] or "x"
    elif body.get("prompt") == "":
        body["prompt"] = "x"
    if isinstance(body.get("prompt"), str) and body.get("messages") is not None:
        body["prompt"] = None


def _known(prompt: Any) -> Any:
    """Token ids that the model has; every integer is one by the schema."""
    if type(prompt) is int:
        return abs(prompt) % 256
    return [_known(one) for one in prompt] if isinstance(prompt, list) else prompt


@schemathesis.check
def events_conform(context: Any, response: Any, case: Any) -> None:
    """The data of each event is [DONE] or what the document says."""
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    document = case.operation.schema.raw_schema
    content = document["paths"][case.operation.path][case.method.lower()]["responses"]["200"]["content"]
    [told, _] = content["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"]
    validator = jsonschema_rs.validator_for({**told["contentSchema"], "components": document["components"]})
    lines = [line for line in response.content.decode().split("\n") if line.startswith("data: ")]
    assert lines, "a stream has events"
    for line in lines:
        if (data := line.removeprefix("data: ")) != "[DONE]":
            validator.validate(json.loads(data))
