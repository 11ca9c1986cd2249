"""``python docs/check_site.py FOLDER``: every link and picture of a built site is there, none from elsewhere.

Exits with 1 and names what is broken.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit


def broken(site: Path) -> list[str]:
    """What does not lead anywhere, as PAGE: TARGET; anchors are mkdocs' own to check."""
    found = []
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":  # its links begin at the root of a server
            continue
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            link = urlsplit(target)
            if link.scheme or link.netloc or not link.path:
                continue
            place = (page.parent / unquote(link.path)).resolve()
            if not (place / "index.html" if place.is_dir() else place).exists():
                found.append(f"{page.relative_to(site)}: {target}")
        loaded = re.findall(
            r'<(?:script|img)[^>]+src="(https?:[^"]+)|<link rel="stylesheet" href="(https?:[^"]+)', text
        )
        found += [f"{page.relative_to(site)}: loads {''.join(one)}" for one in loaded]
    return found


if __name__ == "__main__":
    faults = broken(Path(sys.argv[1]))
    print("\n".join(faults) or f"{sum(1 for _ in Path(sys.argv[1]).rglob('*.html'))} pages, every link leads somewhere")
    sys.exit(bool(faults))
