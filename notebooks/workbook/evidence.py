"""What decides a claim, in one sentence: the number, its interval, and what it needs to be.

1.53 × [1.43, 1.64], 27 prompts (Re-SpS, all suites); needs > 1; p = 1.1e-06 after Holm
"""

from __future__ import annotations

from decimal import Decimal

import pandas as pd

from specdec import runs

RATIOS = ("over", "speedup")  # how columns of ratios begin


def sentence(part: pd.Series, test: dict, p_value: float | None = None) -> str:
    """A row of parts and the limit of its test. p_value: after Holm, where intervals decide.

    >>> test = {"kind": "ratio_above", "value": "over_tuned", "above": 1}
    >>> part = {"name": "LTD", "value": 2.741, "low": 2.49, "high": 3.01, "prompts": 12}
    >>> sentence(pd.Series(part), test)
    '2.74 × [2.49, 3.01], 12 prompts (LTD); needs > 1'
    """
    sign = "<" if "below" in test else ">"
    limit = float(test.get("below", test.get("above", 0.0)))
    scale, unit = _unit(test)
    needed = f"needs {sign} {scale * limit:g}"
    if unit == " %":
        needed += unit
    if test["kind"] == "extreme":
        needed = f"may differ by {limit:g}"
    elif test["kind"] == "share" and limit > 0.999:
        needed = "needs all"
    if p_value is not None:
        needed += f"; p = {p_value:.2g} after Holm"
    return f"{number(part, test, limit)}; {needed}"


def number(part: pd.Series, test: dict, limit: float) -> str:
    """'2.74 × [2.49, 3.01], 12 prompts (LTD, all suites)', with decimals that tell the limit."""
    name, value, low, high = part[["name", "value", "low", "high"]]
    if test["kind"] == "extreme":
        return name
    scale, unit = _unit(test)
    # neither one end missing nor both the same
    has_interval = low < high
    if test["kind"] == "share":
        if has_interval:
            name += f" [{scale * low:.0f}, {scale * high:.0f}] %"
        return name
    numbers = [scale * value]
    if has_interval:
        numbers += [scale * low, scale * high]
    text, *ends = _printed(numbers, scale * limit)
    text += unit
    if test["kind"] == "signed_rank":
        text = f"p = {value:.2g}"
    if ends:
        text += f" [{', '.join(ends)}]"
    if part["prompts"]:
        text += f", {part['prompts']} prompts"
    return f"{text} ({name})"


def unmeasured(test: dict, tables: list[str]) -> str:
    """Which notebook would measure the rows of a test."""
    where = f"a run {test['run']!r}"
    for path in (runs.workbook() / "notebooks").glob(f"[0-9]*_{test['run']}.ipynb"):
        where = f"notebook {path.stem}"
    return f"Not measured yet: {where} writes these rows ({' or '.join(tables)})"


def _unit(test: dict) -> tuple[int, str]:
    """What the numbers of a test are multiplied by to be read, and the unit behind them."""
    kind, value = test["kind"], test.get("value", "")
    is_ratio = kind == "ratio_above"
    if kind == "share" or (is_ratio and value.endswith("_frac")):
        return 100, " %"
    if kind == "paired_ratio" or (is_ratio and ("over" in test or value.startswith(RATIOS))):
        return 1, " ×"
    return 1, " apart" if kind == "adds_up" else ""


def _printed(numbers: list[float], limit: float) -> list[str]:
    """With two decimals; none where all are whole, more where one looks like the limit."""
    least = max(0, -Decimal(f"{limit:g}").as_tuple().exponent)
    if any(number != int(number) for number in numbers):
        least = max(2, least)
    for decimals in range(least, 6):
        close = [round(number, decimals) == round(limit, decimals) for number in numbers]
        if not any(near and number != limit for near, number in zip(close, numbers, strict=True)):
            break
    return [f"{number:.{decimals}f}" for number in numbers]
