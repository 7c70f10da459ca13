"""A worker's advertised addresses are checked before it joins: they lead to it, or it says which one does not."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.cluster import Incarnation, Node, NodeId, NodeKind, RegionId, Role
from prfaas.engine.cost_model import write_config
from prfaas.errors import ConfigError
from prfaas.node.admission import Admission, Limits
from prfaas.node.children import children
from prfaas.node.engine_client import EngineClient
from prfaas.node.link_server import serve_worker
from prfaas.node.link_tcp import serve_link
from prfaas.node.pump_client import PumpClient
from prfaas.node.self_check import check_addresses
from prfaas.node.tenure import Place
from prfaas.node.worker import Worker
from prfaas.transfer.frames import WIRE
from prfaas.transfer.pump.messages import Start

POOL_BYTES = 1 << 20
LIMITS = Limits(max_sequences=1, max_tokens=1000, max_prefill_tokens=1000, max_prefills=1)
PATIENCE_S = 0.5


@asynccontextmanager
async def listening(model_dir: Path) -> AsyncIterator[tuple[Node, PumpClient]]:
    """A worker that answers on both of its ports, as it would register, and its pump."""
    async with children(model_dir, POOL_BYTES) as (engine_child, pump_child):
        engine, pump = EngineClient("w", engine_child.channel), PumpClient("w", pump_child.channel)
        async with asyncio.TaskGroup() as group:
            crew = [group.create_task(engine.run()), group.create_task(pump.run())]
            info, incarnation = await engine.info(), Incarnation(secrets.randbits(64))
            start = Start(
                node="w",
                incarnation=incarnation,
                namespace=info.namespace,
                layout=info.layout,
                pool_bytes=POOL_BYTES,
                listen_host="127.0.0.1",
                listen_port=0,
                no_progress_s=5,
                connect_s=5,
            )
            place = Place(NodeId("w"), RegionId("b"), incarnation, {"": f"127.0.0.1:{await pump.start(start)}"})
            worker = Worker(place, info, engine, pump, Admission(LIMITS), group.create_task)
            server = await serve_worker(worker, "127.0.0.1", 0)
            links = await serve_link(worker, "127.0.0.1", 0)
            node = Node(
                id=place.node,
                region=place.region,
                kind=NodeKind.PD,
                role=Role.MIXED,
                incarnation=incarnation,
                namespace=info.namespace,
                model=info.model,
                rpc_address=f"127.0.0.1:{server.port}",
                link_address=f"127.0.0.1:{links.port}",
                kv_addresses=place.kv_addresses,
                wire=WIRE,
                max_context_tokens=info.max_context_tokens,
                eos_token_ids=info.eos_token_ids,
            )
            yield node, pump
            await links.stop(0)
            await server.stop(0)
            for task in crew:
                task.cancel()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "cost"
    directory.mkdir()
    write_config(directory)
    return directory


async def test_addresses_that_lead_here_pass(model_dir: Path):
    """Of gRPC, the token link and the KV plane, whichever region they are for."""
    async with listening(model_dir) as (node, pump):
        await check_addresses(node, pump, PATIENCE_S)
        await check_addresses(replace(node, link_address=""), pump, PATIENCE_S)
        several = replace(node, kv_addresses={**node.kv_addresses, "a": node.kv_addresses[""]})
        await check_addresses(several, pump, PATIENCE_S)


async def test_an_address_at_which_nobody_answers_is_named(model_dir: Path):
    """After a while, that is: a relay before the worker may start later than it does."""
    async with listening(model_dir) as (node, pump):
        with socket.create_server(("127.0.0.1", 0)) as gone:
            nowhere = f"127.0.0.1:{gone.getsockname()[1]}"
        await assert_wrong(replace(node, rpc_address=nowhere), pump, "worker.rpc_advertise", "nobody answers")
        await assert_wrong(replace(node, link_address=nowhere), pump, "worker.link_advertise", "nobody answers")
        wrong = replace(node, kv_addresses={**node.kv_addresses, "a": nowhere})
        await assert_wrong(wrong, pump, "kv.advertise['a']", "nobody answers")


async def test_an_address_of_another_worker_is_named(model_dir: Path):
    """The port of a node that was replaced: somebody answers, but not we."""
    async with listening(model_dir) as (node, pump), listening(model_dir) as (other, _):
        wrong_rpc = replace(node, rpc_address=other.rpc_address)
        await assert_wrong(wrong_rpc, pump, "worker.rpc_advertise", "another node")
        wrong_link = replace(node, link_address=other.link_address)
        await assert_wrong(wrong_link, pump, "worker.link_advertise", "another node")
        wrong_kv = replace(node, kv_addresses={"": other.kv_addresses[""]})
        await assert_wrong(wrong_kv, pump, "kv.advertise['']", "another node")


async def assert_wrong(node: Node, pump: PumpClient, setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as failed:
        await check_addresses(node, pump, PATIENCE_S)
    assert failed.value.path == setting
