"""A Generation as HTML for notebooks: the text with accepted drafts marked, its speed, and where the time went.

Colours work on light and dark pages.
"""

from __future__ import annotations

from html import escape
from typing import Any

Generation = Any  # `records.Generation`, which uses this module to show itself

# The tree explorer uses the same colours.
ACCEPTED, BONUS = "#00664b", "#f2a93b"
SHADES = {
    "draft": "#a6cbe6",
    "policy": "#1a1a1a",
    "verify": "#0b5c94",
    "rest": "#ffffff",
}  # light, black, dark, white

LOOKS = {
    "accepted": "background: rgba(0, 160, 115, 0.28); border-radius: 2px",
    "bonus": f"border-bottom: 2px solid {BONUS}",
    "plain": "",
}


def pieces(generation: Generation) -> list[tuple[str, str]]:
    """The text in order as (piece, "accepted" drafts, "bonus" or "plain"); joined, the pieces are the text.

    A character of several tokens belongs to the piece that completes it.

    >>> from specdec.core.records import Generation
    >>> pieces(Generation([1, 2], 3, text="ab"))
    [('ab', 'plain')]
    """
    text, read = generation.text or "", generation.read_text
    if read is None or not generation.rows:
        return [(text, "plain")]
    end = generation.new_tok - sum(row.kept_tok for row in generation.rows)
    said, begin = [], 0
    ends = [
        (end, "plain")
    ]  # in tokens: the prefill's own one, then each cycle's drafts and bonus token
    for row in generation.rows:
        ends += [
            (end + min(row.accepted_tok, row.kept_tok), "accepted"),
            (end + row.kept_tok, "bonus"),
        ]
        end += row.kept_tok
    for end, kind in ends:
        known = read(generation.tokens[:end]).rstrip("\N{REPLACEMENT CHARACTER}")
        reach = max(begin, len(known)) if text.startswith(known) else begin
        said.append((text[begin:reach], kind))
        begin = reach
    return [(words, kind) for words, kind in (*said, (text[begin:], "plain")) if words]


def html(generation: Generation) -> str:
    """The HTML element of a Generation."""
    words = "".join(
        f'<span class="{kind}" style="{LOOKS[kind]}">{escape(piece)}</span>'
        for piece, kind in pieces(generation)
    )
    if generation.text is None:
        words = f"<em>no tokenizer: ids {escape(str(generation.tokens))}</em>"
    accepted = sum(min(row.accepted_tok, row.kept_tok) for row in generation.rows)
    facts = [f"{generation.new_tok} tokens"]
    if generation.rows:
        facts = [
            f"{facts[0]}, {accepted} of them drafted (green)",
            f"tau {generation.tau:.2f} tokens per cycle",
        ]
    if generation.total_ms:
        facts.append(f"{generation.tokens_per_s:.1f} tokens/s")
        facts.append(", ".join(f"{part} {ms:.0f} ms" for part, ms in times(generation)))
    return (
        '<div class="specdec-generation" style="font-size: 13px; line-height: 1.5">'
        f'<div style="white-space: pre-wrap">{words}</div>{time_bar(generation)}'
        f'<div style="font-size: 11px; opacity: 0.8">{" · ".join(facts)}</div></div>'
    )


def times(generation: Generation) -> list[tuple[str, float]]:
    """Milliseconds of the prefill and of each part of the cycles, without zeros."""
    sums = {
        part: sum(getattr(row, f"{part}_ms") for row in generation.rows)
        for part in ("draft", "policy", "verify")
    }
    parts = {"prefill": generation.prefill_ms, **sums}
    parts["rest" if generation.rows else "steps"] = max(
        0.0, generation.total_ms - sum(parts.values())
    )
    return [(part, ms) for part, ms in parts.items() if ms > 0]


def time_bar(generation: Generation) -> str:
    """These times as one thin bar; '' without times."""
    if not (whole := generation.total_ms):
        return ""
    bars = "".join(
        f'<span title="{part}: {ms:.0f} ms" style="width: {100 * ms / whole:.2f}%; background: {SHADES.get(part, "#8a8a8a")}">'
        "</span>"
        for part, ms in times(generation)
    )
    told = ", ".join(f"{part} {ms:.0f} ms" for part, ms in times(generation))
    style = (
        "display: flex; max-width: 420px; height: 7px; margin: 4px 0 1px; border: 1px solid #767676"
    )
    return f'<div role="img" aria-label="time: {told}" style="{style}">{bars}</div>'
