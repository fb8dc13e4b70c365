"""`python -m docs._site.links runs/site`: does every link of the built site lead to a file, and to a place in it?"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of a page, and what it links to on this site."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids: set[str] = {"", "top"}
        self.targets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := given.get(name))}
        found = given.get("href") if tag in ("a", "link") else given.get("src")
        if found and not urlsplit(found).scheme and not found.startswith("//"):
            self.targets.append(found)


def broken(site: Path) -> list[str]:
    """Each link that leads nowhere, with its page."""
    written = (path for path in site.rglob("*.html") if "_static" not in path.parts)  # there are templates of the theme
    pages = {path.resolve(): Page(path) for path in written}
    found = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            other = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages[other].ids if other in pages else None
            if not other.exists() or (known is not None and unquote(parts.fragment) not in known):
                found.append(f"{path.relative_to(site.resolve())}: {target}")
    return sorted(set(found))


if __name__ == "__main__":
    wrong = broken(Path(sys.argv[1]))
    sys.exit("\n".join(wrong) if wrong else 0)
