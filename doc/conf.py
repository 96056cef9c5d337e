"""Sphinx configuration of the manual: sphinx-build -W -q doc doc/_build"""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parent / "ext"), str(pathlib.Path(__file__).parent.parent)]

project = "Nodepool"
author = "The Nodepool authors"
copyright = "the Nodepool authors"
release = version = "12.0.0"

extensions = ["driver_options", "driver_quality", "references", "myst_parser"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]
root_doc = "index"
exclude_patterns = ["_build", "ext", "examples", "release-notes/fragments"]
highlight_language = "none"
html_theme = "furo"
html_title = f"Nodepool {version}"
html_favicon = "../nodepool/web/static/icon.svg"
html_show_copyright = False
smartquotes = False


def _level(app, pagename, templatename, context, doctree):
    """Give captions of contents a level, and let keyboards scroll wide samples."""
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            found = context[part].replace('role="heading"', 'role="heading" aria-level="2"')
            context[part] = found.replace("<pre>", '<pre tabindex="0">')


def setup(app):
    app.connect("html-page-context", _level, priority=900)
