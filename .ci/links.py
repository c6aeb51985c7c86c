"""Links of every Markdown file and notebook: do they lead somewhere? `python .ci/links.py [--outside]`.

Files and headings are looked up here. `--outside` asks the web servers of http addresses, too, and lists those that answer
with an error; a server that cannot be reached is told but is no failure.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LINK = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|<\w[^<>]* (?:src|href)=\"([^\"]+)\""
)
GONE = (404, 410)


def files(root: Path) -> list[Path]:
    """Markdown files and notebooks under version control; all there are where git knows nothing."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    names = (
        listed.stdout.split("\0")
        if listed.returncode == 0
        else [str(path) for path in root.rglob("*")]
    )
    return [root / name for name in sorted(names) if name.endswith((".md", ".ipynb"))]


def prose(path: Path) -> str:
    """The text of a file without its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def links_of(path: Path) -> list[str]:
    """The goals of links in Markdown, and of pictures and links in HTML."""
    return [link or other for link, other in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(path)))]


def anchors(path: Path) -> set[str]:
    """The headings of a file as GitHub and JupyterLab link to them, and places that are named in HTML."""
    titles = re.findall(r"^#+ +(.+?)\s*$", prose(path), re.M)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    return {
        *plain,
        *re.findall(r'<a id="([^"]+)"', prose(path)),
        *(title.replace(" ", "-") for title in titles),
    }


def broken(root: Path) -> list[str]:
    """'file: link' for every link to a file or heading that is not there."""
    found = []
    for path in files(root):
        for link in links_of(path):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, heading = link.partition("#")
            goal = (path.parent / name).resolve() if name else path
            lost = (
                heading
                and goal.suffix in (".md", ".ipynb")
                and goal.is_file()
                and heading not in anchors(goal)
            )
            if not goal.exists() or lost:
                found.append(f"{path.relative_to(root)}: {link}")
    return found


def ask(address: str) -> str | None:
    """What is wrong with an address; None where its server answers, or cannot be asked."""
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0 (link check)"})
    try:
        urllib.request.urlopen(request, timeout=20).close()
    except urllib.error.HTTPError as error:
        return f"{address}: {error.code}" if error.code in GONE else None
    except (OSError, ValueError) as error:
        print(f"not reached: {address} ({error})")
    return None


def main(arguments: list[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    found = broken(root)
    if "--outside" in arguments:
        addresses = sorted(
            {link for path in files(root) for link in links_of(path) if link.startswith("http")}
        )
        with ThreadPoolExecutor(8) as workers:
            found += filter(None, workers.map(ask, addresses))
    print("\n".join(found) or "All links lead somewhere.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
