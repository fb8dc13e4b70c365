"""Gives the package its README, with links that also work on the package index, and its URLs.

The address of the repository is not written down. Where GitHub builds a release, it is in the environment. Elsewhere,
the package has no URLs, and its README is as it is.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Metadata(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("GITHUB_REPOSITORY")
        if repository:
            address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
            files = f"{address}/blob/{os.environ.get('GITHUB_REF_NAME', 'main')}"
            readme = re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({files}/\1)", readme)
            metadata["urls"] = {
                "Repository": address,
                "Issues": f"{address}/issues",
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
