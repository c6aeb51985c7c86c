"""What decides a claim, in one sentence: the number, its interval, on how many prompts it rests, and what it needs to be.

    1.53 × [1.43, 1.64], 27 prompts (Re-SpS, equal terms, all suites); needs > 1; p = 1.1e-06 after Holm

Knows the kinds of tests (`claims.TESTS`) by their names, and nothing about any method.
"""

from __future__ import annotations

from decimal import Decimal

from specdec import runs

from workbook.verdicts import Part

RATIOS = ("over", "speedup")  # how columns of ratios begin
MOST_DECIMALS = 5


def sentence(part: Part, test: dict, p_value: float | None = None) -> str:
    """The number of a part and the limit of its test. p_value: after Holm, where an interval decides.

    >>> sentence(Part("LTD, all suites", 2.741, 2.49, 3.01, 12), {"kind": "ratio_above", "value": "over_tuned", "above": 1})
    '2.74 × [2.49, 3.01], 12 prompts (LTD, all suites); needs > 1'
    """
    sign, limit = (
        ("<", float(test["below"])) if "below" in test else (">", float(test.get("above", 0.0)))
    )
    scale, unit = _unit(test)
    needed = f"needs {sign} {scale * limit:g}{unit if unit == ' %' else ''}"
    if test["kind"] == "extreme":
        needed = f"may differ by {limit:g}"
    elif test["kind"] == "share" and limit > 0.999:
        needed = "needs all"
    corrected = "" if p_value is None else f"; p = {p_value:.2g} after Holm"
    return f"{number(part, test, limit)}; {needed}{corrected}"


def number(part: Part, test: dict, limit: float) -> str:
    """'2.74 × [2.49, 3.01], 12 prompts (LTD, all suites)', with the decimals that tell it from the limit."""
    scale, unit = _unit(test)
    ends = [part.low, part.high] if part.told and not part.exact else []
    value, *ends = _printed([scale * one for one in (part.value, *ends)], scale * limit)
    interval = f" [{', '.join(ends)}]" if ends else ""
    if test["kind"] == "extreme":
        return part.name
    if test["kind"] == "share":
        return part.name + f" [{scale * part.low:.0f}, {scale * part.high:.0f}] %" * bool(ends)
    value = f"p = {part.value:.2g}" if test["kind"] == "signed_rank" else value + unit
    count = f", {part.prompts} prompts" if part.prompts else ""
    return f"{value}{interval}{count} ({part.name})"


def unmeasured(test: dict, tables: list[str]) -> str:
    """Which notebook would measure the rows of a test."""
    notebooks = (runs.workbook() / "notebooks").glob(f"[0-9]*_{test['run']}.ipynb")
    where = next((f"notebook {path.stem}" for path in notebooks), f"a run {test['run']!r}")
    return f"Not measured yet: {where} writes these rows ({' or '.join(tables)})"


def _unit(test: dict) -> tuple[int, str]:
    """What the numbers of a test are multiplied by to be read, and the unit behind them."""
    kind, value = test["kind"], test.get("value", "")
    if kind == "share" or (kind == "ratio_above" and value.endswith("_frac")):
        return 100, " %"
    if kind == "paired_ratio" or (
        kind == "ratio_above" and ("over" in test or value.startswith(RATIOS))
    ):
        return 1, " ×"
    return 1, " apart" if kind == "adds_up" else ""


def _printed(numbers: list[float], limit: float) -> list[str]:
    """The numbers with two decimals; none where all are whole, and more where one would look like the limit."""
    least = max(0, -Decimal(f"{limit:g}").as_tuple().exponent)
    least = least if all(one == int(one) for one in numbers) else max(2, least)
    for decimals in range(least, MOST_DECIMALS + 1):
        if all(one == limit or round(one, decimals) != round(limit, decimals) for one in numbers):
            break
    return [f"{one:.{decimals}f}" for one in numbers]
