"""Writes `docs/reference/errors.md` to standard output, from the error classes: `make docs`."""

from __future__ import annotations

import streams
from gateway.requests.errors import NOT_IN_V0, RETRY_AFTER_S, STATUS_OF
from streams.protocol.errors import BY_CODE, Busy, Refused, StreamsError, Uncertain

_HEAD = """# Errors

<!-- Written by `make docs` from the error classes. Do not edit. -->

Match on `code`; it never changes. In Python, catch the class, or the family:

```python
import streams

try:
    streams.Client().box("missing").append(1, create=False)
except streams.BoxNotFound as error:
    print(error.code, error.detail)
```
```text
box_not_found {'box': 'missing'}
```

| family | what happened | the next step |
|---|---|---|
| `Refused` | nothing | change the request |
| `Busy` | nothing | repeat it later; the Python client does so for 30 s |
| `Uncertain` | it may have been executed | repeat it with the same idempotency key |

`StreamsError` is the base class of all. The Python client repeats `Uncertain` requests too, if that is safe.
`Retry-After` is the default in seconds; answers may have another value. [The HTTP API](http.md#errors) shows
the shape of an answer; the [runbook](../howto/runbook.md) is for operators.
"""
_TITLES = {
    "v0": ("Errors of the HTTP API", ""),
    "other": (
        "Errors of the S2 API and of transactions",
        "`/v1` answers with the errors of S2; clients of shards and Spark see these classes.",
    ),
    "client": (
        "Errors of the Python client",
        "They are raised by the client itself and have no HTTP status.",
    ),
}


def _family(kind: type[StreamsError]) -> str:
    return next(
        (each.__name__ for each in (Refused, Busy, Uncertain) if issubclass(kind, each)), "StreamsError"
    )


def _kind(kind: type[StreamsError]) -> str:
    if kind.code not in STATUS_OF or kind.__module__ == "streams.client.errors":
        return "client"
    return "other" if kind.code in NOT_IN_V0 else "v0"


def classes() -> list[type[StreamsError]]:
    """Every error class that `streams` exports, but for the families."""
    exported = (getattr(streams, name) for name in streams.__all__)
    errors = [each for each in exported if isinstance(each, type) and issubclass(each, StreamsError)]
    return [each for each in errors if each not in (Refused, Busy, Uncertain)]


def _row(kind: type[StreamsError]) -> str:
    status = str(STATUS_OF[kind.code]) if _kind(kind) != "client" else "–"
    retry = str(RETRY_AFTER_S.get(kind.code, "")) if _kind(kind) != "client" else ""
    meaning = " ".join((kind.__doc__ or "").split())
    return f"| `{kind.code}` | {status} | `{kind.__name__}` | {_family(kind)} | {retry} | {meaning} |"


def page() -> str:
    missing = set(BY_CODE.values()) - set(classes())
    assert not missing, f"streams does not export {missing}"
    parts = [_HEAD]
    for key, (title, text) in _TITLES.items():
        rows = sorted(
            (STATUS_OF.get(each.code, 0), each.code, _row(each)) for each in classes() if _kind(each) == key
        )
        parts.append(f"## {title}\n")
        if text:
            parts.append(text + "\n")
        parts.append(
            "| code | status | class | family | `Retry-After` | meaning |\n|---|---|---|---|---|---|"
        )
        parts.extend(row for _, _, row in rows)
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
