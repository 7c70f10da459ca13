"""What other roles or another threshold gain, and how much of that may be chance."""

import math

from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.throughput import Throughput


def gain(before: Throughput, after: Throughput) -> float:
    """Relative, in sustained requests/s."""
    return after.lambda_max / before.lambda_max - 1 if before.lambda_max > 0 else math.inf


def prefill_gain(before: Throughput, after: Throughput) -> float:
    """Relative, in what the two ways of prefill sustain together; that counts where decode is the limit."""
    rate = _prefill_rate(before)
    return _prefill_rate(after) / rate - 1 if rate > 0 else math.inf


def error(demand: DemandSnapshot | None) -> float:
    """How far a gain may be wrong by chance. The logarithm of lengths spreads by about 1, so that their mean is known
    to one part in the root of their number; counts that fade rest on twice as many requests as they add up to."""
    total = demand.counts.total if demand is not None else 0.0
    return 1 / math.sqrt(2 * total) if total > 0 else math.inf


def _prefill_rate(rates: Throughput) -> float:
    p = rates.costs.offloaded_share
    remote, local = rates.theta_prfaas / p if p > 0 else math.inf, rates.theta_pdp / (1 - p) if p < 1 else math.inf
    return min(remote, local)
