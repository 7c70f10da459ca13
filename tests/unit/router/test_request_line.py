"""The log line of a request."""

from structlog.testing import capture_logs

from prfaas.live.link_stream import LinkCounters
from prfaas.scheduling.admission import Admission, AdmissionParams
from services.router.metrics import RouterMetrics
from services.router.openai.record import RequestLog

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_request_is_logged_with_its_ids():
    """The client's own id and its trace, so that both sides find the line; probes are no news."""
    metrics = RouterMetrics(
        ["m"], lambda: 0.0, lambda: False, LinkCounters(), Admission(AdmissionParams(max_running=1))
    )
    with capture_logs() as lines:
        traceparent = f"00-{TRACE}-00f067aa0ba902b7-01"
        metrics.request_ended(RequestLog(route="chat", request_id="mine", traceparent=traceparent, status=200))
        metrics.request_ended(RequestLog(route="chat", request_id="other", status=499))
        metrics.request_ended(RequestLog(route="ready", request_id="probe", status=200))
    traced, plain, probe = lines
    assert (traced["event"], traced["log_level"], probe["log_level"]) == ("request", "info", "debug")
    assert (traced["request_id"], traced["trace_id"], traced["status"]) == ("mine", TRACE, 200)
    assert (plain["request_id"], plain["status"]) == ("other", 499)
    assert "trace_id" not in plain
