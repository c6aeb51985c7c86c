"""Links of Markdown files and notebooks that lead nowhere: `python .ci/links.py`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|<\w[^<>]* (?:src|href)=\"([^\"]+)\""
)


def files(root: Path) -> list[Path]:
    """Markdown files and notebooks under version control; all of them where git has none."""
    command = ["git", "ls-files", "-z"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.split("\0")
    paths = [root / name for name in sorted(names) if name] or sorted(root.rglob("*"))
    return [path for path in paths if path.suffix in (".md", ".ipynb")]


def prose(path: Path) -> str:
    """The text of a file without its code blocks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def links_of(path: Path) -> list[str]:
    """The goals of links in Markdown, and of pictures and links in HTML."""
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    return [markdown or html for markdown, html in LINK.findall(text)]


def anchors(path: Path) -> set[str]:
    """The headings of a file as GitHub and JupyterLab link to them, and places named in HTML."""
    names = set(re.findall(r'<a id="([^"]+)"', prose(path)))
    for title in re.findall(r"^#+ +(.+?)\s*$", prose(path), re.M):
        names.add(title.replace(" ", "-"))
        names.add(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
    return names


def broken(root: Path) -> list[str]:
    """'file: link' for every link to a file or heading that does not exist."""
    faults = []
    for path in files(root):
        for link in links_of(path):
            name, _, heading = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            goal = (path.parent / name).resolve() if name else path
            has_headings = goal.suffix in (".md", ".ipynb") and goal.is_file()
            if not goal.exists() or (heading and has_headings and heading not in anchors(goal)):
                faults.append(f"{path.relative_to(root)}: {link}")
    return faults


if __name__ == "__main__":
    faults = broken(ROOT)
    print("\n".join(faults) or "All links lead somewhere.")
    sys.exit(bool(faults))
