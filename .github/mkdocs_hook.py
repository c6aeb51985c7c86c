"""What the site needs beyond GitHub's own view: links out of figures/book lead to GitHub, and folded cells hold Markdown."""

import os
import re

REPOSITORY = os.environ.get("GITHUB_REPOSITORY", "")  # owner/name, which the workflow knows


def on_page_markdown(markdown: str, **_) -> str:
    """A page of figures/book for mkdocs, which calls this by name."""
    outside = f"https://github.com/{REPOSITORY}/blob/main/" if REPOSITORY else "../../"
    markdown = re.sub(r"(?<=\]\()\.\./\.\./", outside, markdown)
    return markdown.replace("<details>", "<details markdown>")
