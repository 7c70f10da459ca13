"""The decision receipt: why a request took the way it took, and where the time to its first token went."""

from typing import Any

from prfaas.flows.story import Attempt, Story
from prfaas.request import TTFT_TERMS, Alternative, Predicted, Pull, Request, Route, TtftAccount
from services.router.openai.record import RequestLog


def account(story: Story, record: RequestLog, written_s: float) -> TtftAccount:
    """The terms measured at the edge and those that the flow measured; a term that did not occur is 0. Making text of
    the first tokens, and writing it, is of `tokenize` as well."""
    seconds = dict.fromkeys(TTFT_TERMS, 0.0) | story.terms
    seconds["queue"] += record.queue_s or 0.0
    seconds["tokenize"] += record.tokenize_s or 0.0
    if story.first_s is not None:
        seconds["tokenize"] += written_s - story.first_s
    return TtftAccount(seconds, record.ttft_s or 0.0)


def receipt(request: Request, story: Story, output_tokens: int, ttft: TtftAccount) -> dict[str, Any]:
    return {
        "request_id": request.id,
        **(described_route(story.route, request.prompt_tokens) if story.route is not None else {}),
        "prompt_tokens": request.prompt_tokens,
        "kv_bytes": story.prefill.kv_bytes if story.prefill is not None else 0,
        "cache": described_cache(story),
        "recomputed_tokens": story.recomputed_tokens,
        "output_tokens": output_tokens,
        "attempts": [described_attempt(attempt) for attempt in story.attempts],
        "migrations": story.moves,
        "ttft_seconds": ttft.total_s,
        "ttft_account": ttft.shown(),
    }


def described_cache(story: Story) -> dict[str, Any]:
    """What was known to be cached where the first route prefills, in the region's cache or by the engine itself, and
    what prefill says it took from a cache."""
    reported = story.prefill
    return {
        "matched_kv_tokens": story.match.kv,
        "matched_joint_tokens": story.match.joint,
        "matched_own_tokens": story.match.own,
        "reported_tokens": reported.cached_tokens if reported is not None else 0,
        "pulled_bytes": reported.pulled_bytes if reported is not None else 0,
    }


def described_route(route: Route, prompt_tokens: int) -> dict[str, Any]:
    """Prefill never computes the last prompt token (the N-1 rule), so that one is never cached."""
    return {
        "path": route.path.value,
        "reason": route.reason.value,
        "prefill": route.prefill,
        "decode": route.decode,
        "threshold_tokens": route.threshold_tokens,
        "uncached_tokens": route.uncached_tokens,
        "cached_tokens": max(0, prompt_tokens - 1 - route.uncached_tokens),
        "prefill_tokens": route.prefill_tokens,
        "transfer_tokens": route.transfer_tokens,
        "transfer_bytes": route.transfer_bytes,
        "predicted_ttft_seconds": route.predicted_ttft_s,
        "predicted": _predicted(route.predicted),
        "pull": _pull(route.pull),
        "alternatives": [_alternative(alternative) for alternative in route.alternatives],
    }


def _pull(pull: Pull | None) -> dict[str, Any] | None:
    """Bringing a longer cached prefix from another region, against computing it."""
    if pull is None:
        return None
    return {
        "source": pull.source,
        "tokens": pull.tokens,
        "bytes": pull.nbytes,
        "transfer_seconds": pull.transfer_s,
        "recompute_seconds": pull.recompute_s,
        "chosen": pull.chosen,
    }


def _alternative(alternative: Alternative) -> dict[str, Any]:
    return {
        "path": alternative.path.value,
        "prefill": alternative.prefill,
        "decode": alternative.decode,
        "uncached_tokens": alternative.uncached_tokens,
        "transfer_tokens": alternative.transfer_tokens,
        "transfer_bytes": alternative.transfer_bytes,
        "predicted_ttft_seconds": alternative.predicted_ttft_s,
        "predicted": _predicted(alternative.predicted),
    }


def _predicted(predicted: Predicted | None) -> dict[str, float] | None:
    """By the terms of the TTFT account."""
    if predicted is None:
        return None
    return {
        "prefill_queue": predicted.prefill_queue_s,
        "prefill": predicted.prefill_s,
        "transfer_exposed": predicted.transfer_exposed_s,
        "decode_queue": predicted.decode_queue_s,
        "first_decode_step": predicted.first_decode_step_s,
    }


def described_attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "id": attempt.id,
        "route": {
            "path": attempt.route.path.value,
            "reason": attempt.route.reason.value,
            "prefill": attempt.route.prefill,
            "decode": attempt.route.decode,
            "use_cache": attempt.route.use_cache,
        },
        "ending": attempt.ending.value,
        "detail": attempt.detail,
        "replayed_tokens": attempt.replayed_tokens,
    }
