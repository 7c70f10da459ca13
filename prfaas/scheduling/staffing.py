"""What nodes with given shares of time amount to, and the threshold that suits them."""

from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.scheduling.throughput import CostModel, Fleet, Throughput, throughput

#: Thresholds of the first pass, and of the one around its best.
COARSE_STEPS, FINE_STEPS = 160, 32


@dataclass(frozen=True, slots=True)
class Staffing:
    """In whole nodes that do nothing else."""

    prefill_nodes: float
    decode_nodes: float

    def rates(self, fleet: Fleet, model: CostModel, threshold_tokens: float) -> Throughput:
        return throughput(fleet, model.at(threshold_tokens), self.prefill_nodes, self.decode_nodes)

    def batch_at(self, fleet: Fleet, arrivals_per_s: float) -> float:
        """Sequences that each decode node has at once, by Little's law over a step that grows with the batch. The whole
        batch where that is not enough."""
        if self.decode_nodes <= 0:
            return fleet.decode.max_batch
        tokens_per_s = arrivals_per_s * fleet.output_tokens / self.decode_nodes
        left = 1 - tokens_per_s * fleet.decode.per_sequence_s
        batch = tokens_per_s * fleet.decode.base_s / left if left > 0 else fleet.decode.max_batch
        return min(batch, fleet.decode.max_batch)


def staffed(fleet: Fleet, shares: Iterable[float]) -> Staffing:
    prefill = decode = 0.0
    for share in shares:
        prefill += share
        decode += _decode_part(fleet, share)
    return Staffing(prefill, decode)


def best_threshold(fleet: Fleet, model: CostModel, staffing: Staffing) -> tuple[int, Throughput]:
    """The t of the highest Lambda_max, or the one that leaves most room in prefill where decode is the limit."""
    low, high = max(1.0, model.lengths.shortest_tokens), max(1.0, model.lengths.longest_tokens)
    steps = [0, *(round(low * (high / low) ** (step / COARSE_STEPS)) for step in range(COARSE_STEPS)), round(high) + 1]
    best = max(steps, key=lambda t: (_worth(fleet, model, staffing, t), -t))
    place = steps.index(best)
    below, above = steps[max(0, place - 1)], steps[min(len(steps) - 1, place + 1)]
    fine = sorted({best, *(round(below + (above - below) * step / FINE_STEPS) for step in range(FINE_STEPS + 1))})
    best = max(fine, key=lambda t: (_worth(fleet, model, staffing, t), -t))
    return best, staffing.rates(fleet, model, best)


def _worth(fleet: Fleet, model: CostModel, staffing: Staffing, t: int) -> tuple[float, float]:
    """Rounded, so that rounding errors do not choose."""
    rates = staffing.rates(fleet, model, t)
    p = rates.costs.offloaded_share
    ways = [rates.theta_prfaas / p] if p > 0 else []
    ways += [rates.theta_pdp / (1 - p)] if p < 1 else []
    return float(f"{rates.lambda_max:.9g}"), float(f"{min(ways):.9g}")


def _decode_part(fleet: Fleet, share: float) -> float:
    """A share s stretches each step to step(b) / (1 - s): a smaller batch has to keep the limit."""
    if share <= 0:
        return 1.0
    batch = fleet.decode.batch_within(fleet.step_limit_s * (1 - share)) if share < 1 else 0
    return batch / (fleet.step_limit_s * fleet.output_tokens) / fleet.decode_requests_per_s
