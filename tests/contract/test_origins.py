"""Hosts and origins: what pages of other sites may do with a server.

A browser lends every page its network. On a server without keys that would be enough to read and write
everything, so such a server answers its own names only (DNS rebinding) and refuses pages of other origins,
also where the page could not read the answer: taking a job is done by asking. `STREAMS_ALLOWED_HOSTS` and
`STREAMS_CORS_ORIGINS` say which other names and pages may.
"""

import pytest

from tests.contract.conftest import COMBOS, Api
from tests.support.sockets import Refused, WebSocket

APP = "https://app.example"
NAMES = "streams, Streams.Internal:4000,10.0.0.7"
KEY = "k3y-of-the-page"


@pytest.fixture
def named(fleet, combo):
    """A server without keys that has more names, and an origin that may use it."""
    server = fleet(combo.front, allowed_hosts=NAMES, cors_origins=f"{APP}, http://localhost:3000")
    with combo.client(server.url) as client:
        yield Api(client, server, combo)


@pytest.fixture
def keyed(fleet):
    server = fleet("edge", api_keys=KEY, cors_origins=APP)
    with COMBOS[0].client(server.url) as client:
        yield Api(client, server, COMBOS[0])


def of_a_page(site="cross-site", origin=None, mode="no-cors"):
    """The headers of a browser's request, which no page can change."""
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": "empty"}
    return headers | ({"Origin": origin} if origin else {})


def cors_of(response):
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


OTHER_HOSTS = ("evil.example:4000", "localhost.evil.example", "10.0.0.7", "127.0.0.1.nip.io", "[::2]:1")


