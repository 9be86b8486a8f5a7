"""Texts of `/v1` errors that the tests of official clients compare: never reword them.

All other texts may improve. The list is from the suites of the SDKs (`make suites`): the Rust SDK compares
two whole messages, the Python SDK looks for the cipher, and the Rust and Go SDKs skip a test if the message
of an `invalid` error has the words "free tier".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.s2.conftest import Client

MESSAGES = Path(__file__).parents[1] / "docs" / "golden" / "messages.txt"
READ_WRITE = {"read": True, "write": True}
ALL_GROUPS = {"account": READ_WRITE, "basin": READ_WRITE, "stream": READ_WRITE}


@pytest.mark.parametrize(
    ("scope", "auto_prefix", "message"),
    [
        (
            {"op_groups": ALL_GROUPS},
            True,
            "Auto prefixing is only allowed for streams with prefix matching",
        ),
        ({}, False, "Access token permissions cannot be empty"),
        ({"ops": []}, False, "Access token permissions cannot be empty"),
        (
            {"op_groups": {"basin": {"read": False, "write": False}}},
            False,
            "Access token permissions cannot be empty",
        ),
    ],
)
def test_the_rust_sdk_compares_the_message_of_a_refused_token(
    shared: Client, scope: dict[str, Any], auto_prefix: bool, message: str
) -> None:
    body = {"id": "texts", "scope": scope, "auto_prefix_streams": auto_prefix}
    answer = shared.call("POST", "/access-tokens", body)
    assert answer.status_code == 422
    assert answer.json() == {"code": "invalid", "message": message}


@pytest.mark.parametrize("cipher", ["aegis-256", "aes-256-gcm"])
def test_the_python_sdk_looks_for_the_cipher_when_the_encryption_key_is_missing(
    client: Client, cipher: str
) -> None:
    client.create(stream_cipher=cipher)
    client.stream("sealed")
    append = client.call("POST", "/streams/sealed/records", {"records": [{"body": "x"}]})
    read = client.call("GET", "/streams/sealed/records?seq_num=0")
    for answer in (append, read):
        assert answer.json()["code"] == "bad_header"
        assert cipher in answer.json()["message"]


def test_no_message_has_the_words_that_make_clients_skip_their_tests() -> None:
    assert "free tier" not in MESSAGES.read_text().lower()
