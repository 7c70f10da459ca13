"""What `prfaas up --engine vllm` asks and settles before it starts anything.

A server takes minutes to start: a Python without vLLM, a folder without a model are told at once.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

import click

from prfaas.engine.vllm.installation import device_of, installed_version
from prfaas.engine.vllm.model_folder import check_folder
from services.local_cluster import VISIBLE, Plan, Vllm

#: Made by `make vllm-venv`.
OURS = Path(".venv-vllm/bin/python")
#: Of a server on a CPU, before what is given: it would compile for minutes, and take most of the machine's memory.
ON_CPU = ("--enforce-eager", "--kv-cache-memory-bytes", str(1 << 30))


def prepared(plan: Plan, python: str | None, arguments: tuple[str, ...]) -> Plan:
    """With vLLM servers for its workers. Raises ConfigError."""
    servers = plan.prefill_workers + len(plan.pd_roles)
    vllm = prepare(python, arguments, plan.model_dir, servers)
    click.echo(f"starting {servers} vLLM servers, which takes minutes", err=True)
    return replace(plan, vllm=vllm)


def prepare(python: str | None, arguments: tuple[str, ...], model_dir: Path, servers: int) -> Vllm:
    """For so many servers on this machine. Raises ConfigError."""
    check_folder(model_dir)
    python = python or (str(OURS.absolute()) if OURS.exists() else "python3")
    installed_version(python)
    if device_of(python) == "cpu":
        share_cpus(os.environ, servers)
        return Vllm(python=python, arguments=(*ON_CPU, *arguments))
    return Vllm(python=python, arguments=arguments, devices=listed(os.environ))


def share_cpus(surroundings: MutableMapping[str, str], servers: int) -> None:
    """Servers that are left alone each bind a thread to every core."""
    surroundings.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    surroundings.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // servers)))


def listed(surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """GPUs that this process was given by name; none when it was given all."""
    return tuple(name.strip() for name in surroundings.get(VISIBLE, "").split(",") if name.strip())
