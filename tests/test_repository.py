"""The version, exact versions, workflows, guides and links agree with the code."""

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


def test_versions_are_stated_once_exact_and_installed():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == specdec.__version__
    assert metadata.version("specdec") == specdec.__version__
    released = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[:2] == ["Unreleased", specdec.__version__]
    pinned = {}
    for line in (ROOT / ".github" / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            pinned[name] = re.fullmatch(r"==([^*,+]+)", str(requirement.specifier))[1]
    for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pinned[requirement.name.replace("_", "-")]), line
    installs = re.findall(r"^[^#\n]*pip install.*", (ROOT / "Makefile").read_text(), re.M)
    assert len(installs) == 1 and "-c $(CONSTRAINTS)" in installs[0]


def test_workflows_are_careful_and_run_the_commands():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert "timeout-minutes" in job
            for step in job["steps"]:
                assert "@" in step.get("uses", "@")
                assert "${{ github.event" not in step.get("run", "")
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for command in ("make test", "make lint", "python -m specdec.book run", "python .ci/links.py"):
        assert command in text, command


def test_links_lead_somewhere_and_phrases_to_avoid_are_not_used():
    assert not links.broken(ROOT)
    assert not words.avoided(ROOT)
