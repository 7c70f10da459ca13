"""What a model folder holds, for processes that keep its KV and never compute: `python -m prfaas.engine.describe
--model DIR` writes it as JSON to its output.

A process of its own, because reading a transformers configuration takes torch along, which nobody else shall load.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from prfaas.cluster import Namespace
from prfaas.engine.loading import COST_MODEL, model_type, stay_offline
from prfaas.errors import ConfigError
from prfaas.kvcache.layout import KvLayout
from prfaas.process import die_with_parent


class Description(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """As the engine of that folder says of itself."""

    model: str
    namespace: Namespace
    layout: KvLayout


class Unusable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The folder holds no model that we can run: the facts of a ConfigError."""

    path: str
    message: str


def describe(model_dir: Path) -> Description:
    """Without loading any weights. Raises ConfigError."""
    if model_type(model_dir) == COST_MODEL:
        from prfaas.engine.cost_model import CostModelEngine

        info = CostModelEngine(model_dir).info
        return Description(model=info.model, namespace=info.namespace, layout=info.layout)
    stay_offline()
    from transformers import AutoConfig

    from prfaas.engine.hf import identify

    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    layout, namespace = identify(model_dir, config)
    return Description(model=model_dir.resolve().name, namespace=namespace, layout=layout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="prfaas.engine.describe", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    args = parser.parse_args()
    die_with_parent()
    try:
        answer: Description | Unusable = describe(args.model)
    except ConfigError as error:
        answer = Unusable(path=error.path, message=error.message)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
