"""What a question is about, by the keywords that Re-SpS sorts its training questions with (its
Table 3).

The first category with a keyword anywhere in the lower-cased text wins, inside longer words too:
"how" is found in "show". So it describes keywords more than questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

KEYWORDS = {  # in the order in which they are tried
    "Writing": ("write", "compose", "draft", "create", "blog", "email", "letter"),
    "Coding": ("code", "program", "function", "algorithm", "debug", "python", "java", "javascript"),
    "Math": ("math", "calculate", "solve", "equation", "formula", "number"),
    "Reasoning": ("analyze", "explain", "reasoning", "why", "how", "logic"),
    "Roleplay": ("roleplay", "pretend", "imagine", "act as", "you are"),
    "Extraction": ("extract", "summarize", "information", "data", "facts"),
    "Humanities": ("translate", "language", "meaning", "definition"),
}
OTHER = "General"


def category(text: str) -> str:
    """The category of a question.

    >>> category("Show me a river."), category("Name a river.")
    ('Reasoning', 'General')
    """
    lower = text.lower()
    return next(
        (name for name, words in KEYWORDS.items() if any(word in lower for word in words)), OTHER
    )


def composition(texts: Iterable[str]) -> list[dict]:
    """One row per category, and one of all: category, questions, share_pct."""
    counts = Counter(map(category, texts))
    names, total = sorted({*KEYWORDS, OTHER}), sum(counts.values())
    rows = [{"category": name, "questions": counts[name]} for name in names]
    rows.append({"category": "Total", "questions": total})
    return [row | {"share_pct": 100 * row["questions"] / max(1, total)} for row in rows]