def test_a_server_without_keys_answers_its_own_names_only(api, box):
    api.append(box, 1)
    for host in OTHER_HOSTS:
        refused = api.send("GET", "/v0/boxes", headers={"Host": host})
        api.refused(refused, 403, "forbidden", "host", host)
    headers = {"Host": "evil.example"}
    for method, path, body in (
        ("POST", f"/v0/boxes/{box}", {"records": [{"data": 2}]}),
        ("POST", f"/v0/boxes/{box}/diff", {}),
        ("GET", "/v0/boxes", None),
        ("GET", "/v0/status", None),
        ("GET", "/v0/nowhere", None),
        ("GET", "/", None),
    ):
        error = api.refused(api.send(method, path, body, headers=headers), 403, "forbidden", "host")
        assert "STREAMS_ALLOWED_HOSTS" in error["message"]
    refused = api.send("GET", "/v1/basins", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
    assert api.data(box) == [1]
    for path in (
        "/v0/health",
        "/health",
        "/healthz",
        "/ping",
        "/v0/ready",
        "/readyz",
        "/metrics",
        "/v0/metrics",
    ):
        assert api.send("GET", path, headers=headers).status_code == 200, path


def test_a_server_without_keys_has_the_names_of_its_machine(api):
    for host in ("LocalHost:81", "127.0.0.1", "127.9.9.9:4", "[::1]:4000", "basin.localhost", "localhost."):
        assert api.send("GET", "/v0/boxes", headers={"Host": host}).status_code == 200, host
    assert api.send("GET", "/v1/basins", headers={"Host": "localhost"}).status_code == 200


def test_more_names_can_be_allowed(named):
    for host in ("streams", "STREAMS:9", "streams.internal", "streams.internal:1", "10.0.0.7:4000"):
        assert named.send("GET", "/v0/boxes", headers={"Host": host}).status_code == 200, host
    for host in ("streams.evil.example", "xstreams", "10.0.0.70"):
        assert named.send("GET", "/v0/boxes", headers={"Host": host}).status_code == 403, host


def test_a_page_of_another_origin_takes_no_job(api, box):
    """Not by `fetch` without CORS, `<img>` or EventSource: such a request would lease a job."""
    api.put(box, type="queue")
    api.append(box, 1)
    for headers in (
        of_a_page(),
        of_a_page("same-site"),
        of_a_page(origin="https://evil.example", mode="cors"),
        {"Origin": "https://evil.example"},  # a browser without Sec-Fetch
        {"Origin": "null"},
    ):
        for path in (f"/v0/boxes/{box}/work?node=w", f"/v0/boxes/{box}/watch"):
            with api.client.stream("GET", path, headers=headers) as answer:
                assert answer.status_code == 403, headers
        refused = api.post(box, {"records": [{"data": 2}]}, headers=headers, content_type="text/plain")
        api.refused(refused, 403, "forbidden", "origin")
        refused = api.send("GET", "/v1/basins", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
        assert not cors_of(refused)
    assert [job["data"] for job in api.claim(box)["claimed"]] == [1]


def test_links_to_the_static_pages_and_probes_work_from_everywhere(api):
    headers = of_a_page(mode="navigate")
    for path in ("/", "/console/app.js", "/docs", "/v0/openapi.json", "/v0/health", "/metrics"):
        assert api.send("GET", path, headers=headers).status_code == 200, path


def test_a_page_of_the_server_itself_and_a_program_are_not_refused(api, box):
    own = f"http://127.0.0.1:{api.server.port}"
    for headers in (
        of_a_page("same-origin"),
        of_a_page("none", mode="navigate"),
        of_a_page("same-origin", origin="https://behind.a.proxy"),
        {"Origin": own},
        {},
    ):
        assert api.send("GET", "/v0/boxes", headers=headers).status_code == 200, headers
    assert not cors_of(api.send("GET", "/v0/boxes", headers={"Origin": own}))


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_an_allowed_origin_uses_fetch_and_event_streams(named, box, site):
    headers = of_a_page(site, origin=APP, mode="cors")
    preflight = headers | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,idempotency-key",
    }
    asked = named.send("OPTIONS", f"/v0/boxes/{box}", headers=preflight)
    assert asked.status_code == 204
    allowed = cors_of(asked)
    assert allowed["access-control-allow-origin"] == APP
    assert "POST" in allowed["access-control-allow-methods"]
    assert "idempotency-key" in allowed["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed
    made = named.post(box, {"records": [{"data": 1}]}, headers=headers)
    assert (made.status_code, cors_of(made)["access-control-allow-origin"]) == (201, APP)
    assert "access-control-allow-credentials" not in cors_of(made)
    assert "origin" in made.headers["vary"].lower()
    missing = named.send("GET", "/v0/boxes/nowhere", headers=headers)
    assert (missing.status_code, cors_of(missing)["access-control-allow-origin"]) == (404, APP)
    with named.client.stream("GET", f"/v0/boxes/{box}/watch", headers=headers) as events:
        assert (events.status_code, cors_of(events)["access-control-allow-origin"]) == (200, APP)
    with named.client.stream("GET", "/v1/basins", headers=headers) as basins:
        assert (basins.status_code, cors_of(basins)["access-control-allow-origin"]) == (200, APP)


def test_other_origins_get_neither_answers_nor_preflights(named, box):
    for origin in ("https://evil.example", "http://app.example", f"{APP}:444", f"{APP}.evil.example", "null"):
        headers = of_a_page(origin=origin, mode="cors")
        preflight = headers | {"Access-Control-Request-Method": "POST"}
        for method, path in (("OPTIONS", f"/v0/boxes/{box}"), ("GET", "/v0/boxes"), ("GET", "/v1/basins")):
            refused = named.send(method, path, headers=preflight if method == "OPTIONS" else headers)
            assert refused.status_code == 403 and not cors_of(refused), origin
    no_cors = of_a_page()  # says no origin, so nobody can tell whether it is the allowed one
    assert named.send("GET", "/v0/boxes", headers=no_cors).status_code == 403


def test_an_open_server_serves_pages_of_its_machine_over_the_s2_api(api):
    """Development servers of pages have another port, so another origin."""
    headers = of_a_page("same-site", origin="http://localhost:3000", mode="cors")
    found = api.send("GET", "/v1/basins", headers=headers)
    assert (found.status_code, cors_of(found)["access-control-allow-origin"]) == (
        200,
        "http://localhost:3000",
    )
    api.refused(api.send("GET", "/v0/boxes", headers=headers), 403, "forbidden", "STREAMS_CORS_ORIGINS")


@pytest.mark.parametrize("front", ["edge", "hypercorn"])
def test_a_socket_opens_for_allowed_hosts_and_origins_only(fleet, front):
    server = fleet(front, allowed_hosts=NAMES, cors_origins=f"{APP}, http://localhost:3000")
    for headers in ({}, {"Origin": APP}, {"Host": "streams:4000", "Origin": "http://streams:4000"}):
        with WebSocket(server.port, **headers) as ws:
            assert ws.ask({"op": "ping"})["op"] == "ack"
    for headers in (
        {"Origin": "https://evil.example"},
        {"Host": "evil.example:4000", "Origin": "http://evil.example:4000"},
        {"Host": "evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        with pytest.raises(Refused) as refused:
            WebSocket(server.port, **headers)
        assert (refused.value.status, refused.value.error["code"]) == (403, "forbidden"), headers


def test_a_server_with_keys_asks_for_the_key_and_not_for_the_name(keyed, box):
    """A page that has a key may use it; which pages read the answers is said by `STREAMS_CORS_ORIGINS`."""
    key = {"Authorization": f"Bearer {KEY}"}
    elsewhere = {"Host": "streams.example.com"}
    for headers in (elsewhere, of_a_page(), of_a_page(origin="https://evil.example")):
        found = keyed.send("GET", "/v0/boxes", headers=key | headers)
        assert found.status_code == 200 and not cors_of(found)
    page = of_a_page(origin=APP, mode="cors")
    preflight = page | {
        "Access-Control-Request-Method": "GET",
        "Access-Control-Request-Headers": "authorization",
    }
    asked = keyed.send("OPTIONS", "/v0/boxes", headers=preflight)
    assert (asked.status_code, cors_of(asked)["access-control-allow-headers"]) == (204, "authorization")
    assert cors_of(keyed.send("GET", "/v0/boxes", headers=key | page))["access-control-allow-origin"] == APP
    refused = keyed.send("GET", "/v0/boxes", headers=page)
    assert (refused.status_code, cors_of(refused)["access-control-allow-origin"]) == (401, APP)
    evil = preflight | {"Origin": "https://evil.example"}
    assert keyed.send("OPTIONS", "/v0/boxes", headers=evil).status_code == 401
    with WebSocket(keyed.server.port, Origin=APP, Host="x", **key) as ws:
        assert ws.ask({"op": "ping"})["op"] == "ack"
    with pytest.raises(Refused):
        WebSocket(keyed.server.port, Origin="https://evil.example", **key)
