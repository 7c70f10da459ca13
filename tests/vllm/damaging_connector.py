"""Our connector, for a server whose answers must be wrong: what it has loaded becomes zeros, of the kind that a file
names.

It touches the server's own cache after a load and before the forward that reads it, so that all the way there is as
always. The file is empty as long as nothing is to be damaged.
"""

import os
from pathlib import Path
from typing import Any

from prfaas.engine.vllm import connector
from prfaas.engine.vllm.books import Load

FILE = "TEST_DAMAGE_FILE"


class PrfaasConnector(connector.PrfaasConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._caches, self._loads = kv_caches, dict[str, Load]()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._loads |= {load.request: load for load in connector_metadata.orders.loads}

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        kind = Path(os.environ[FILE]).read_text()
        for request in results.finished_recving:
            self._zero(self._loads.pop(request), kind)
        return results

    def _zero(self, load: Load, kind: str) -> None:
        for layer in self._geometry.layers:
            if layer.tensor.kind.value == kind:
                blocks = load.blocks[layer.group]
                loaded = blocks[load.start // layer.block_tokens :] if layer.grows else blocks[-1:]
                self._caches[layer.name][list(loaded)] = 0
