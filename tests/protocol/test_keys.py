"""Keys as they are written down and looked for (v0 §11), and what a grant covers.

Method: tables for what is legal and what is not; hypothesis for what must hold of any grant.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.protocol import wire
from streams.protocol.access.grants import ADMIN, ALL, DELETE, READ, WRITE, Grant
from streams.protocol.access.key_limits import Limits
from streams.protocol.access.keys import (
    KEYS_MAX,
    PREFIXES_MAX,
    Key,
    KeyRing,
    MalformedKey,
    bearer_of,
    digest_of,
    entries_of_lines,
    entries_of_list,
    parse_ring,
)
from streams.protocol.errors import Forbidden
from streams.protocol.messages import op_access

SECRET = "hunter2-hunter2-hunter2"


def only(entry: str) -> Key:
    ring, _ = parse_ring([("entry 1", entry)])
    assert len(ring.keys) == 1
    return ring.keys[0]


@pytest.mark.parametrize(
    ("written", "scopes", "prefixes"),
    [
        ("", ALL, ()),
        (":", ALL, ()),
        ("::", ALL, ()),
        (":read", READ, ()),
        (":read+write", READ | WRITE, ()),
        (":r+w+d+a", ALL, ()),
        (":rw", READ | WRITE, ()),
        (":rw+delete", READ | WRITE | DELETE, ()),
        (":a:", ADMIN, ()),
        ("::orders.", ALL, ("orders.",)),
        (":r:orders.|audit|orders.", READ, ("orders.", "audit")),
        (":w:tenant:7:", WRITE, ("tenant:7:",)),
    ],
)
def test_scopes_and_prefixes_follow_the_secret(written: str, scopes: int, prefixes: tuple[str, ...]) -> None:
    key = only(SECRET + written)
    assert key.grant == Grant(scopes, prefixes)
    assert key.digest == digest_of(SECRET)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        ":read",
        f"{SECRET}:hunter2",
        f"{SECRET}:read+",
        f"{SECRET}:READ",
        f"{SECRET}:rx",
        f"{SECRET}:read:-hunter2",
        f"{SECRET}:read:a||hunter2",
        f"{SECRET}:read:hunter2/",
        f"{SECRET}:read:" + "|".join(f"hunter2{n}" for n in range(PREFIXES_MAX + 1)),
        "hunter2 with spaces",
        f"{SECRET}:r hunter2",
        f"{SECRET}:r hunter2=1",
        f"{SECRET}:r id=-hunter2",
        f"{SECRET}:r id=hunter2/x",
        f"{SECRET}:r id={'hunter2' * 10}",
        f"{SECRET}:r id=a id=hunter2",
        f"{SECRET}:r boxes=hunter2",
        f"{SECRET}:r boxes=-1",
        f"{SECRET}:r boxes=1KiB",
        f"{SECRET}:r stored_bytes=99999999TiB",
        "hunter2\N{SNOWMAN}",
        "hunter2,and-a-comma",
        "hunter2" * 100,
    ],
)
def test_a_malformed_entry_is_refused_by_its_place_and_never_shown(entry: str) -> None:
    with pytest.raises(MalformedKey) as caught:
        parse_ring([("entry 3", entry)])
    assert str(caught.value).startswith("entry 3: ")
    assert "hunter2" not in str(caught.value)


def test_an_id_and_limits_follow_behind_a_space() -> None:
    written = ":rw:orders. id=orders-service boxes=1000 stored_bytes=1.5GiB requests_per_s=500"
    key = only(SECRET + written)
    assert (key.id, key.grant) == ("orders-service", Grant(READ | WRITE, ("orders.",)))
    assert key.limits == Limits(boxes=1000, stored_bytes=3 << 29, requests_per_s=500)
    assert key.account == "orders-service" and only(f"{SECRET} requests_per_s=9").account == ""
    listed, _ = parse_ring(entries_of_list(f"{SECRET}:r id=a boxes=1, {SECRET}2 id=b"))
    assert [key.id for key in listed.keys] == ["a", "b"]
    assert KeyRing.from_json(listed.to_json()) == listed


def test_a_key_without_an_id_has_one_that_tells_nothing_of_its_secret() -> None:
    one, same, other = only(SECRET), only(f"{SECRET}:rw:in."), only(f"{SECRET}2")
    assert one.id == same.id != other.id
    assert one.id.startswith("key-") and one.id.removeprefix("key-") not in one.digest


def test_two_secrets_may_share_an_id_when_they_are_the_same_key() -> None:
    ring, _ = parse_ring(entries_of_list(f"{SECRET}:rw:in. id=one boxes=3,{SECRET}2:rw:in. id=one boxes=3"))
    assert [key.id for key in ring.keys] == ["one", "one"]
    for other in ("id=one boxes=4", "id=one"):
        with pytest.raises(MalformedKey, match=r"^entry 2: an earlier entry has the same id"):
            parse_ring(entries_of_list(f"{SECRET} id=one boxes=3,{SECRET}2 {other}"))


def test_default_limits_are_for_keys_with_prefixes_and_an_entry_overrides_them() -> None:
    entries = entries_of_list(f"{SECRET}::in.,{SECRET}2::in. boxes=0 groups=7,{SECRET}3")
    ring, _ = parse_ring(entries, Limits(boxes=5, routers=2))
    assert [key.limits.to_fields() for key in ring.keys] == [
        {"boxes": 5, "routers": 2},
        {"routers": 2, "groups": 7},
        {},
    ]


def test_a_secret_stands_in_one_entry_only() -> None:
    with pytest.raises(MalformedKey, match=r"^entry 2: an earlier entry has the same secret"):
        parse_ring(entries_of_list(f"{SECRET}:r, {SECRET}:w"))


def test_there_are_not_more_keys_than_a_request_can_be_compared_with() -> None:
    entries = [(f"entry {n}", f"{SECRET}{n}") for n in range(KEYS_MAX + 1)]
    assert len(parse_ring(entries[1:])[0].keys) == KEYS_MAX
    with pytest.raises(MalformedKey, match=str(KEYS_MAX)):
        parse_ring(entries)


def test_short_secrets_are_warned_about_and_taken() -> None:
    ring, warnings = parse_ring(entries_of_list(f"short,{SECRET}"))
    assert len(ring.keys) == 2
    assert warnings == ["entry 1: the secret has fewer than 16 characters"]


def test_a_file_has_one_entry_a_line_and_room_for_remarks() -> None:
    text = f"# ours\n\n  {SECRET}:r  \r\n#{SECRET}x\nother-{SECRET}::in.\n"
    assert entries_of_lines(text) == [("line 3", f"{SECRET}:r"), ("line 5", f"other-{SECRET}::in.")]


def test_a_ring_finds_the_key_of_a_secret_and_keeps_no_secret() -> None:
    ring, _ = parse_ring(entries_of_list(f"{SECRET}:r,{SECRET}2:w:in."))
    found = ring.find(f"{SECRET}2")
    assert found is not None and found.grant == Grant(WRITE, ("in.",))
    for wrong in ("", SECRET[:-1], f"{SECRET}3", "\N{SNOWMAN}", "\ud800", digest_of(SECRET)):
        assert ring.find(wrong) is None
    text = ring.to_json()
    assert SECRET.encode() not in text and SECRET not in repr(ring) + repr(ring.keys[0])
    assert found.digest not in repr(found)
    assert KeyRing.from_json(text) == ring


def test_a_ring_holds_a_key_only_as_it_was() -> None:
    ring, _ = parse_ring(entries_of_list(f"{SECRET}:r"))
    assert ring.holds(only(f"{SECRET}:r"))
    assert ring.holds(only(f"{SECRET}:r boxes=3"))
    assert not ring.holds(only(f"{SECRET}:rw"))
    assert not ring.holds(only(f"{SECRET}:r id=other"))
    assert not ring.holds(only(f"{SECRET}x:r"))


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic abc", None),
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Bearer abc, Bearer abc", "abc, Bearer abc"),
    ],
)
def test_a_bearer_is_read(header: str | None, secret: str | None) -> None:
    assert bearer_of(header) == secret


def test_only_a_key_without_bounds_is_not_passed_on() -> None:
    assert only(SECRET).shard_grant is None
    assert only(f"{SECRET}::in.").shard_grant == Grant(ALL, ("in.",))
    assert only(f"{SECRET}:rwd").shard_grant == Grant(READ | WRITE | DELETE)


def test_a_scope_on_a_name_and_on_all_of_them() -> None:
    bounded = Grant(READ, ("in.",))
    assert bounded.allows("read", "in.x") and Grant(READ).allows("read", "")
    assert not (bounded.allows("write", "in.x") or bounded.allows("read", "x") or bounded.allows("read", ""))


def test_a_refusal_names_what_is_missing() -> None:
    with pytest.raises(Forbidden, match="lacks write and admin"):
        Grant(READ | DELETE).require(READ | WRITE | ADMIN)
    with pytest.raises(Forbidden, match="dest: 'out' is outside"):
        Grant(ALL, ("in",)).require_name("out", "dest")
    Grant().require_name("anything")


_names = st.text(alphabet="ab.", max_size=4)


@given(prefixes=st.lists(_names.filter(bool), max_size=4), asked=_names, names=st.lists(_names))
def test_what_a_list_asks_for_is_what_the_grant_covers_once(
    prefixes: list[str], asked: str, names: list[str]
) -> None:
    grant = Grant(ALL, tuple(prefixes))
    parts = grant.within(asked)
    assert list(parts) == sorted(parts)
    for name in names:
        expected = name.startswith(asked) and grant.covers(name)
        assert sum(name.startswith(part) for part in parts) == int(expected)


def test_every_op_is_either_open_to_keys_or_ours_alone() -> None:
    ops = {value for name, value in vars(wire).items() if name.startswith("OP_")} - {wire.OP_HELLO}
    assert ops == op_access.OPS.keys() | op_access.INTERNAL
    assert not op_access.OPS.keys() & op_access.INTERNAL


def test_an_op_for_all_boxes_is_not_for_a_key_with_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op_access.OPS, 9999, op_access.Need(READ, is_whole=True))
    op_access.check_op(Grant(READ), 9999)
    op_access.check_boxes(Grant(READ), 9999, None)
    for grant in (Grant(WRITE), Grant(READ, ("in.",))):
        with pytest.raises(Forbidden):
            op_access.check_op(grant, 9999)
    with pytest.raises(Forbidden, match="names no box"):
        op_access.check_boxes(Grant(), wire.OP_APPEND, None)
