"""What a router has seen arrive, as it stands in the store: only the buckets that hold anything, rounded."""

from prfaas.membership.plans import RouterRecord
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.histogram import BUCKETS, LengthCounts

#: Less than this of a request is nothing.
LEAST = 1e-3


def record_of(router: str, snapshot: DemandSnapshot, seq: int, admin: str = "") -> RouterRecord:
    counts = enumerate(snapshot.counts.counts)
    return RouterRecord(
        router=router,
        arrivals_per_s=round(snapshot.arrivals_per_s, 6),
        output_tokens=snapshot.output_tokens,
        lengths=tuple((bucket, round(count, 3)) for bucket, count in counts if count >= LEAST),
        admin=admin,
        seq=seq,
    )


def snapshot_of(record: RouterRecord) -> DemandSnapshot:
    """Buckets of another version's histogram are left out."""
    counts = [0.0] * BUCKETS
    for bucket, count in record.lengths:
        if 0 <= bucket < BUCKETS:
            counts[bucket] = count
    return DemandSnapshot(
        counts=LengthCounts(tuple(counts)), arrivals_per_s=record.arrivals_per_s, output_tokens=record.output_tokens
    )
