"""Configuration of the documentation site; docs/README.md has the commands."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_extensions")]

import tsfl_jax  # noqa: E402

project = "tsfl_jax"
author = copyright = "the authors of tsfl_jax"
release = version = tsfl_jax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "api_pages",
    "docstrings",
    "formulas",
    "markdown_pages",
]
# Notebooks are stored with their outputs; the Markdown beside each is its source.
exclude_patterns = ["_build", "tutorials/*.md"]
nb_execution_mode = "off"
nb_merge_streams = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4  # GitHub's anchors, so that links work on both sites

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
default_role = "py:obj"
# Names of this package must exist; words in backticks may also be arguments and files.
nitpicky = True
nitpick_ignore_regex = [("py:obj", r"(?!tsfl_jax\.).*"), ("py:.*", r"(?!tsfl_jax).*")]

html_theme = "furo"
html_title = f"tsfl_jax {version}"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
