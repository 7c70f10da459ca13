"""What the machine allows on loopback: iperf3, and a C loop over blocking sockets."""

import json
import os
import subprocess
import time
from pathlib import Path

from bench.transport.fetch import Fetched
from bench.transport.rate import Rate
from tools.wan.build import compiled
from tools.wan.rig import Wan

_PORT = 5999
_BLOCK_KIB, _TOTAL_MIB = 1024, 2048
_RUN_S = 1
_LIMIT_S = 60.0


def iperf3(wan: Wan, iperf: Fetched, connections: int) -> Rate:
    """Blocks of 1 MiB for a second."""
    environment = os.environ | iperf.environment
    server = subprocess.Popen(
        wan.command("a", [iperf.program, "-s", "-1", "-p", str(_PORT), "--forceflush"]),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise RuntimeError("iperf3 does not listen")
        time.sleep(0.05)
        argv = [
            iperf.program,
            "-c",
            "127.0.0.1",
            "-p",
            str(_PORT),
            "-P",
            str(connections),
            "-t",
            str(_RUN_S),
            "-l",
            "1M",
            "-J",
        ]
        done = subprocess.run(
            wan.command("a", argv), env=environment, capture_output=True, text=True, check=True, timeout=_LIMIT_S
        )
        server.communicate(timeout=_LIMIT_S)
    finally:
        server.kill()
        server.wait()
    end = json.loads(done.stdout)["end"]
    gbytes_per_s = end["sum_received"]["bits_per_second"] / 8e9
    cpu = end["cpu_utilization_percent"]
    return Rate(gbytes_per_s, (cpu["host_total"] + cpu["remote_total"]) / 100 / gbytes_per_s)


def c_loop(wan: Wan, connections: int) -> Rate:
    program = compiled(Path(__file__).with_name("loop.c"), "-pthread")
    argv = [str(program), str(connections), str(_BLOCK_KIB), str(_TOTAL_MIB)]
    done = subprocess.run(wan.command("a", argv), capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    return Rate(**json.loads(done.stdout))
