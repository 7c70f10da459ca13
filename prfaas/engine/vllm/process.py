"""The engine process of a worker whose engine is vLLM: `python -m prfaas.engine.vllm.process --fd N --pool-fd M ...`.

It starts the server, answers for it to the node, and ends with it: node, pump, this process and the server are one
failure unit. The server's worker ends when this process has closed the bridge.
"""

import argparse
import asyncio
import os
import shutil
import socket
import tempfile
from pathlib import Path

import msgspec
import structlog

from prfaas.cluster import NETWORK
from prfaas.engine.messages import Command, Ready, Unfit
from prfaas.engine.vllm.adapter import Adapter
from prfaas.engine.vllm.attached import Attached, attach
from prfaas.engine.vllm.connection import PEER, Bridge
from prfaas.engine.vllm.engine_info import engine_info, served_model
from prfaas.engine.vllm.installation import installed_version
from prfaas.engine.vllm.model_folder import check_folder
from prfaas.engine.vllm.own_network import NIXL, surroundings
from prfaas.engine.vllm.prefix_book import PrefixBook
from prfaas.engine.vllm.prefix_watch import can_watch, capabilities, watch_prefixes
from prfaas.engine.vllm.reports import count, report
from prfaas.engine.vllm.server import (
    ARGUMENTS,
    api_socket,
    bridge_socket,
    command,
    ended_early,
    endpoints,
    in_time,
    running,
    until_healthy,
)
from prfaas.errors import ConfigError, PeerUnavailable, first_of
from prfaas.ipc import AsyncChannel
from prfaas.observe.logs import configure
from prfaas.process import die_with_parent, leave_signals_to_the_node

#: How long the node may take to hear that this is no engine.
HEARD_S = 10.0
#: The folder's name, and vLLM's sockets by a UUID, come behind it.
LONGEST_PLACE_BYTES = 48

log = structlog.get_logger()


class NodeLeft(Exception):
    """While the server started: that ends, and its folder is gone, before the node loses its patience."""


async def serve(args: argparse.Namespace, folder: Path) -> None:
    """Until the node is gone. Raises PeerUnavailable when the server is; when it does not start, the node is told."""
    node = await AsyncChannel[Command].over(socket.socket(fileno=args.fd), Command)
    unfit: ConfigError | None = None
    try:
        await asyncio.to_thread(check_folder, args.model)
        if args.server:
            await attach(Attached(args.server, args.bridge, tuple(args.event)), args.model, args.pool_fd, node)
        else:
            await asyncio.to_thread(installed_version, args.python)
            await _serve(args, folder, node)
    except* ConfigError as group:
        unfit = first_of(group)
    except* NodeLeft:
        log.info("the worker ended while the server started")
    if unfit is not None:
        log.error("vLLM does not serve this", setting=unfit.path, why=unfit.message)
        node.send(Unfit(unfit.path, unfit.message))
        # Until it has heard it: that this process ends would be the lesser news.
        async with asyncio.timeout(HEARD_S):
            while await node.receive() is not None:
                pass


async def _serve(args: argparse.Namespace, folder: Path, node: AsyncChannel[Command]) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(bridge_socket(folder)))
    listener.listen(1)
    listener.setblocking(False)
    pool_bytes = os.fstat(args.pool_fd).st_size
    shelf_fd = os.memfd_create("prfaas-shelf")
    os.ftruncate(shelf_fd, pool_bytes)
    adapter = Adapter(api_socket(folder), pool_bytes, node.send)
    words = command(args.python, args.model, folder, args.argument, args.network)
    more = surroundings(args.network, args.network_address)
    async with running(words, folder, more) as server, asyncio.TaskGroup() as group:
        ready = asyncio.Event()
        crew = [group.create_task(_watch(server, ready), name="server process")]
        # Also while the server starts, which takes minutes: an engine that says nothing is taken for stuck.
        crew.append(group.create_task(report(adapter, node), name="load"))
        orders = group.create_task(_obey(node, adapter, ready), name="orders")
        api = api_socket(folder)
        async with in_time():
            bridge = await Bridge.accept(listener, (args.pool_fd, shelf_fd), adapter.heard)
            await until_healthy(server, folder)
            served = await served_model(api)
        # Not before: of a server that ends while it starts the reason is told, and not that its connector is gone.
        crew.append(group.create_task(bridge.run(), name="bridge"))
        adapter.connect(bridge)
        geometry = bridge.hello.geometry
        info = await engine_info(args.model, geometry, served)
        if args.network:
            info = msgspec.structs.replace(info, capabilities=(*info.capabilities, f"{NETWORK}{args.network}"))
        crew.append(group.create_task(count(adapter, api), name="server counters"))
        if can_watch():
            book = PrefixBook(info.namespace, geometry)
            info = msgspec.structs.replace(info, capabilities=(*info.capabilities, *capabilities(book)))
            watching = watch_prefixes(endpoints(folder), book, node.send)
            crew.append(group.create_task(watching, name="server prefixes"))
        log.info("vLLM server is ready", vllm=bridge.hello.vllm, namespace=info.namespace)
        for untested in bridge.hello.untested:
            log.warning("no test runs this", setting=untested)
        ready.set()
        node.send(Ready(info))
        await orders
        for task in crew:
            task.cancel()


async def _obey(node: AsyncChannel[Command], adapter: Adapter, ready: asyncio.Event) -> None:
    """Until the node is gone. There are no orders before it has heard Ready."""
    while (order := await node.receive()) is not None:
        await ready.wait()
        adapter.handle(order)
    if not ready.is_set():
        raise NodeLeft


async def _watch(server: asyncio.subprocess.Process, ready: asyncio.Event) -> None:
    code = await server.wait()
    if not ready.is_set():
        raise ConfigError(ARGUMENTS, ended_early(code))
    raise PeerUnavailable(PEER, f"the server ended with {code}")


def main() -> None:
    args = _arguments()
    leave_signals_to_the_node()
    die_with_parent()
    configure("json")
    folder = Path(tempfile.mkdtemp(prefix="prfaas-vllm-", dir=_place(tempfile.gettempdir())))
    try:
        asyncio.run(serve(args, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place(temporary: str) -> str:
    """Where the folder may be: sockets in it, also those that vLLM names, have paths of 107 bytes at most."""
    return temporary if len(os.fsencode(temporary)) <= LONGEST_PLACE_BYTES else "/tmp"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prfaas.engine.vllm.process", description="The vLLM engine of a worker.")
    parser.add_argument("--fd", type=int, required=True, help="a connected Unix socket: the node")
    parser.add_argument("--pool-fd", type=int, required=True, help="the memfd of the pool")
    parser.add_argument("--model", type=_folder, required=True, help="a model folder")
    parser.add_argument("--python", default="python3", help="the Python that has vLLM")
    parser.add_argument("--argument", action="append", default=[], help="a word for the server, once for each")
    parser.add_argument("--server", default="", help="the address of a server that others start")
    parser.add_argument("--bridge", default="", help="the socket that its connector was given")
    parser.add_argument("--event", action="append", default=[], help="where it publishes and repeats its cache events")
    parser.add_argument("--network", choices=("", NIXL), default="", help="a network of the engines' own")
    parser.add_argument("--network-address", default="127.0.0.1:0", help="where others of the region ask the server")
    return parser.parse_args()


def _folder(path: str) -> Path:
    return Path(path).resolve()


if __name__ == "__main__":
    main()
