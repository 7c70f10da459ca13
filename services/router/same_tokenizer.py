"""The part of the cluster whose token ids mean what this router takes them to mean.

A router tokenizes for the workers. A worker with another tokenizer would answer, but to other words: to this router it
does not exist. One that does not say what tokenizer it has is believed.
"""

from collections.abc import Callable
from dataclasses import replace

import structlog

from prfaas.cluster import ClusterView, NodeId

log = structlog.get_logger()


class SameTokenizer:
    """`view` without the nodes whose tokenizer has another digest; `others` are those, in order of their ids."""

    def __init__(self, view: Callable[[], ClusterView], digest: str) -> None:
        self._view, self._digest = view, digest
        self._seen: ClusterView | None = None
        self._shown = ClusterView()
        self.others: tuple[NodeId, ...] = ()

    def __call__(self) -> ClusterView:
        view = self._view()
        if view is not self._seen:
            self._seen, self._shown = view, self._without_others(view)
        return self._shown

    def _without_others(self, view: ClusterView) -> ClusterView:
        others = {node.id for node in view.nodes.values() if node.tokenizer not in ("", self._digest)}
        if new := others.difference(self.others):
            log.error("workers have another tokenizer than this router", nodes=sorted(new))
        self.others = tuple(sorted(others))
        if not others:
            return view
        return replace(
            view,
            nodes={name: node for name, node in view.nodes.items() if name not in others},
            remote_prefill=[name for name in view.remote_prefill if name not in others],
            local_prefill=[name for name in view.local_prefill if name not in others],
            decode=[name for name in view.decode if name not in others],
        )
