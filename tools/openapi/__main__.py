"""Schemathesis on the OpenAPI document: `python -m tools.openapi` starts a cluster with a tiny model that computes,
asks it whatever the document allows and much that it does not, and fails on an answer that the document does not allow,
on a status above 499, and on bad input that is taken.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from prfaas.engine.tiny import build_tiny
from services.local_cluster import LocalCluster, Plan, local_cluster
from services.router import api_keys

HOOKS = "tools.openapi.hooks"
#: Of the cluster's processes.
LOGS = Path(".prfaas/openapi")
#: What no schema can say is refused all the same: fields that exclude each other, a prompt that is too long.
NOT_CHECKED = "positive_data_acceptance"


async def check(examples: int, seed: int, family: str) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        model_dir, keys_file = Path(scratch) / f"tiny-{family}", Path(scratch) / "keys.json"
        build_tiny(model_dir, family)
        key = make_key(keys_file)
        plan = Plan(model_dir=model_dir, prefill_workers=0, pd_roles=("mixed",), keys_file=keys_file, log_dir=LOGS)
        async with local_cluster(plan) as cluster:
            return await schemathesis(cluster, key, examples, seed)


def make_key(path: Path) -> str:
    empty = api_keys.empty()
    key_id, key, hashed = api_keys.new_key(empty)
    tenants = {"tester": api_keys.TenantRecord()}
    keys = {key_id: api_keys.KeyRecord(tenant="tester", hash=hashed)}
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(empty, tenants=tenants, keys=keys)))
    return key


async def schemathesis(cluster: LocalCluster, key: str, examples: int, seed: int) -> int:
    command = [f"{Path(sys.executable).parent}/schemathesis", "run", f"{cluster.endpoint}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {key}", "--exclude-checks", NOT_CHECKED, "--mode", "all"]
    command += ["--max-examples", str(examples), "--seed", str(seed)]
    environ = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "PRFAAS_MODEL": cluster.plan.model_dir.name}
    process = await asyncio.create_subprocess_exec(*command, env=environ)
    return await process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="for each operation and phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", default="kimi_linear", help="of the tiny model")
    given = parser.parse_args()
    return asyncio.run(check(given.examples, given.seed, given.family))


if __name__ == "__main__":
    sys.exit(main())
