"""What an engine is that is a vLLM server."""

import asyncio
import json
from pathlib import Path

import msgspec

from prfaas.cluster import LOGPROBS, Namespace
from prfaas.engine.fingerprint import HASH_UNIT_TOKENS, tokenizer_digest, weights_digest
from prfaas.engine.port import EngineInfo
from prfaas.engine.vllm.completions import Address, get
from prfaas.engine.vllm.geometry import Geometry
from prfaas.kvcache.layout import namespace_digest

#: Where prefills end their chunks; what is computed together is up to the server.
CHUNK_TOKENS = 512


class ServedModel(msgspec.Struct):
    """`root`: the folder that it was loaded from."""

    id: str
    max_model_len: int
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


async def served_model(api: Address) -> ServedModel:
    """The server's model; adapters of it come behind. Raises ServerError, OSError, msgspec.MsgspecError."""
    return msgspec.json.decode(await get(api, "/v1/models"), type=_Models).data[0]


async def engine_info(model_dir: Path, geometry: Geometry, served: ServedModel) -> EngineInfo:
    """Weights, tokenizer and geometry make the namespace: what differs in any of them reads none of its KV."""
    layout = geometry.layout
    weights, tokenizer = await asyncio.gather(
        asyncio.to_thread(weights_digest, model_dir), asyncio.to_thread(tokenizer_digest, model_dir)
    )
    settings = json.loads((model_dir / "config.json").read_text("utf-8"))
    eos = settings.get("eos_token_id")
    return EngineInfo(
        model=model_dir.name,
        namespace=Namespace(namespace_digest(weights, tokenizer, layout, HASH_UNIT_TOKENS)),
        layout=layout,
        chunk_tokens=CHUNK_TOKENS,
        max_context_tokens=served.max_model_len,
        vocab_tokens=settings["vocab_size"],
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        capabilities=(LOGPROBS,),
        tokenizer=tokenizer,
    )
