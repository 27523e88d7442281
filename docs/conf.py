"""How Sphinx builds these pages into a site (`make docs`). The site loads nothing from the network when it is read."""

project = "agent-rl"
html_title = "agent-rl"
html_theme = "furo"
html_show_sphinx = False
html_copy_source = False
extensions = ["myst_parser"]
myst_heading_anchors = 4
highlight_language = "text"
exclude_patterns = ["examples"]
suppress_warnings = ["toc.not_included"]  # research/ is linked from the pages and not in the menu
