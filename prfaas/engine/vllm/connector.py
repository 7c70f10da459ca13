"""The KV connector that a vLLM server loads: `kv_connector_module_path` is this module.

One instance in the server's scheduler keeps the books, one in its worker does the copies. It carries nothing between
machines: the worker's pump does. Besides vLLM and torch it needs no package that vLLM does not itself need, and no
generated code, so that it runs beside any version of them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from prfaas.engine.vllm.books import Books, Orders, Scheduled
from prfaas.engine.vllm.bridge import Hello
from prfaas.engine.vllm.compatibility import findings
from prfaas.engine.vllm.copies import Copies
from prfaas.engine.vllm.describe_cache import describe, rows_of, states_of
from prfaas.engine.vllm.read_facts import facts_of
from prfaas.engine.vllm.refuse import Unsupported, refusals_told
from prfaas.engine.vllm.rule import Verdict
from prfaas.engine.vllm.wish import wish_of


@dataclass
class StepOrders(KVConnectorMetadata):
    orders: Orders = field(default_factory=Orders)


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):
    """`kv_connector_extra_config`: `bridge`, the Unix socket of the worker's engine process; `stays`, whether the
    server goes on without a worker and takes the next one."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._bridge: str = self._kv_transfer_config.kv_connector_extra_config.get("bridge", "")
        if not self._bridge:
            raise ValueError("kv_connector_extra_config needs `bridge`, the socket at which a worker waits")
        with refusals_told(self._bridge):
            facts = facts_of(vllm.__version__, vllm_config, kv_cache_config)
            if refused := findings(facts, Verdict.REFUSED):
                raise Unsupported.because(refused)
            self._geometry = describe(kv_cache_config)
        self._untested = tuple(map(str, findings(facts, Verdict.UNTESTED)))
        self._books = Books()
        self._copies: Copies | None = None
        self._received: set[str] = set()
        self._failed: set[str] = set()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A graph of the whole step would leave out what is copied after each layer."""
        return True

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        if wish := wish_of(request.kv_transfer_params):
            self._books.add(request.request_id, wish, request.num_prompt_tokens)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._books.loadable(request.request_id, num_computed_tokens)
        return tokens, tokens > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._books.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        counts, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        new = [
            Scheduled(each.req_id, each.block_ids, True, each.num_computed_tokens, counts[each.req_id])
            for each in scheduler_output.scheduled_new_reqs
        ]
        old = [
            Scheduled(request, blocks, request in cached.resumed_req_ids, computed, counts[request])
            for request, blocks, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        return StepOrders(self._books.step([*new, *old]))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """All that was to be copied was copied within its step: the blocks are free."""
        self._books.finished(request.request_id)
        return False, None

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = self._vllm_config.compilation_config.static_forward_context
        with refusals_told(self._bridge):
            rows, states = rows_of(self._geometry, kv_caches, layers), states_of(self._geometry, kv_caches)
        stays = self._kv_transfer_config.kv_connector_extra_config.get("stays")
        self._copies = Copies(
            self._bridge,
            Hello(self._geometry, vllm.__version__, str(self._vllm_config.model_config.model), self._untested),
            rows,
            states,
            # A server that a worker has started serves nobody without it, and holds the machine's memory.
            None if stays else lambda: os._exit(0),
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(self._orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        received, failed = self._worker.load(self._orders)
        self._received |= received
        self._failed |= failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.layer_done(layer_name, self._orders)

    def wait_for_save(self) -> None:
        if self.has_connector_metadata():
            self._worker.end(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults(set(), self._received, self._failed)
        self._received, self._failed = set(), set()
        return results

    @property
    def _worker(self) -> Copies:
        assert self._copies is not None, "caches are registered before the first step"
        return self._copies

    @property
    def _orders(self) -> Orders:
        step = self._get_connector_metadata()
        assert isinstance(step, StepOrders)
        return step.orders
