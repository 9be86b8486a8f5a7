"""Encrypts records at rest with a key that only the client stores (s2 §16).

An encrypted record is `nonce · ciphertext and tag` of its tail, authenticated with the name of its stream.
Its sequence number and time stay in plain text, and so do command records. The key is sent with every request
and never stored.

The cipher packages are imported when the first stream needs them: they take 10 MB of memory.
"""

from __future__ import annotations

import os
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Callable, Mapping

from gateway.requests.s2_errors import S2Error
from gateway.s2.record_formats import Input
from streams.protocol.messages.s2 import Cipher
from streams.protocol.model import binary_records
from streams.protocol.model.binary_records import BinaryRecord

_KEY_BYTES = 32
_KEY_TEXT_MAX = 44

#: Encrypts or decrypts: (data, nonce, associated data) -> result.
_CipherFunction = Callable[[bytes, bytes, bytes], bytes]


class DecryptionFailed(Exception):
    """The record was encrypted with another key or for another stream, or it was modified."""


def _aes(key: bytes) -> tuple[int, _CipherFunction, _CipherFunction]:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    aead = AESGCM(key)

    def decrypt(data: bytes, nonce: bytes, bound: bytes) -> bytes:
        try:
            return aead.decrypt(nonce, data, bound)
        except InvalidTag:
            raise DecryptionFailed from None

    return 12, lambda data, nonce, bound: aead.encrypt(nonce, data, bound), decrypt


def _aegis(key: bytes) -> tuple[int, _CipherFunction, _CipherFunction]:
    from nacl import bindings
    from nacl.exceptions import CryptoError

    def decrypt(data: bytes, nonce: bytes, bound: bytes) -> bytes:
        try:
            return bindings.crypto_aead_aegis256_decrypt(data, bound, nonce, key)
        except (CryptoError, ValueError):  # ValueError if it is shorter than a tag
            raise DecryptionFailed from None

    return (
        32,
        lambda data, nonce, bound: bindings.crypto_aead_aegis256_encrypt(data, bound, nonce, key),
        decrypt,
    )


_CIPHERS: dict[Cipher, Callable[[bytes], tuple[int, _CipherFunction, _CipherFunction]]] = {
    "aes-256-gcm": _aes,
    "aegis-256": _aegis,
}


def check_header(headers: Mapping[str, str]) -> str:
    """Return the encryption key in the headers, or "" without one. The stream decides if it needs a key."""
    text = headers.get("s2-encryption-key")
    if text is None:
        return ""
    if not 1 <= len(text.strip()) <= _KEY_TEXT_MAX:
        raise S2Error("bad_header", f"s2-encryption-key: must have 1 to {_KEY_TEXT_MAX} characters")
    return text.strip()


class RecordCipher:
    """One cipher with one key, for the records of one stream."""

    def __init__(self, cipher: Cipher, key_text: str, box: str) -> None:
        self.cipher = cipher
        self._bound = box.encode()
        self._nonce_bytes, self._encrypt, self._decrypt = _CIPHERS[cipher](_key(cipher, key_text))

    def encrypt_batch(self, batch: Input) -> list[bytes]:
        """Return the encrypted tails of a batch, as they are stored. Commands stay in plain text."""
        commands = batch.command_indexes
        return [
            tail if index in commands else binary_records.sealed_tail(self._encrypt_tail(tail), size=size)
            for index, (tail, size) in enumerate(zip(batch.tails, batch.sizes, strict=True))
        ]

    def _encrypt_tail(self, tail: bytes) -> bytes:
        nonce = os.urandom(self._nonce_bytes)
        return nonce + self._encrypt(tail, nonce, self._bound)

    def decrypt_page(self, text: bytes) -> bytes:
        """Return the stored records of a page, decrypted."""
        return binary_records.SEPARATOR.join(map(self._decrypt_record, binary_records.records_of(text)))

    def _decrypt_record(self, record: BinaryRecord) -> bytes:
        if not record.ciphertext:
            tail = binary_records.tail_of(record.headers, record.body)
        else:
            nonce, data = record.ciphertext[: self._nonce_bytes], record.ciphertext[self._nonce_bytes :]
            try:
                tail = self._decrypt(data, nonce, self._bound)
            except DecryptionFailed:
                raise S2Error(
                    "decryption_failed", f"record {record.seq_num} was not encrypted with this key"
                ) from None
        return binary_records.entry(record.seq_num, record.timestamp, tail)


def _key(cipher: Cipher, text: str) -> bytes:
    if not text:
        raise S2Error("bad_header", f"s2-encryption-key: is missing; this stream is encrypted with {cipher}")
    try:
        key = b64decode(text, validate=True)
    except (NotBase64, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise S2Error("bad_header", f"s2-encryption-key: must be base64 of {_KEY_BYTES} bytes for {cipher}")
    return key
