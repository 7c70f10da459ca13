"""When it is not worth starting a process once more."""

from collections import Counter
from collections.abc import Iterable

#: Who has run for less ended as soon as it was started; so many times in a row, it is not worth another start.
WORTH_A_RESTART_S, MAX_ENDS_AT_ONCE = 5.0, 3


class Restarts:
    """Times are in monotonic seconds. All `names` were started at `now`."""

    def __init__(self, names: Iterable[str], now: float) -> None:
        self._started_at = dict.fromkeys(names, now)
        self._at_once: Counter[str] = Counter()

    def started(self, name: str, now: float) -> None:
        self._started_at[name] = now

    def worth_another(self, name: str, now: float) -> bool:
        """To be asked once each time that it has ended."""
        ran_s = now - self._started_at[name]
        self._at_once[name] = self._at_once[name] + 1 if ran_s < WORTH_A_RESTART_S else 0
        return self._at_once[name] < MAX_ENDS_AT_ONCE
