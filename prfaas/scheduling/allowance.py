"""What one tenant may use: a rate of requests, a rate of tokens, and so many sequences at once.

Limits are the cluster's. Each of its `parts` routers grants an equal part and knows nothing of what the others grant. A
bucket holds one minute's part. What costs more than that, but no more than the whole limit, is let in when the bucket
is full and leaves a debt, so that a part never makes impossible what the limit allows; over any longer time the rate
holds all the same.
"""

from dataclasses import dataclass

#: Of rounding: a caller that comes back when it was told must not be a millionth of a token too early.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """None: no limit of the tenant's own. Of what all tenants want at once, each gets by its `weight`."""

    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    max_concurrent: int | None = None
    weight: float = 1.0
    parts: int = 1

    @property
    def concurrent(self) -> int | None:
        """Of this process; never less than one, with however many others."""
        return None if self.max_concurrent is None else max(1, self.max_concurrent // self.parts)


UNLIMITED = Quota()


class Bucket:
    """A token bucket. `now` may stand still, but does not run backwards."""

    def __init__(self, limit_per_min: float, parts: int, now: float) -> None:
        self.limit, self.capacity, self._at = limit_per_min, limit_per_min / parts, now
        self.level = self.capacity

    @property
    def per_s(self) -> float:
        return self.capacity / 60

    def resize(self, limit_per_min: float, parts: int, now: float) -> None:
        """Another limit from now on; what was used of the old one stays used."""
        used = self.capacity - self.refilled(now)
        self.limit, self.capacity = limit_per_min, limit_per_min / parts
        self.level = max(self.capacity - used, self.capacity - self.limit)

    def refilled(self, now: float) -> float:
        """The level by now."""
        self.level = min(self.capacity, self.level + self.per_s * max(0.0, now - self._at))
        self._at = max(self._at, now)
        return self.level

    def wait_s(self, amount: float, now: float) -> float:
        """How long until `amount` can be taken, if nobody else takes any; 0 when it can be now."""
        missing = min(amount, self.capacity) - self.refilled(now)
        return missing / self.per_s if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        self.level -= amount

    def give_back(self, amount: float) -> None:
        self.level = min(self.capacity, self.level + amount)

    def check(self) -> None:
        assert self.capacity - self.limit - 1e-3 <= self.level <= self.capacity


class Account:
    """What one tenant has used. `held` are its sequences that run or wait."""

    def __init__(self, quota: Quota, now: float) -> None:
        self.held = 0
        self.quota = UNLIMITED
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.follow(quota, now)

    def follow(self, quota: Quota, now: float) -> None:
        """The quota in force; a bucket whose limit stays stays as full as it is."""
        if quota != self.quota:
            self.requests = _fitted(self.requests, quota.requests_per_min, quota.parts, now)
            self.tokens = _fitted(self.tokens, quota.tokens_per_min, quota.parts, now)
            self.quota = quota

    def take(self, tokens: int, sequences: int) -> None:
        if self.requests is not None:
            self.requests.take(1)
        if self.tokens is not None:
            self.tokens.take(tokens)
        self.held += sequences

    def give_back(self, tokens: int, sequences: int, *, request: bool) -> None:
        """`request`: it never got its turn, so it does not count as one either."""
        if request and self.requests is not None:
            self.requests.give_back(1)
        if self.tokens is not None:
            self.tokens.give_back(tokens)
        self.held -= sequences

    def untouched(self, now: float) -> bool:
        """Nothing would be lost if this account were forgotten."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.held and all(bucket.refilled(now) >= bucket.capacity for bucket in buckets)

    def check(self) -> None:
        assert self.held >= 0
        for bucket in (self.requests, self.tokens):
            if bucket is not None:
                bucket.check()


def _fitted(bucket: Bucket | None, limit: float | None, parts: int, now: float) -> Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return Bucket(limit, parts, now)
    bucket.resize(limit, parts, now)
    return bucket
