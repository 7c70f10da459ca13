"""Restores a span in a process of its own and prints the outputs of its decode steps as JSON. Run by a test."""

import json
import sys
from pathlib import Path

from prfaas.engine.loading import load_engine
from tests.integration.engine.engine_scenes import decode, restore

model_dir, span, tokens, token_id, steps = sys.argv[1:]
engine = load_engine(Path(model_dir))
cache = restore(engine, bytearray(Path(span).read_bytes()), int(tokens))
outputs = decode(engine, cache, int(token_id), int(steps))
json.dump([engine.info.namespace, [(output.token_id, output.top_logits) for output in outputs]], sys.stdout)
