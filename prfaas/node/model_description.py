"""What a model folder holds, asked of a process that may load what it takes to know."""

import asyncio
import sys
from pathlib import Path

import msgspec

from prfaas.engine.describe import Description, Unusable
from prfaas.errors import ConfigError, DeadlineExceeded
from prfaas.process import ended

#: Hashing the weights of a large model takes a while.
DESCRIBE_S = 1800.0
STOP_GRACE_S = 2.0

_decoder = msgspec.json.Decoder(Description | Unusable)


async def describe_model(model_dir: Path) -> Description:
    """Raises ConfigError for a folder without a model that we can run."""
    command = (sys.executable, "-m", "prfaas.engine.describe", "--model", str(model_dir))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DESCRIBE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise DeadlineExceeded("reading the model folder", DESCRIBE_S) from None
    finally:
        if process.returncode is None:
            process.kill()
            await ended(process, STOP_GRACE_S)
    try:
        answer = _decoder.decode(output)
    except msgspec.MsgspecError as error:
        raise ConfigError("pool.model_dir", f"{model_dir} cannot be read as a model") from error
    if isinstance(answer, Unusable):
        raise ConfigError(answer.path, answer.message)
    return answer
