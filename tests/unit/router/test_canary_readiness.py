"""What canaries ask, and when the router is not ready because of what came back."""

from pathlib import Path

import pytest

from prfaas.cluster import ClusterView, NodeId, Role
from prfaas.config import CanaryConfig
from prfaas.engine.tiny import build_tiny
from prfaas.request import TOKEN_BYTES, Mode
from prfaas.scheduling.canary import Canary, Probe, Verdict
from prfaas.tokenizer.text import load_tokenizer
from services.router.canary import lesson, new_canary, obstacle
from tests.unit.scheduling.steering_scenes import node, view_of


def distrusting(view: ClusterView, *names: str, verdict: Verdict = Verdict.WRONG) -> Canary:
    canary = new_canary(CanaryConfig(failures=1))
    far, near = ([view.nodes[name] for name in names] for names in (view.remote_prefill, view.decode))
    canary.next(far, near, 1, 0.0)
    for name in names:
        canary.heard(Probe(NodeId(name), near[0].id), verdict, "token 3 is 4 and not 5", 0.1, 1, 0.0)
    return canary


@pytest.fixture
def view() -> ClusterView:
    senders = [node(name, Role.PREFILL, far=True) for name in ("p0", "p1")]
    return view_of(*senders, node("d0", Role.MIXED))


def test_a_router_that_leaves_out_what_is_poisoned_stays_ready(view: ClusterView):
    """What it serves is right: some prefill node is well, or prompts may stay."""
    assert obstacle(view, Mode.ALWAYS, distrusting(view)) is None
    assert obstacle(view, Mode.ALWAYS, distrusting(view, "p0")) is None
    for mode in (Mode.AUTO, Mode.NEVER):
        assert obstacle(view, mode, distrusting(view, "p0", "p1")) is None


def test_a_router_that_must_send_everything_where_nobody_can_be_trusted_is_not(view: ClusterView):
    """It says what is wrong. Without any prefill node it is not poison that is missing."""
    said = obstacle(view, Mode.ALWAYS, distrusting(view, "p0", "p1"))
    assert said is not None and "poisoned" in said and "token 3 is 4 and not 5" in said
    failed = distrusting(view, "p0", "p1", verdict=Verdict.FAILED)
    assert failed.distrusted and obstacle(view, Mode.ALWAYS, failed) is None, "a line that is cut poisons nothing"
    local = view_of(node("d0", Role.MIXED))
    assert obstacle(local, Mode.ALWAYS, distrusting(view, "p0", "p1")) is None


@pytest.mark.parametrize("tokens", [2, 64, 640, 5000])
def test_prompts_are_as_long_as_they_should_be_and_have_no_prefix_in_common(tmp_path: Path, tokens: int):
    """So that no cached prefix of one, and no KV of another, is taken for what was asked."""
    build_tiny(tmp_path / "m", "cost_model")
    own = CanaryConfig(prompt_tokens=tokens)
    tokenizer = load_tokenizer(tmp_path / "m")
    first, second = lesson(tokenizer, own), lesson(tokenizer, own)
    assert first == second, "another router, or this one started again, asks the same"
    assert [len(prompt) for prompt in first.prompts] == [tokens * TOKEN_BYTES] * len(first.prompts)
    assert len({prompt[: 2 * TOKEN_BYTES] for prompt in first.prompts}) == len(first.prompts)
