"""How fast each kind of hardware has turned out to be: the profiles given, corrected by what nodes report."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from prfaas.cluster import ClusterView, Node, NodeId, Role
from prfaas.flows.ports import PrefillReport
from prfaas.profile import Profile
from prfaas.request import Request
from prfaas.scheduling.calibration import (
    CalibratedDecode,
    CalibratedPrefill,
    DecodeCalibration,
    PrefillCalibration,
    PrefillObservation,
    StepObservation,
)
from prfaas.scheduling.rule import Profiles

#: Observations between two fits of one kind of hardware.
FIT_EVERY = 16
#: What nodes count of their decode steps.
STEPS, SEQUENCES, MICROSECONDS = "decode_steps", "decode_step_sequences", "decode_step_microseconds"


class Pace:
    """Only prefills of nodes that do nothing else are used: on a mixed node the time from the first chunk to the last
    has decode steps in it. Decode steps are timed one by one, so those of all nodes are."""

    def __init__(self, profiles: Profiles) -> None:
        self.profiles = profiles
        self._prefills = {name: PrefillCalibration(profile.prefill) for name, profile in profiles.items()}
        self._decodes = {name: DecodeCalibration(each.decode) for name, each in profiles.items() if each.decode}
        self._unfitted_prefills, self._unfitted_steps = dict.fromkeys(profiles, 0), dict.fromkeys(profiles, 0)
        #: The counters of each node's steps, as it last reported them in this life and role.
        self._counted: dict[NodeId, tuple[int, int, int]] = {}
        self._roles: dict[NodeId, tuple[int, Role]] = {}

    def seen(self, view: ClusterView) -> None:
        """A node that is new, has restarted or has changed its role is cold."""
        before, self._roles = self._roles, {name: (node.incarnation, node.role) for name, node in view.nodes.items()}
        for name, life in self._roles.items():
            if before.get(name) != life:
                self._counted.pop(name, None)
                for calibration in self._of(view.nodes[name].hardware):
                    calibration.started(name)
        for name in before.keys() - self._roles.keys():
            self._counted.pop(name, None)
            for hardware in self._prefills:
                for calibration in self._of(hardware):
                    calibration.left(name)

    def prefilled(self, node: Node, request: Request, report: PrefillReport) -> None:
        calibration = self._prefills.get(node.hardware)
        if calibration is None or node.role is not Role.PREFILL:
            return
        total = request.handoff_tokens
        calibration.observe(node.id, PrefillObservation(total, total - report.prefill_tokens, report.compute_s))
        if self._due(self._unfitted_prefills, node.hardware):
            match calibration.fit():
                case CalibratedPrefill(curve=curve):
                    self._correct(replace(self.profiles[node.hardware], prefill=curve), node.hardware)

    def decoded(self, node: Node, counters: Mapping[str, int]) -> None:
        """What a node has counted since it started. The steps since its last report are one observation."""
        calibration = self._decodes.get(node.hardware)
        if calibration is None:
            return
        counted = (counters.get(STEPS, 0), counters.get(SEQUENCES, 0), counters.get(MICROSECONDS, 0))
        before, self._counted[node.id] = self._counted.get(node.id), counted
        if before is None or counted[0] <= before[0]:
            return
        steps, sequences, microseconds = (now - then for now, then in zip(counted, before, strict=True))
        calibration.observe(node.id, StepObservation(sequences / steps, microseconds / steps / 1e6))
        if self._due(self._unfitted_steps, node.hardware):
            match calibration.fit():
                case CalibratedDecode(decode=decode):
                    self._correct(replace(self.profiles[node.hardware], decode=decode), node.hardware)

    def _of(self, hardware: str) -> list[PrefillCalibration | DecodeCalibration]:
        found = (self._prefills.get(hardware), self._decodes.get(hardware))
        return [calibration for calibration in found if calibration is not None]

    def _due(self, unfitted: dict[str, int], hardware: str) -> bool:
        unfitted[hardware] += 1
        if unfitted[hardware] < FIT_EVERY:
            return False
        unfitted[hardware] = 0
        return True

    def _correct(self, profile: Profile, hardware: str) -> None:
        self.profiles = MappingProxyType({**self.profiles, hardware: profile})
