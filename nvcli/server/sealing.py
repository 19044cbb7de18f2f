"""Reasoning that a client carries for us: sealed with a key of this process, opened by it alone.

A keystream of keyed BLAKE2b blocks hides the text and a keyed tag proves it is ours. The key lives
as long as the process, so what an earlier one sealed cannot be opened and is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

from nvcli.errors import InvalidParameterError

_NONCE = 16
_TAG = 16


class Sealer:
    def __init__(self) -> None:
        self._stream_key = secrets.token_bytes(32)
        self._tag_key = secrets.token_bytes(32)

    def seal(self, text: str) -> str:
        nonce = secrets.token_bytes(_NONCE)
        hidden = self._crypt(nonce, text.encode("utf-8", "replace"))
        return base64.urlsafe_b64encode(nonce + self._tag(nonce + hidden) + hidden).decode()

    def open(self, sealed: str) -> str:
        """Raises `InvalidParameterError` for what this process did not seal."""
        try:
            data = base64.urlsafe_b64decode(sealed.encode("ascii"))
        except ValueError:
            data = b""
        nonce, tag, hidden = data[:_NONCE], data[_NONCE : _NONCE + _TAG], data[_NONCE + _TAG :]
        if not hmac.compare_digest(tag, self._tag(nonce + hidden)):
            raise InvalidParameterError(
                "encrypted_content was not made by this server", param="encrypted_content"
            )
        return self._crypt(nonce, hidden).decode("utf-8", "replace")

    def sign(self, text: str) -> str:
        """A mark that this process wrote the text."""
        return base64.urlsafe_b64encode(self._tag(text.encode("utf-8", "replace"))).decode()

    def _tag(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._tag_key, digest_size=_TAG).digest()

    def _crypt(self, nonce: bytes, data: bytes) -> bytes:
        stream = b"".join(
            hashlib.blake2b(nonce + block.to_bytes(8, "big"), key=self._stream_key).digest()
            for block in range(-(-len(data) // 64))
        )
        return bytes(a ^ b for a, b in zip(data, stream, strict=False))
