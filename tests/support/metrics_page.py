"""Writes `docs/reference/metrics.md` to standard output, from the table of metrics: `make docs`."""

from __future__ import annotations

from gateway.telemetry.metrics import METRICS
from streams.protocol.telemetry.histogram import TIMES_S

_HEAD = """# Metrics

<!-- Written by `make docs` from the tables in gateway/telemetry/metrics. Do not edit. -->

`GET /v0/metrics`, or `/metrics`, answers the text format of Prometheus, and JSON to those who ask for
`application/json`. One request to any gateway shows the whole server. Counters begin at 0 when their
process starts. A shard that does not answer within five seconds is missing, and `streams_shard_up` is 0
for it.

Series by box and router are those of the first names in order, `STREAMS_METRICS_BOXES` of each. How to
scrape, what to draw and what to be woken for: [monitor](../howto/monitor.md).
"""


def page() -> str:
    parts = [_HEAD, "| name | kind | labels | |\n|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    bounds = ", ".join(f"{bound * 1000:g}" for bound in TIMES_S)
    parts.append(f"\nHistograms have buckets up to {bounds} ms, and one for all.\n")
    parts.append("Names with `s2_` are those of `s2 lite`, with its buckets; they and `process_` are of the")
    parts.append("whole server.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
