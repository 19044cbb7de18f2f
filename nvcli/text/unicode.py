"""Lone surrogates: what JSON escapes and C locales let into a Python string and UTF-8 does not."""

from __future__ import annotations


def repair_surrogates(text: str) -> str:
    """`text` as valid Unicode: a surrogate pair becomes its character, a lone one U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
