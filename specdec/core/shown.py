"""A Generation as HTML for notebooks: the text with accepted drafts marked, speed and times.

Colours work on light and dark pages.
"""

from __future__ import annotations

from html import escape
from typing import Any

Generation = Any  # `records.Generation`, which uses this module to show itself

# The tree explorer uses the same colours: light, black, dark, white.
ACCEPTED = "#00664b"
BONUS = "#f2a93b"
SHADES = {"draft": "#a6cbe6", "policy": "#1a1a1a", "verify": "#0b5c94", "rest": "#ffffff"}
LOOKS = {
    "accepted": "background: rgba(0, 160, 115, 0.28); border-radius: 2px",
    "bonus": f"border-bottom: 2px solid {BONUS}",
    "plain": "",
}


def pieces(generation: Generation) -> list[tuple[str, str]]:
    """The text in order as (piece, "accepted" drafts, "bonus" or "plain"); joined, they are it.

    A character of several tokens belongs to the piece that completes it.
    """
    text = generation.text
    read = generation.read_text
    if text is None:
        return [(str(generation.tokens), "plain")]
    if read is None or not generation.rows:
        return [(text, "plain")]
    # 1. where pieces end, in tokens: the prefill's token, then each cycle's drafts and bonus
    end = generation.new_tok - sum(row.kept_tok for row in generation.rows)
    ends = [(end, "plain")]
    for row in generation.rows:
        ends.append((end + min(row.accepted_tok, row.kept_tok), "accepted"))
        end += row.kept_tok
        ends.append((end, "bonus"))
    # 2. where they end in the text, as far as whole characters reach
    parts = []
    begin = 0
    for end, kind in ends:
        prefix = read(generation.tokens[:end]).rstrip("\N{REPLACEMENT CHARACTER}")
        reach = max(begin, len(prefix)) if text.startswith(prefix) else begin
        parts.append((text[begin:reach], kind))
        begin = reach
    parts.append((text[begin:], "plain"))
    return [part for part in parts if part[0]]


def html(generation: Generation) -> str:
    """The HTML element of a Generation."""
    words = ""
    for piece, kind in pieces(generation):
        words += f'<span class="{kind}" style="{LOOKS[kind]}">{escape(piece)}</span>'
    facts = f"{generation.new_tok} tokens"
    if generation.rows:
        accepted = sum(min(row.accepted_tok, row.kept_tok) for row in generation.rows)
        facts += f", {accepted} of them drafted (green) · tau {generation.tau:.2f} tokens per cycle"
    if generation.total_ms:
        facts += (
            f" · {generation.tokens_per_s:.1f} tokens/s, prefill {generation.prefill_ms:.0f} ms"
        )
    for part in ("draft", "policy", "verify"):
        spent_ms = sum(getattr(row, f"{part}_ms") for row in generation.rows)
        if spent_ms:
            facts += f", {part} {spent_ms:.0f} ms"
    return (
        '<div class="specdec-generation" style="font-size: 13px; line-height: 1.5">'
        f'<div style="white-space: pre-wrap">{words}</div>'
        f'<div style="font-size: 11px; opacity: 0.8">{facts}</div></div>'
    )
