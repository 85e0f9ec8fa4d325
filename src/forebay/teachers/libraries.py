"""Which versions of the libraries that run models are installed: recorded in generations, never in chunks."""

from importlib.metadata import PackageNotFoundError, version


def library_versions(*names: str) -> dict[str, str]:
    """Those of some libraries that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
