"""Sphinx configuration of the manual: sphinx-build -W -q doc doc/_build"""

import pathlib
import re
import sys

sys.path[:0] = [
    str(pathlib.Path(__file__).parent / "ext"),
    str(pathlib.Path(__file__).parent.parent),
]

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
html_static_path, html_css_files = ["_static"], ["manual.css"]
html_show_copyright = False
smartquotes = False


def _level(app, pagename, templatename, context, doctree):
    """Give captions of contents a level, and prepare samples."""
    for part in ("body", "furo_navigation_tree"):
        if part in context:
            found = context[part].replace('role="heading"', 'role="heading" aria-level="2"')
            context[part] = re.sub("<pre>(.*?)</pre>", _sample, found, flags=re.DOTALL)


def _sample(found):
    """Let keyboards scroll a sample; manual.css wraps the lines of all but drawings and tables."""
    drawing = ' class="drawing"' if re.search(r"\+--|--&gt;", found[1]) else ""
    return f'<pre tabindex="0"{drawing}>{found[1]}</pre>'


def setup(app):
    app.connect("html-page-context", _level, priority=900)
