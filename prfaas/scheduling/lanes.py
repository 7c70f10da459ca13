"""What the settings alone say of prefilling on one kind of hardware for a decode node in some region. Worked out once
for many requests: settings change once a report, requests come by the hundred.
"""

from collections.abc import Mapping
from typing import NamedTuple

from prfaas.cluster import LinkState, RegionId
from prfaas.profile import DecodeProfile, Profile
from prfaas.remembered import Remembered
from prfaas.scheduling.readings import known

#: Source and target.
Pair = tuple[RegionId, RegionId]
#: By the hardware that a node names.
Profiles = Mapping[str, Profile]


class Lane(NamedTuple):
    """From nodes of one hardware and region into a region. `bytes_per_s` None: nothing is known of the link."""

    profile: Profile
    state_bytes: float
    bytes_per_s: float | None
    queued_bytes: int
    rtt_s: float
    #: What a waiting token takes if those who wait are like the others of that class. None: like the request itself.
    queue_s_per_token: float | None
    #: The curves at lengths that are asked for again and again: those of cached prefixes.
    prefill_s: Remembered[float, float]
    kv: Remembered[float, float]

    def kv_bytes(self, total_tokens: int, cached_tokens: int) -> float:
        """As the profile has it, a look at the curve less."""
        return self.profile.kv(total_tokens) - (self.kv[cached_tokens] - self.state_bytes)


class Landing(NamedTuple):
    """Decode nodes of one hardware in one region. `s_per_byte`: of the slowest link into it, 0 where none is known."""

    profile: Profile
    decode: DecodeProfile | None
    s_per_byte: float
    state_bytes: float
    #: As of a lane.
    kv: Remembered[float, float]

    def link_s(self, total_tokens: int, cached_tokens: int) -> float:
        """What is missing takes so long."""
        if not self.s_per_byte:
            return 0.0
        return (self.profile.kv(total_tokens) - (self.kv[cached_tokens] - self.state_bytes)) * self.s_per_byte


class Lanes:
    __slots__ = ("_landings", "_lanes", "_links", "_profiles", "_rtt_s", "_usual")

    def __init__(
        self,
        profiles: Profiles,
        links: Mapping[Pair, LinkState],
        rtt_s: Mapping[Pair, float],
        short_tokens: float | None,
        long_tokens: float | None,
    ) -> None:
        self._profiles, self._links, self._rtt_s = profiles, links, rtt_s
        #: By whether the prefill node is in another region.
        self._usual = {False: known(short_tokens), True: known(long_tokens)}
        self._lanes: dict[tuple[str, RegionId, RegionId], Lane] = {}
        self._landings: dict[tuple[str, RegionId], Landing] = {}

    def lane(self, hardware: str, source: RegionId, target: RegionId) -> Lane | None:
        """None without a profile of the hardware."""
        key = (hardware, source, target)
        if (found := self._lanes.get(key)) is None and (profile := self._profiles.get(hardware)) is not None:
            link, usual = self._links.get((source, target)), self._usual[source != target]
            found = self._lanes[key] = Lane(
                profile=profile,
                state_bytes=profile.kv(0),
                bytes_per_s=self.link_bytes_per_s(source, target),
                queued_bytes=0 if link is None else link.queued_bytes,
                rtt_s=self.link_rtt_s(source, target),
                queue_s_per_token=None if usual is None else queue_s_per_token(profile, usual),
                prefill_s=Remembered(profile.prefill),
                kv=Remembered(profile.kv),
            )
        return found

    def check(self) -> None:
        for lane in self._lanes.values():
            lane.prefill_s.check()
            lane.kv.check()
        for landing in self._landings.values():
            landing.kv.check()

    def link_bytes_per_s(self, source: RegionId, target: RegionId) -> float | None:
        link = self._links.get((source, target))
        return None if link is None else known(link.capacity_bytes_per_s)

    def link_rtt_s(self, source: RegionId, target: RegionId) -> float:
        """As configured, else as measured, else none."""
        configured, link = self._rtt_s.get((source, target)), self._links.get((source, target))
        measured = None if link is None else known(link.rtt_s)
        return configured if configured is not None else measured or 0.0

    def landing(self, hardware: str, region: RegionId) -> Landing | None:
        """None without a profile of the hardware."""
        key = (hardware, region)
        if (found := self._landings.get(key)) is None and (profile := self._profiles.get(hardware)) is not None:
            into = (known(link.capacity_bytes_per_s) for link in self._links.values() if link.target == region)
            rates = [rate for rate in into if rate is not None]
            s_per_byte = 1 / max(min(rates), 1.0) if rates else 0.0
            found = self._landings[key] = Landing(
                profile, profile.decode, s_per_byte, profile.kv(0), Remembered(profile.kv)
            )
        return found


def queue_s_per_token(profile: Profile, usual_tokens: float) -> float:
    """Of prompts of that length."""
    tokens = max(1.0, usual_tokens)
    return profile.prefill_s(tokens) / tokens
