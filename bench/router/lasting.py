"""What only shows with many requests, or with many streams at once: memory, order, and streams that wait."""

import asyncio
import json
import resource
import statistics
import subprocess
import threading
from pathlib import Path

from bench.router.harness import Harness
from bench.router.model import NAME
from bench.router.ours import BARE, PLAIN, Running, running
from bench.router.process import cpu_s, memory_mb
from bench.router.results import Row
from bench.router.watching import Expected, Stream, opened, read_whole
from prfaas.tokenizer.text import load_tokenizer

#: As in the harness's scenarios.
ORDER_STREAMS, ORDER_TOKENS, ORDER_PACE_US = 512, 60, 50_000
IDLE_TOKENS, IDLE_PACE_US, IDLE_HOLD_S, OPENING_AT_ONCE = 20, 100_000, 15.0, 64
MEMORY_CONNECTIONS, MEMORY_LIMIT_S = 256, 1800
FILES = 16_384


def memory(harness: Harness, model: Path, requests: int) -> Row:
    """Short requests on many connections, without an index of caches; memory once a second."""
    body = harness.build / "memory.json"
    words = "VARYVARYVARYVARY Say hello to the nice people of the town."
    message = {"role": "user", "content": words}
    body.write_text(json.dumps({"model": NAME, "messages": [message], "max_tokens": 4}))
    whole, own = list[float](), list[float]()
    with running(BARE, model, harness.build / "memory.log") as router:
        cpu_before = cpu_s(router.router_pid)
        over = threading.Event()
        sampler = threading.Thread(target=_sample, args=(router.router_pid, over, whole, own))
        sampler.start()
        command = [str(harness.load_generator()), "--port", str(router.port), "--body", str(body), "--vary"]
        command += ["-c", str(MEMORY_CONNECTIONS), "-n", str(requests), "-d", str(MEMORY_LIMIT_S), "-w", "0"]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        over.set()
        sampler.join()
        cpu, resident_mb = cpu_s(router.router_pid) - cpu_before, memory_mb(router.router_pid, "Rss")
    return Row(
        target=BARE.name,
        scenario="memory",
        cpu_us_per_request=round(1e6 * cpu / max(1, found["comp"]), 1),
        rss_mb=round(max(whole), 1),
        errors=found["errs"] + found["unfinished"],
        more={
            "requests": found["comp"],
            "growth_mb": round(growth_mb(own), 2),
            "resident_mb": round(resident_mb, 1),
        },
    )


def growth_mb(samples: list[float]) -> float:
    """How much more there is in the last tenth than in the tenth after the middle; medians, as memory comes and goes
    by pages."""
    tenth = max(1, len(samples) // 10)
    middle = len(samples) // 2
    return statistics.median(samples[-tenth:]) - statistics.median(samples[middle : middle + tenth])


def _sample(pid: int, over: threading.Event, whole: list[float], own: list[float]) -> None:
    """`own` leaves out mapped files, whose share depends on who else maps them."""
    while True:
        whole.append(memory_mb(pid))
        own.append(memory_mb(pid, "Pss_Anon"))
        if over.wait(1.0):
            return


def order(harness: Harness, model: Path) -> Row:
    """As many streams and events as in the harness's largest scenario, every token of each compared."""
    expected = Expected(load_tokenizer(model))
    with running(PLAIN, model, harness.build / "order.log") as router:
        wrong = asyncio.run(_read_many(router, expected))
    return Row(
        target=PLAIN.name,
        scenario="order",
        errors=len(wrong),
        more={"streams": ORDER_STREAMS, "tokens": ORDER_STREAMS * ORDER_TOKENS},
    )


async def _read_many(router: Running, expected: Expected) -> list[str]:
    reading = []
    for number in range(ORDER_STREAMS):
        reading.append(
            asyncio.create_task(read_whole(router.port, expected, number, ORDER_TOKENS, ORDER_PACE_US), name="stream")
        )
        await asyncio.sleep(0.003)
    return [wrong for wrong in await asyncio.gather(*reading) if wrong]


def idle(harness: Harness, model: Path, streams: int) -> Row:
    """Streams that have had their first token and then nothing, until all go on and end."""
    raise_file_limit(2 * streams + 256)
    expected = Expected(load_tokenizer(model))
    with running(PLAIN, model, harness.build / "idle.log") as router:
        return asyncio.run(_hold(router, expected, streams))


async def _hold(router: Running, expected: Expected, count: int) -> Row:
    before_mb = memory_mb(router.router_pid)
    router.pause()
    gate = asyncio.Semaphore(OPENING_AT_ONCE)

    async def begun(number: int) -> Stream:
        async with gate:
            stream = await opened(router.port, expected, number, IDLE_TOKENS, IDLE_PACE_US)
            await stream.first()
            return stream

    held = await asyncio.gather(*(begun(number) for number in range(count)), return_exceptions=True)
    streams = [stream for stream in held if isinstance(stream, Stream)]
    held_mb, cpu_before = memory_mb(router.router_pid), cpu_s(router.router_pid)
    await asyncio.sleep(IDLE_HOLD_S)
    idle_cores = (cpu_s(router.router_pid) - cpu_before) / IDLE_HOLD_S
    router.go_on()
    await asyncio.gather(*(stream.rest() for stream in streams), return_exceptions=True)
    right = sum(1 for stream in streams if not stream.wrong and stream.seen == IDLE_TOKENS)
    return Row(
        target=PLAIN.name,
        scenario="idle",
        rss_mb=round(held_mb, 1),
        errors=count - right,
        more={
            "streams": len(streams),
            "kb_per_stream": round(1024 * (held_mb - before_mb) / max(1, len(streams)), 1),
            "idle_cores": round(idle_cores, 3),
        },
    )


def raise_file_limit(wanted: int = FILES) -> None:
    """Children inherit it. Up to the hard limit, or beyond where we may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, wanted)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except ValueError:
            wanted = hard
        else:
            return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
