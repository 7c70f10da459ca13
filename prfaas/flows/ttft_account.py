"""The account of the time to the first token: where that time went."""

from itertools import pairwise

from prfaas.flows.ports import PrefillReport, Reservation, TokenBatch
from prfaas.flows.story import Story


def account(
    story: Story,
    arrived_s: float,
    laps: list[float],
    taken: Reservation | None,
    report: PrefillReport,
    batch: TokenBatch,
) -> None:
    """The terms of the TTFT account that end with the first token, of the attempt that began with the first lap.
    `taken` is the reservation if it was made by this attempt.

    `network` is what the calls took beyond the time that the workers had them, by the workers' own clocks. Failed
    attempts were a wait for this one to begin, so their time is added to `queue`, to which the caller may have added.
    """
    route_s, reserve_s, prefill_s, first_s = (end - start for start, end in pairwise(laps))
    waited_s, step_s = batch.first_queue_s or 0.0, batch.first_step_s or 0.0
    reserved_s = (taken.took_s or 0.0) if taken is not None else 0.0
    # Workers of an older version do not say how long they had a command.
    prefilled_s = report.queue_s + report.compute_s + report.exposed_s if report.took_s is None else report.took_s
    decoded_s = waited_s + step_s if batch.first_took_s is None else batch.first_took_s
    story.terms |= {
        "queue": story.terms.get("queue", 0.0) + laps[0] - arrived_s,
        "route": route_s,
        "network": max(0.0, reserve_s - reserved_s) + max(0.0, prefill_s - prefilled_s) + max(0.0, first_s - decoded_s),
        "prefill_queue": report.queue_s,
        "prefill": report.compute_s,
        "transfer_exposed": report.exposed_s,
        "decode_queue": reserved_s + waited_s,
        "first_decode_step": step_s,
    }
    story.first_s = laps[-1]
