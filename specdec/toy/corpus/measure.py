"""How varied a text is. Knows nothing about where the text came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def _grams(items: Sequence, n: int) -> list[tuple]:
    return [tuple(items[start : start + n]) for start in range(len(items) - n + 1)]


def distinct_n(texts: Iterable[str], n: int) -> float:
    """Distinct word n-grams divided by all word n-grams, pooled over texts; 1.0 when no text has n words."""
    grams = [gram for text in texts for gram in _grams(text.split(), n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loop_rate(items: str | Sequence, n: int = 4) -> float:
    """Fraction of the n-grams of one answer that already occurred earlier in it (words of a string, or token ids)."""
    grams = _grams(items.split() if isinstance(items, str) else items, n)
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
