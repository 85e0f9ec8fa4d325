"""Draw records with rich; nothing here prints."""

from forebay.cli.render import reports, rows, state, summary  # noqa: F401 — each registers its drawings
from forebay.cli.render.drawing import draw as draw
