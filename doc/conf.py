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
html_theme = "alabaster"
html_theme_options = {"description": "Machines for continuous integration", "fixed_sidebar": True}
html_show_copyright = False
smartquotes = False
