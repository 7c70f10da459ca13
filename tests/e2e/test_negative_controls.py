"""What was received is what is decoded: a part zeroed on the wire, with every checksum made right again, changes
tokens.

Without these the exactness tests could pass on an engine that quietly prefills again.
"""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from prfaas.kvcache.layout import KvLayout, Part, TensorKind
from services.free_ports import free_ports
from services.local_cluster import LocalCluster, Plan, local_cluster
from tests.e2e.client import complete
from tests.e2e.conftest import HYBRIDS
from tests.e2e.reference import Alone, token_ids
from tests.e2e.tamper import Tamper, Target

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTH, OUTPUT = 300, 24
FAMILIES = ("cost_model", HYBRIDS[0], *(pytest.param(family, marks=pytest.mark.slow) for family in HYBRIDS[1:]))


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=FAMILIES)
async def tampered(
    request: pytest.FixtureRequest,
    model_dir: Callable[[str], Path],
    alone: Callable[[str], Alone],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[LocalCluster, Tamper, Alone]]:
    """One prefill worker, one PD node, and the man in the middle of the path between them. Without a cache, from which
    the decode node would have the KV that is asked for twice."""
    reference = alone(request.param)
    kv_port, tamper_port = free_ports(2)
    tamper = Tamper(reference.engine.info.layout, kv_port)
    path = ("--kv-port", str(kv_port), "--kv-advertise", f"127.0.0.1:{kv_port}")
    plan = Plan(
        model_dir=model_dir(request.param),
        threshold_tokens=0,
        pd_roles=("mixed",),
        log_dir=tmp_path_factory.mktemp("logs"),
        extra={"decode-worker": (*path, "--kv-advertise", f"a=127.0.0.1:{tamper_port}")},
    )
    async with await tamper.start(tamper_port), local_cluster(plan) as cluster:
        yield cluster, tamper, reference


def first_state(layout: KvLayout, part: Part) -> bool:
    """The largest state tensor of the first layer that has one."""
    states = [
        (layer, tensor.nbytes, number)
        for layer, tensors in enumerate(layout.layers)
        for number, tensor in enumerate(tensors)
        if tensor.kind is TensorKind.STATE
    ]
    layer = states[0][0]
    _, _, number = max(state for state in states if state[0] == layer)
    return (part.layer, part.tensor) == (layer, number)


def first_kv_block(layout: KvLayout, part: Part) -> bool:
    """The first chunk's keys (or latent) of the first layer with attention."""
    layer = next(i for i, tensors in enumerate(layout.layers) if tensors[0].kind is TensorKind.TOKENS)
    return (part.layer, part.tensor, part.start) == (layer, 0, 0)


async def test_untouched_parts_give_the_right_tokens(tampered: tuple[LocalCluster, Tamper, Alone]):
    """The man in the middle himself does no harm: the control of the controls."""
    cluster, tamper, reference = tampered
    tamper.target = None
    done = await complete(cluster, token_ids(LENGTH), OUTPUT)
    assert done.receipt["path"] == "remote"
    assert done.token_ids == reference.answer(token_ids(LENGTH), OUTPUT)


@pytest.mark.parametrize("target", [first_state, first_kv_block])
async def test_a_zeroed_part_changes_tokens(tampered: tuple[LocalCluster, Tamper, Alone], target: Target):
    """One state, or one block of keys: the answer must differ, at a length where damage is seen in every case."""
    cluster, tamper, reference = tampered
    tamper.target, tamper.zeroed = target, 0
    done = await complete(cluster, token_ids(LENGTH), OUTPUT)
    assert tamper.zeroed == 1
    assert done.receipt["path"] == "remote"
    assert done.token_ids != reference.answer(token_ids(LENGTH), OUTPUT)
