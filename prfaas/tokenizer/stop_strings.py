"""Stop strings in text that arrives in pieces.

The text ends before the stop string that is complete first; of two that end together, the longer one. Text is held back
only while it may still be the beginning of a stop string. Neither depends on where the pieces are cut, and the cost is
linear (Knuth-Morris-Pratt, one state per stop string).
"""

from collections.abc import Sequence
from typing import NamedTuple


class Passed(NamedTuple):
    """Text that may be shown, and whether a stop string followed it."""

    text: str
    stopped: bool = False


class StopStrings:
    """The state of one text. After `stopped`, nothing may be pushed."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in stops)
        #: How many characters of each stop string the end of the text matches.
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> Passed:
        if not self._stops:
            return Passed(text)
        text = self._held + text
        for end in range(len(self._held), len(text)):
            if length := self._advance(text[end]):
                self._held = ""
                return Passed(text[: end + 1 - length], stopped=True)
        passed = len(text) - max(self._matched)
        self._held = text[passed:]
        return Passed(text[:passed])

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Take one character; the length of the longest stop string that is complete with it, or 0."""
        complete = 0
        for index, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                complete = max(complete, matched)
            self._matched[index] = matched
        return complete


def _borders(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    matched = 0
    for index in range(1, len(stop)):
        while matched and stop[matched] != stop[index]:
            matched = borders[matched - 1]
        matched += stop[matched] == stop[index]
        borders[index] = matched
    return tuple(borders)
