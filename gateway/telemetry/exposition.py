"""Renders metrics in the text format of Prometheus and as JSON (v0 §13). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.telemetry.metrics import METRICS
from gateway.telemetry.metrics.metric import Metric
from gateway.telemetry.server_reports import Reports
from streams.protocol.telemetry.histogram import HistogramFacts


def as_text(reports: Reports) -> bytes:
    """Render all metrics in the text format of Prometheus, version 0.0.4."""
    lines: list[str] = []
    label_texts: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
    for metric in METRICS:
        name = metric.name
        lines.append(f"# HELP {name} {metric.help}")
        lines.append(f"# TYPE {name} {metric.kind}")
        for values, value in metric.samples(reports):
            key = (metric.labels, values)
            labels = label_texts.get(key)
            if labels is None:  # all series of a box have the same labels
                labels = label_texts[key] = _labels(metric.labels, values)
            if isinstance(value, HistogramFacts):
                lines.extend(_histogram_lines(metric, labels, value))
            else:
                lines.append(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}")
    return ("\n".join(lines) + "\n").encode()


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))


def _histogram_lines(metric: Metric, labels: str, facts: HistogramFacts) -> Iterator[str]:
    name, so_far = metric.name, 0
    before = f"{labels}," if labels else ""
    for bound, count in zip((*map(repr, metric.bounds), "+Inf"), facts.counts, strict=True):
        so_far += count
        yield f'{name}_bucket{{{before}le="{bound}"}} {so_far}'
    braces = f"{{{labels}}}" if labels else ""
    yield f"{name}_sum{braces} {facts.sum}"
    yield f"{name}_count{braces} {so_far}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def as_facts(reports: Reports) -> list[dict[str, Any]]:
    """Return all metrics as objects for JSON."""
    return [
        {
            "name": metric.name,
            "kind": metric.kind,
            "help": metric.help,
            "samples": [
                {"labels": dict(zip(metric.labels, values, strict=True)), **_value(value, metric.bounds)}
                for values, value in metric.samples(reports)
            ],
        }
        for metric in METRICS
    ]


def _value(value: int | float | HistogramFacts, bounds: tuple[float, ...]) -> dict[str, Any]:
    if not isinstance(value, HistogramFacts):
        return {"value": value}
    so_far, buckets = 0, []
    for bound, count in zip(bounds, value.counts, strict=False):
        so_far += count
        buckets.append({"le": bound, "count": so_far})
    return {"count": sum(value.counts), "sum": value.sum, "buckets": buckets}
