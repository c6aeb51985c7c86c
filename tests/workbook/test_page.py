"""The page of all results: one file, nothing outside it, everything in it."""

import dataclasses

import pandas as pd
import pytest

from specdec import machine, runs
from specdec.identity import PAPER, Method

from workbook import claims, findings, items, page


@pytest.fixture(scope="module")
def shipped():
    """The ledger by what came with the checkout, which takes seconds."""
    return claims.ledger(shipped=True)


def test_readme_and_figures_show_findings_claims_and_items_with_their_verdicts(
    shipped, monkeypatch
):
    # `make figures` writes them.
    readme = (machine.checkout() / "README.md").read_text(encoding="utf-8")
    assert page.filled(readme, shipped) == readme
    for name in page.MARKED:
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, after = readme.partition(begin)[0], readme.partition(end)[2]
        assert page.filled(f"{before}{begin} old {end}{after}", shipped) == readme
    # `make figures` writes them; their links lead to one another (.ci/links.py looks at all).
    monkeypatch.setattr(runs, "home", machine.checkout)
    pages = [machine.checkout() / "figures" / name for name in ("claims.md", "README.md")]
    text, listed = (path.read_text(encoding="utf-8") for path in pages)
    assert text == page.claims_page(shipped) and listed == items.contents(shipped)
    for claim in claims.read_claims().values():
        assert claim.says in text and (f"claims.md#{claim.id})" in listed) == bool(claim.item), (
            claim.id
        )
    assert all(f'<a id="{item.anchor}"></a>' in listed for item in items.read_items().values())


def test_findings_are_the_rows_of_one_comparison():
    found = findings.read()
    tables = []
    for name in ("live", "replay"):
        rows = pd.read_parquet(found.run.path(f"{name}_t0.parquet"))
        tables.append(rows[rows["suite"] == "all"].set_index("method"))
    live, replayed = tables
    table = found.table().set_index(findings.HEADS[0])
    tuned = live.loc["tuned static", ["speedup", "speedup_low", "speedup_high"]]
    assert table.iloc[2].tolist() == ["{:.2f} [{:.2f}, {:.2f}]".format(*tuned), "1"]
    papers = [str(Method(name, PAPER)) for name in findings.SYSTEMS]
    ends = live.loc[papers, "speedup"].agg(["min", "max"])
    assert table.iloc[1, 0] == "{:.2f} to {:.2f}".format(*ends)
    ends = ["over_tuned", "over_tuned_prompts_low", "over_tuned_prompts_high"]
    bound = replayed.loc["clairvoyant", ends]
    expected = ["-", "{:.2f} [{:.2f}, {:.2f}]".format(*bound)]
    assert table.loc["clairvoyant bound"].tolist() == expected
    text = found.sentences()
    assert (
        f"would add {100 * (bound.iloc[0] - 1):.0f} %" in text and "only for LTD and RADAR" in text
    )
    assert f"Live: {live['prompts'].max()} prompts" in found.caption()
    better = found.replayed.assign(over_tuned=1.02, over_tuned_low=1.01, over_tuned_high=1.03)
    better = dataclasses.replace(found, replayed=better)
    assert "every interval excludes 0" in better.sentences()
