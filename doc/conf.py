"""Sphinx configuration of the manual: sphinx-build -W -q doc doc/_build"""

project = "Nodepool"
author = "The Nodepool authors"
copyright = "the Nodepool authors"
release = version = "11.0.0"

extensions: list[str] = []
root_doc = "index"
exclude_patterns = ["_build", "examples", "release-notes/fragments"]
highlight_language = "none"
html_theme = "alabaster"
html_theme_options = {"description": "Machines for continuous integration", "fixed_sidebar": True}
html_show_copyright = False
smartquotes = False
