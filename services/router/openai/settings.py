"""Settings of the OpenAI API."""

import msgspec


class OpenAiSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: `max_tokens` of a chat that names none, if the context has room for it. Decode reserves memory for all of it.
    chat_max_tokens: int = 4096
    #: The same for /v1/completions; 16 as OpenAI does.
    completion_max_tokens: int = 16
    #: Sequences of one request: its prompts times `n`. Each is prefilled and decoded by itself.
    max_sequences: int = 64
