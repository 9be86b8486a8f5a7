"""Keys that sign and verify backups: ed25519, in PEM files as `openssl genpkey` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shard.transfer.backup import Signer, Verify
from streams.cli import output

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_MAKE = "openssl genpkey -algorithm ed25519 -out backup.key"
_MAKE_PUBLIC = "openssl pkey -in backup.key -pubout -out backup.pub"


def load_signer(path: Path) -> Signer:
    """Read the private key that signs backups."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise output.Refusal(f"{path} is not an unencrypted private ed25519 key; create one with `{_MAKE}`")
    return signer_of(key)


def load_verifier(path: Path) -> Verify:
    """Read the public key that verifies backups."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_read(path))
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise output.Refusal(f"{path} is not a public ed25519 key; create one with `{_MAKE_PUBLIC}`")
    return verifier_of(key)


def signer_of(key: Ed25519PrivateKey) -> Signer:
    return Signer(key.sign, verifier_of(key.public_key()))


def verifier_of(key: Ed25519PublicKey) -> Verify:
    from cryptography.exceptions import InvalidSignature

    def verify(content: bytes, signature: bytes) -> bool:
        try:
            key.verify(signature, content)
        except InvalidSignature:
            return False
        return True

    return verify


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise output.Refusal(f"the key file {path} cannot be read ({error.strerror})") from error
