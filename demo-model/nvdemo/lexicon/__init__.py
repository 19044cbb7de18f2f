"""Word lists and facts from which the conversations are made."""

from __future__ import annotations


def word_list(text: str) -> list[str]:
    """Words with white space between them."""
    return text.split()


def phrase_list(text: str) -> list[str]:
    """Phrases with commas between them; line breaks count as spaces."""
    return " ".join(text.split()).split(", ")


def pair_table(text: str) -> dict[str, str]:
    """Pairs such as ``dog:puppy`` with white space between them."""
    return dict(pair.split(":") for pair in text.split())
