"""The simulator says what a live cluster does: cost-model engines in real processes behind a shaped line, and the same
arrivals in virtual time.
"""

import asyncio
import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from openai import AsyncOpenAI

from prfaas.cluster import NodeKind
from prfaas.engine.cost_model import write_config
from prfaas.engine.cost_profile import CostConfig
from prfaas.profiles import profile_of
from prfaas.sim.hardware import HardwareTable
from prfaas.sim.instance import TimeSharing
from prfaas.sim.policies import Policy
from prfaas.sim.run import run
from prfaas.sim.scenario import ControlSpec, FleetSpec, LinkSpec, Scenario
from prfaas.sim.trace_files import TraceFormat
from prfaas.sim.workload import Trace, Workload
from services.local_cluster import HARDWARE, PD_REGION, PREFILL_REGION, Plan, Wan, local_cluster

REQUESTS, RATE_PER_S, MAX_TOKENS = 160, 4.0, 16
#: Below it prompts stay on the mixed node.
THRESHOLD_TOKENS = 2500
MBIT, RTT_MS = 200.0, 4.0
CLOSE = 0.15
TABLE_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def arrivals() -> list[tuple[float, int]]:
    """Poisson, with lengths on both sides of the threshold."""
    chance, at, drawn = random.Random("live"), 0.0, []
    for _ in range(REQUESTS):
        at += chance.expovariate(RATE_PER_S)
        drawn.append((at, min(8000, max(100, round(chance.lognormvariate(7.6, 0.7))))))
    return drawn


async def live(model_dir: Path) -> list[float]:
    """Seconds to the first token of each request, by the router's receipts."""
    plan = Plan(
        model_dir=model_dir,
        threshold_tokens=THRESHOLD_TOKENS,
        rebalance=False,
        prefill_workers=1,
        pd_roles=("mixed", "decode"),
        wan=Wan(mbit=MBIT, rtt_ms=RTT_MS),
    )
    async with (
        local_cluster(plan) as cluster,
        AsyncOpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):

        async def ask(number: int, tokens: int) -> float:
            answer = await client.completions.create(
                model=model_dir.name,
                prompt=[1 + (number * 7919 + place) % 250 for place in range(tokens)],
                max_tokens=MAX_TOKENS,
                temperature=0,
                extra_headers={"x-prfaas-receipt": "1"},
            )
            assert answer.model_extra is not None
            seconds: float = answer.model_extra["prfaas_receipt"]["ttft_seconds"]
            return seconds

        await asyncio.gather(*(ask(1000 + number, 300) for number in range(4)))
        loop = asyncio.get_running_loop()
        start, asked = loop.time(), []
        for number, (at, tokens) in enumerate(arrivals()):
            await asyncio.sleep(start + at - loop.time())
            asked.append(asyncio.ensure_future(ask(number, tokens)))
        return list(await asyncio.gather(*asked))


def simulated(model_dir: Path, folder: Path) -> list[float]:
    costs = msgspec.json.decode((model_dir / "config.json").read_bytes(), type=CostConfig)
    lines = (
        json.dumps({"timestamp": 1000 * at, "input_length": tokens, "output_length": MAX_TOKENS})
        for at, tokens in arrivals()
    )
    (folder / "arrivals.jsonl").write_text("\n".join(lines))
    turns = {"hardware": HARDWARE, "sharing": TimeSharing.TURNS, "chunk_tokens": costs.chunk_tokens}
    scenario = Scenario(
        name="live",
        fleets=(
            FleetSpec(name="prefill", region=PREFILL_REGION, kind=NodeKind.PREFILL_WORKER, nodes=1, **turns),
            FleetSpec(name="decode", region=PD_REGION, kind=NodeKind.PD, nodes=2, shares=(0.5,), **turns),
        ),
        links=(LinkSpec(source=PREFILL_REGION, target=PD_REGION, gbps=MBIT / 1000, rtt_s=RTT_MS / 1000),),
        hardware={HARDWARE: HardwareTable.of(profile_of(costs, HARDWARE, "m"), TABLE_TOKENS)},
        workload=Workload(trace=Trace(path="arrivals.jsonl", format=TraceFormat.MOONCAKE)),
        folder=str(folder),
        policy=Policy(threshold_tokens=THRESHOLD_TOKENS),
        control=ControlSpec(fast=True),
        step_limit_s=None,
        token_batch=1,
        duration_s=3600.0,
        warm_up_s=0.0,
    )
    return [float(seconds) for seconds in run(scenario).requests["ttft_s"]]


async def test_live_and_simulated_times_to_the_first_token_agree(tmp_path):
    """Mean and P90 of the same requests, within 15 %. The machine must not be busy with other things."""
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    write_config(model_dir, time_scale=0.4, byte_scale=0.002)
    ours, theirs = simulated(model_dir, tmp_path), await live(model_dir)
    assert len(ours) == len(theirs) == REQUESTS
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=CLOSE)
    assert np.percentile(ours, 90) == pytest.approx(np.percentile(theirs, 90), rel=CLOSE)
