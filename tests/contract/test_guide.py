"""The guide: open to all, kept by browsers, with a strict policy, and nothing but files of its archive."""

import pytest

KINDS = {
    "": "text/html; charset=utf-8",
    "index.html": "text/html; charset=utf-8",
    "howto/keys.html": "text/html; charset=utf-8",
    "_static/a.css": "text/css; charset=utf-8",
    "_static/a.js": "text/javascript; charset=utf-8",
    "_images/a.svg": "image/svg+xml",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_page_is_served_to_everybody_with_a_strict_policy(api, name):
    """§13"""
    for _ in range(2):  # from the archive, then from memory
        response = api.client.get(f"/docs/guide/{name}")
        assert (response.status_code, response.headers["content-type"]) == (200, KINDS[name])
    policy = dict(
        part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[each] for each in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    again = api.client.get(f"/docs/guide/{name}", headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_address_without_its_slash_leads_to_the_one_with_it(api):
    response = api.client.get("/docs/guide", follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (308, "/docs/guide/")


def test_there_is_nothing_else(api):
    for name in (
        "notes.exe",
        "howto",
        "howto/",
        "../docs.html",
        "%2e%2e/docs.html",
        "howto%2Fkeys.html",
        "x" * 900,
    ):
        api.refused(api.send("GET", f"/docs/guide/{name}"), 404, "not_found")
    api.refused(api.send("POST", "/docs/guide/"), 405, "method_not_allowed")
