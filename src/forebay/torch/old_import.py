"""Importing a teacher cache of the old format: a base layer of row numbers, then a layer for each thing it holds."""

import os

from forebay import api
from forebay.cache.records import ImportReport
from forebay.errors import SourceNotFound
from forebay.torch.old_recipe import ImportedRows, OldCacheSource


def import_old(old: str | os.PathLike[str], root: str | os.PathLike[str]) -> ImportReport:
    """Make a cache of a `cache.pt`, or of a folder of its parts. As with any build, what is there is not made again."""
    if not os.path.exists(old):
        raise SourceNotFound(os.fspath(old), "there is no such file or folder")
    source = OldCacheSource(os.path.abspath(old))
    recipes = source.recipes()  # an old cache that cannot be read leaves nothing behind
    base = api.build(root, source, ImportedRows(), workers=0)
    layers = {layer: api.build(root, None, recipe, layer=layer, workers=0) for layer, recipe in recipes.items()}
    return ImportReport(root=base.root, old=source.path, rows=api.summarize(root).rows, layers=layers)
