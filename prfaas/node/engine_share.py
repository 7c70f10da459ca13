"""How an engine divides its time between decode steps and prefill chunks while there is work of both kinds. Pure."""

import math

#: No kind of work gets less, whatever the role: what falls back to a node that only decodes, or is left on one that
#: only prefills, still comes to its end.
LEAST_SHARE = 0.1


class TimeShare:
    """Weighted turns: the kind that has had less of its share is due. Time in which only one kind had work counts for
    neither, so that nobody saves up a claim. Without a share, the kinds take turns."""

    def __init__(self, prefill_share: float | None = None) -> None:
        self._prefill_share: float | None = None
        self._prefill_due = False
        #: Seconds that decode has had beyond its share, weighed; above 0 prefill is due.
        self._ahead_s = 0.0
        self.set(prefill_share)

    def set(self, prefill_share: float | None) -> None:
        if prefill_share is not None:
            prefill_share = 0.5 if math.isnan(prefill_share) else min(1 - LEAST_SHARE, max(LEAST_SHARE, prefill_share))
        self._prefill_share, self._ahead_s = prefill_share, 0.0

    @property
    def prefill_due(self) -> bool:
        """What to do next when both kinds wait. Decode comes first where nothing has been done."""
        return self._prefill_due if self._prefill_share is None else self._ahead_s > 0

    def decoded(self, seconds: float) -> None:
        """A step took so long while a prefill waited."""
        self._prefill_due = True
        if self._prefill_share is not None:
            self._ahead_s += seconds * self._prefill_share

    def prefilled(self, seconds: float) -> None:
        """A chunk took so long while sequences waited for their next step."""
        self._prefill_due = False
        if self._prefill_share is not None:
            self._ahead_s -= seconds * (1 - self._prefill_share)

    def alone(self) -> None:
        """Only one kind has work."""
        self._ahead_s, self._prefill_due = 0.0, False
