"""Dashboards as values, and Grafana's JSON of them."""

from dataclasses import dataclass
from typing import Any

#: Grafana's grid is 24 wide.
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
SCHEMA = 39
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Line:
    """`legend`: with the label's name in double braces where there are several."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is one of Grafana's: s, bytes, Bps, reqps, short, percentunit."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    says: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`name` is its file's."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def described(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": f"prfaas-{dashboard.name}",
        "title": f"prfaas / {dashboard.title}",
        "tags": ["prfaas"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["prfaas"], "title": "prfaas", "asDropdown": True, "keepTime": True}],
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}]
        },
        "panels": [_panel(panel, place) for place, panel in enumerate(dashboard.panels)],
    }


def _panel(panel: Panel, place: int) -> dict[str, Any]:
    row, column = divmod(place, COLUMNS)
    stacking = "normal" if panel.stacked else "none"
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {"fillOpacity": 20 if panel.stacked else 5, "stacking": {"mode": stacking, "group": "A"}},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [_target(line, place) for place, line in enumerate(panel.lines)],
    }


def _target(line: Line, place: int) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + place),
        "datasource": SOURCE,
        "expr": line.expression,
        "legendFormat": line.legend,
        "range": True,
    }
