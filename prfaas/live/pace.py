"""How fast each kind of hardware has turned out to be: the profiles given, corrected by what nodes report."""

from dataclasses import replace
from types import MappingProxyType

from prfaas.cluster import ClusterView, Node, NodeId, Role
from prfaas.flows.ports import PrefillReport
from prfaas.request import Request
from prfaas.scheduling.calibration import CalibratedPrefill, PrefillCalibration, PrefillObservation
from prfaas.scheduling.rule import Profiles

#: Observations between two fits of one kind of hardware.
FIT_EVERY = 16


class Pace:
    """Only prefills of nodes that do nothing else are used: on a mixed node the time from the first chunk to the last
    has decode steps in it."""

    def __init__(self, profiles: Profiles) -> None:
        self._given = profiles
        self.profiles = profiles
        self._calibrations = {name: PrefillCalibration(profile.prefill) for name, profile in profiles.items()}
        self._unfitted = dict.fromkeys(profiles, 0)
        self._roles: dict[NodeId, tuple[int, Role]] = {}

    def seen(self, view: ClusterView) -> None:
        """A node that is new, has restarted or has changed its role is cold."""
        before, self._roles = self._roles, {name: (node.incarnation, node.role) for name, node in view.nodes.items()}
        for name, life in self._roles.items():
            calibration = self._calibrations.get(view.nodes[name].hardware)
            if calibration is not None and before.get(name) != life:
                calibration.started(name)
        for name in before.keys() - self._roles.keys():
            for calibration in self._calibrations.values():
                calibration.left(name)

    def prefilled(self, node: Node, request: Request, report: PrefillReport) -> None:
        calibration = self._calibrations.get(node.hardware)
        if calibration is None or node.role is not Role.PREFILL:
            return
        total = request.handoff_tokens
        calibration.observe(node.id, PrefillObservation(total, total - report.prefill_tokens, report.compute_s))
        self._unfitted[node.hardware] += 1
        if self._unfitted[node.hardware] >= FIT_EVERY:
            self._unfitted[node.hardware] = 0
            self._fit(node.hardware, calibration)

    def _fit(self, hardware: str, calibration: PrefillCalibration) -> None:
        match calibration.fit():
            case CalibratedPrefill(curve=curve):
                corrected = replace(self._given[hardware], prefill=curve)
                self.profiles = MappingProxyType({**self.profiles, hardware: corrected})
