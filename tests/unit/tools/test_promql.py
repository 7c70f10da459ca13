"""What PromQL expressions ask for."""

import pytest

from tools.promql import faults, selectors


def test_selectors_are_found_with_their_matchers():
    expression = (
        'sum by (le) (rate(prfaas_router_itl_seconds_bucket{le=~"0.1|+Inf",job!="x{}"}[5m])) / prfaas_router_leads'
    )
    first, second = selectors(expression)
    assert [(each.label, each.operator, each.values) for each in first.matchers] == [
        ("le", "=~", ("0.1", "+Inf")),
        ("job", "!=", ("x{}",)),
    ]
    assert (second.name, second.matchers, second.text) == ("prfaas_router_leads", (), "prfaas_router_leads")
    assert faults(expression) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("prfaas_router_lead", "there is no series prfaas_router_lead"),
        ("prfaas_router_ttft_seconds", "there is no series prfaas_router_ttft_seconds"),
        ("prfaas_router_leads_count", "there is no series prfaas_router_leads_count"),
        ('prfaas_router_leads{region="a"}', "prfaas_router_leads has no label region"),
        ('prfaas_router_itl_seconds_bucket{le="0.3"}', "le is never 0.3"),
        ('prfaas_router_itl_seconds_sum{le="0.1"}', "prfaas_router_itl_seconds_sum has no label le"),
        ('prfaas_router_requests_total{outcome=~"ok|fine"}', "outcome is never fine"),
        ("sum by (kind) (prfaas_router_leads)", "no series here has the label kind"),
        ("prfaas_router_leads and on (region) prfaas_router_ready", "no series here has the label region"),
    ],
)
def test_what_no_process_has_is_a_fault(expression: str, fault: str):
    assert faults(expression) == [fault]


def test_open_labels_take_any_value():
    assert faults('prfaas_router_requests_total{model="any"}') == []
