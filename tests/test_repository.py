"""What a maintainer keeps beside the code agrees with it: the version, exact versions, workflows, guides and links."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import links
import words
import yaml
from packaging.requirements import Requirement

import specdec

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {
    path.name: path.read_text() for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
FORMS = sorted(
    set((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"}
)


def test_versions_are_said_once_exact_and_installed():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == specdec.__version__
    assert metadata.version("specdec") == specdec.__version__
    released = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[:2] == ["Unreleased", specdec.__version__]
    lines = (ROOT / ".github" / "constraints.txt").read_text().splitlines()
    exact = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"==[^*,+]+", str(one.specifier)) for one in exact)
    pinned = {re.sub(r"[-_.]+", "-", one.name).lower(): str(one.specifier)[2:] for one in exact}
    for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]:
        asked = Requirement(line)
        assert asked.specifier.contains(pinned[asked.name.replace("_", "-")]), line
    makefile = (ROOT / "Makefile").read_text()
    installs = [
        line for line in makefile.splitlines() if "pip install" in line and not line.startswith("#")
    ]
    assert len(installs) == 1 and "-c $(CONSTRAINTS)" in installs[0]
    assert "CONSTRAINTS = .github/constraints.txt" in makefile


def steps(text: str) -> list[dict]:
    return [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]


def test_workflows_and_guides_name_what_is_there():
    text = WORKFLOWS["ci.yml"]
    runs = "\n".join(step.get("run", "") for step in steps(text))
    for command in ("make test", "make lint", "python -m specdec.book run", "python .ci/links.py"):
        assert command in runs, command
    asked = yaml.safe_load(text)["jobs"]["test"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: 3."
    assert [prefix + version[2:] for version in asked] == [
        c for c in PROJECT["classifiers"] if c.startswith(prefix)
    ]
    guide = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:specdec|tests|notebooks|figures|\.github)/[\w./*-]+)", guide)
    assert len(named) > 15 and all(
        list(ROOT.glob(name.rstrip("/").replace("NAME", "*"))) for name in named
    )
    for file, listed in re.findall(r"`([\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)", guide):
        for name in re.findall(r"\w+", listed):
            assert re.search(rf"^ *(?:def |class )?{name}\b", (ROOT / file).read_text(), re.M), (
                f"{file} has no {name}"
            )


def test_workflows_are_careful_and_issue_forms_ask_for_something():
    for name in WORKFLOWS:
        workflow = yaml.safe_load(WORKFLOWS[name])
        assert workflow["permissions"] == {"contents": "read"}
        assert all(
            "timeout-minutes" in job and "runs-on" in job for job in workflow["jobs"].values()
        )
        for step in steps(WORKFLOWS[name]):
            assert ("uses" in step) != ("run" in step)
            assert "@" in step.get("uses", "@") and "${{ github.event" not in step.get("run", "")
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form)
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids)) and any(
            part.get("validations", {}).get("required") for part in form["body"]
        )


def test_links_lead_somewhere_and_broken_ones_are_seen(tmp_path):
    assert not links.broken(ROOT)
    text = "# One `two`\n[x](b.md) [y](#one-two) [z](#three) [w](c.md#one) [v](c.md#row) `[no](code.md)`"
    (tmp_path / "a.md").write_text(f'{text} [<img src="d.png" width="9">](c.md)\n')
    (tmp_path / "c.md").write_text('# Two\n<a id="row"></a>\n')
    assert links.broken(tmp_path) == ["a.md: b.md", "a.md: #three", "a.md: c.md#one", "a.md: d.png"]


def test_phrases_to_avoid_are_not_used_and_are_seen(tmp_path):
    assert not words.avoided(ROOT)
    (tmp_path / "specdec").mkdir()
    (tmp_path / "a.md").write_text("At\nhand; `whoever`.\n\n```\nneed be\n```\nIt goes on.\n")
    (tmp_path / "specdec" / "b.py").write_text('x = "for good"\n"""One.\n\nSomebody."""\n')
    found = sorted(line.partition(" (")[0].rpartition("/")[2] for line in words.avoided(tmp_path))
    assert found == ["a.md:1: At hand", "a.md:7: goes on", "b.py:1: for good", "b.py:4: Somebody"]
