"""How long tokens were apart: a histogram of the times between two tokens of a sequence, as the engine made them."""

#: Finer than any figure that is reported.
BIN_S = 1e-4


class StepTimes:
    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}

    def add(self, seconds: float, tokens: int) -> None:
        """So many tokens came this long after the one before."""
        if tokens > 0:
            place = round(seconds / BIN_S)
            self._tokens[place] = self._tokens.get(place, 0) + tokens

    def clear(self) -> None:
        self._tokens.clear()

    @property
    def total(self) -> int:
        return sum(self._tokens.values())

    def quantile_s(self, q: float) -> float | None:
        """The time that a share `q` of the tokens did not exceed."""
        wanted, seen = q * self.total, 0
        for place in sorted(self._tokens):
            seen += self._tokens[place]
            if seen >= wanted:
                return place * BIN_S
        return None
