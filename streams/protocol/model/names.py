"""Which names and tags are legal, and their limits. Nothing is normalised: a name is used as it came.

Box names follow v0 §0.4. They are ASCII by construction, so a name's length in characters is its
length in bytes, and no name can walk a file path (files are named by number, never by box).
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from streams.protocol.errors import InvalidRequest

BOX_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}"
ROUTER_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}"

#: A stream of the S2 API by its qualified name, `basin/stream`: no box that a request can make has a slash.
_stream_name = re.compile(r"[a-z0-9-]{8,48}/(?s:.){1,512}").fullmatch

_box_name = re.compile(BOX_NAME_PATTERN).fullmatch
_router_name = re.compile(ROUTER_NAME_PATTERN).fullmatch

#: A name in a body. The decoder accepts any text, because `check_box_name` gives a better error; the schema
#: has the whole pattern.
BoxName = Annotated[str, Meta(extra_json_schema={"pattern": f"^{BOX_NAME_PATTERN}$"})]

IDEMPOTENCY_KEY_CHARS_MAX = 256
#: No client's key begins with it: such keys name other requests than appends.
RESERVED_KEY_PREFIX = "\0"
FENCING_TOKEN_BYTES_MAX = 48


def quote(value: str) -> str:
    """Return a text of a client, quoted and shortened for an error message."""
    return repr(value if len(value) <= 64 else value[:61] + "...")


def check_box_name(name: str, field: str = "box") -> str:
    if _box_name(name) is None:
        if _stream_name(name) is not None:
            raise InvalidRequest(
                f"{field}: {quote(name)} is a stream, which is only read here; use the S2 API to change it",
                field=field,
            )
        raise InvalidRequest(
            f"{field}: {quote(name)} is not a box name (letters, digits and . _ : -, starting with a letter "
            "or digit, at most 255 characters)",
            field=field,
        )
    return name


def check_readable_name(name: str, field: str = "box") -> str:
    """The name of something that can be read here: a box, or a stream by its qualified name."""
    if _stream_name(name) is None:
        check_box_name(name, field)
    return name


def check_router_name(name: str, field: str = "router") -> str:
    if _router_name(name) is None:
        raise InvalidRequest(
            f"{field}: {quote(name)} is not a router name (letters, digits and . _ : > -, starting with a "
            "letter or digit, at most 255 characters)",
            field=field,
        )
    return name


def check_schedule_name(name: str, field: str = "schedule") -> str:
    if _box_name(name) is None:
        raise InvalidRequest(
            f"{field}: {quote(name)} is not a schedule name (letters, digits and . _ : -, starting with a "
            "letter or digit, at most 255 characters)",
            field=field,
        )
    return name


def check_group_name(name: str, field: str = "group") -> str:
    if _box_name(name) is None:
        raise InvalidRequest(
            f"{field}: {quote(name)} is not a group name (letters, digits and . _ : -, starting with a "
            "letter or digit, at most 255 characters)",
            field=field,
        )
    return name


def check_text(value: str, field: str, *, bytes_max: int) -> str:
    """A tag or node: text without NUL (columns are joined with it), at most `bytes_max` bytes of UTF-8."""
    if len(value) > bytes_max or (not value.isascii() and len(value.encode()) > bytes_max):
        raise InvalidRequest(f"{field}: {quote(value)} is longer than {bytes_max} bytes", field=field)
    if "\0" in value:
        raise InvalidRequest(f"{field}: {quote(value)} contains a NUL character", field=field)
    return value
