"""The console's files (§13): open to all, kept by browsers, and closed to everything that is not theirs."""

import re

import pytest

from gateway.api.console import FILES

#: Published builds of others, unchanged (`licenses.txt`). The policy keeps what they could do in check.
VENDORED = {"/console/preact.js", "/console/uplot.js", "/console/uplot.css", "/console/licenses.txt"}


@pytest.mark.parametrize("path", FILES)
def test_a_file_is_served_to_everybody_with_a_strict_policy(api, path):
    """§13"""
    response = api.client.get(path)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/")
    policy = dict(
        part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[each] for each in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    if path not in VENDORED:
        assert not re.search(
            r"src=.https?:|innerHTML|document\.write|\beval\(|localStorage|document\.cookie", response.text
        )
    if response.headers["content-type"].startswith("text/html"):
        assert not re.search(r"<script(?! type=\"module\" src=)|<style| on\w+=\"| style=", response.text)


@pytest.mark.parametrize("path", FILES)
def test_a_file_that_is_known_is_not_sent_again(api, path):
    """§13"""
    tag = api.client.get(path).headers["etag"]
    again = api.client.get(path, headers={"If-None-Match": f'"other", {tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert api.client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    assert api.client.get(path, headers={"Accept-Encoding": "gzip"}).headers["etag"] == tag


def test_the_page_names_only_files_that_there_are(api):
    for path in FILES:
        if path in VENDORED:
            continue
        named = re.findall(
            r"(?:src|href)=\"(/console/[^\"]+)\"|from \"\./([^\"]+)\"", api.client.get(path).text
        )
        assert {whole or f"/console/{name}" for whole, name in named} <= FILES.keys()


def test_there_is_nothing_else_in_its_folder(api):
    for path in (
        "/console",
        "/console/",
        "/console/index.html",
        "/console/../access.py",
        "/console/%2e%2e/access.py",
    ):
        api.refused(api.send("GET", path), 404, "not_found")
    api.refused(api.send("GET", "/", params={"colour": "red"}), 400, "invalid_request", "colour")
    api.refused(api.send("POST", "/"), 405, "method_not_allowed")
