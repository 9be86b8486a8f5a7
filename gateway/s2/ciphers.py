"""Records at rest under a key that only the client keeps (s2 §16).

A record that a cipher has closed is `nonce · ciphertext and tag` of its tail, bound to the name of its
stream; its number and time stay open, and commands do. The key comes with every request and is forgotten
with it.

The packages that have the ciphers are imported when the first stream needs one: they take 10 MB of a gateway.
"""

from __future__ import annotations

import os
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Callable, Mapping

from gateway.requests.s2_errors import S2Error
from gateway.s2.messages import Input
from streams.protocol.messages.s2 import Cipher
from streams.protocol.model import sequenced
from streams.protocol.model.sequenced import Record

_KEY_BYTES = 32
_KEY_TEXT_MAX = 44

#: (data or ciphertext, nonce, bound to) -> the other.
_Turn = Callable[[bytes, bytes, bytes], bytes]


class Closed(Exception):
    """It was closed with another key, or for another stream, or has been changed."""


def _aes(key: bytes) -> tuple[int, _Turn, _Turn]:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    aead = AESGCM(key)

    def opened(data: bytes, nonce: bytes, bound: bytes) -> bytes:
        try:
            return aead.decrypt(nonce, data, bound)
        except InvalidTag:
            raise Closed from None

    return 12, lambda data, nonce, bound: aead.encrypt(nonce, data, bound), opened


def _aegis(key: bytes) -> tuple[int, _Turn, _Turn]:
    from nacl import bindings
    from nacl.exceptions import CryptoError

    def opened(data: bytes, nonce: bytes, bound: bytes) -> bytes:
        try:
            return bindings.crypto_aead_aegis256_decrypt(data, bound, nonce, key)
        except (CryptoError, ValueError):  # the latter when it is shorter than a tag
            raise Closed from None

    return (
        32,
        lambda data, nonce, bound: bindings.crypto_aead_aegis256_encrypt(data, bound, nonce, key),
        opened,
    )


_MADE: dict[Cipher, Callable[[bytes], tuple[int, _Turn, _Turn]]] = {"aes-256-gcm": _aes, "aegis-256": _aegis}


def check_header(headers: Mapping[str, str]) -> str:
    """The key as it came, "" when none did. Whether one is needed, the stream says."""
    given = headers.get("s2-encryption-key")
    if given is None:
        return ""
    if not 1 <= len(given.strip()) <= _KEY_TEXT_MAX:
        raise S2Error("bad_header", f"s2-encryption-key: must have 1 to {_KEY_TEXT_MAX} characters")
    return given.strip()


class Sealing:
    """One cipher with one key, for one stream."""

    def __init__(self, cipher: Cipher, key_text: str, box: str) -> None:
        self.cipher = cipher
        self._bound = box.encode()
        self._nonce_bytes, self._seal, self._open = _MADE[cipher](_key(cipher, key_text))

    def sealed(self, given: Input) -> list[bytes]:
        """The tails of the records as they are to be kept."""
        commands = given.command_indexes
        return [
            tail if index in commands else sequenced.sealed_tail(self._closed(tail), size=size)
            for index, (tail, size) in enumerate(zip(given.tails, given.sizes, strict=True))
        ]

    def _closed(self, tail: bytes) -> bytes:
        nonce = os.urandom(self._nonce_bytes)
        return nonce + self._seal(tail, nonce, self._bound)

    def opened(self, text: bytes) -> bytes:
        """Records as they are kept, as those who have the key see them."""
        return sequenced.SEPARATOR.join(map(self._opened, sequenced.records_of(text)))

    def _opened(self, record: Record) -> bytes:
        if not record.sealed:
            tail = sequenced.tail_of(record.headers, record.body)
        else:
            nonce, data = record.sealed[: self._nonce_bytes], record.sealed[self._nonce_bytes :]
            try:
                tail = self._open(data, nonce, self._bound)
            except Closed:
                raise S2Error(
                    "decryption_failed", f"record {record.seq_num} was not closed with this key"
                ) from None
        return sequenced.entry(record.seq_num, record.timestamp, tail)


def _key(cipher: Cipher, text: str) -> bytes:
    if not text:
        raise S2Error("bad_header", f"s2-encryption-key: is needed, this stream is kept with {cipher}")
    try:
        key = b64decode(text, validate=True)
    except (NotBase64, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise S2Error("bad_header", f"s2-encryption-key: must be base64 of {_KEY_BYTES} bytes for {cipher}")
    return key
