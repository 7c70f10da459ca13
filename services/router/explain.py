"""Why a request went where it went, in full: what the receipt says and what the router knew when it decided."""

from collections.abc import Mapping
from typing import Any

from prfaas.cluster import LinkState
from prfaas.live.decisions import Decided, Decisions
from prfaas.live.pools import CachePools
from prfaas.live.situation import Situation
from prfaas.scheduling.rule import Pair
from services.router.breaker_metrics import described_shut
from services.router.openai.receipt import described_attempt, described_cache, described_route
from services.router.openai.record import Observe, RequestLog


def explanation(decided: Decided) -> dict[str, Any]:
    story, situation = decided.story, decided.situation
    return {
        "request_id": decided.request_id,
        "prompt_tokens": decided.prompt_tokens,
        "output_tokens": story.output_tokens,
        "finish": story.finish.value if story.finish else None,
        "attempts": [
            {**described_attempt(attempt), "route": described_route(attempt.route, decided.prompt_tokens)}
            for attempt in story.attempts
        ],
        "cache": described_cache(story),
        "ttft_terms": dict(story.terms),
        "decided_under": described_situation(situation) if situation is not None else None,
        "outcome": decided.outcome or None,
    }


def described_situation(situation: Situation) -> dict[str, Any]:
    decision = situation.decision
    return {
        "threshold": None
        if decision is None
        else {
            "threshold_tokens": decision.threshold_tokens,
            "mode": decision.mode.value,
            "reason": decision.reason.value,
            "plan_threshold_tokens": decision.plan_threshold_tokens,
            "link_use": decision.link_use,
            "remote_use": decision.remote_use,
            "local_use": decision.local_use,
            "egress_bytes_per_s": decision.egress_bytes_per_s,
            "usable_bytes_per_s": decision.usable_bytes_per_s,
        },
        "links": described_links(situation.links),
        "shut": described_shut(situation.shut),
    }


def described_links(links: Mapping[Pair, LinkState]) -> list[dict[str, Any]]:
    return [
        {
            "source": link.source,
            "target": link.target,
            "capacity_bytes_per_s": link.capacity_bytes_per_s,
            "goodput_bytes_per_s": link.goodput_bytes_per_s,
            "utilization": link.utilization,
            "queued_bytes": link.queued_bytes,
            "queue_age_s": link.queue_age_s,
            "stalled_s": link.stalled_s,
            "rtt_s": link.rtt_s,
            "retransmitted_ratio": link.retransmitted_ratio,
        }
        for link in links.values()
    ]


def described_caches(caches: CachePools) -> dict[str, Any]:
    """`age_seconds` is None of a shard that was never heard."""
    return {
        "bytes": caches.index.nbytes,
        "forgotten_blocks": caches.index.forgotten_units,
        "shards": [
            {
                "id": each.pool.id,
                "region": each.pool.region,
                "state": caches.state(each).value,
                "age_seconds": caches.age_s(each) if each.heard_at is not None else None,
                "seq": each.feed.seq,
                "updates": each.updates,
                "behind": each.behind or None,
            }
            for each in caches.followed()
        ],
    }


def remembering(decisions: Decisions, observe: Observe) -> Observe:
    """Let the decisions know how a request ended, besides telling `observe`."""

    def ended(record: RequestLog) -> None:
        if record.completion_id is not None:
            outcome = {
                "status": record.status,
                "error": record.error,
                "ttft_seconds": record.ttft_s,
                "ttft_account": record.account.shown() if record.account is not None else None,
                "duration_seconds": record.duration_s,
            }
            decisions.ended(record.completion_id, record.request_id, outcome)
        observe(record)

    return ended
