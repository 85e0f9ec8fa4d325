"""The page's own files, which are part of the package: modules, style, icon."""

from importlib.resources import files

STATIC = files("forebay.viewer") / "static"
TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
