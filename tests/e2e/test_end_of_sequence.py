"""The model's own end token ends an answer, wherever it is decoded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.local_cluster import Plan
from tests.e2e.client import complete, openai_client
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_end_token_ends_the_answer(
    start: StartCluster, model_dir: Callable[[str], Path], alone: Callable[[str], Alone], tmp_path: Path
):
    """It comes from the model folder, through the worker's registration, to the router's request."""
    ids = token_ids(40)
    answer = alone("qwen3").answer(ids, 12)
    end = answer[7]
    folder = shutil.copytree(model_dir("qwen3"), tmp_path / "ends")
    generation = folder / "generation_config.json"
    settings = json.loads(generation.read_text()) if generation.exists() else {}
    generation.write_text(json.dumps(settings | {"eos_token_id": [end]}))
    async with start(Plan(model_dir=folder, prefill_workers=0, pd_roles=("mixed",))) as cluster:
        done = await complete(cluster, ids, 12)
        assert done.token_ids == answer[: answer.index(end)]
        async with openai_client(cluster) as client:
            whole = await client.completions.create(model="ends", prompt=ids, max_tokens=12, temperature=0)
        assert whole.choices[0].finish_reason == "stop"
