"""Human-readable byte sizes."""

import re

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", 1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """
    >>> parse_size("16GB"), parse_size("1.5 MiB"), parse_size("4096")
    (16000000000, 1572864, 4096)
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; use 600MB, 16GB or 1GiB")
    size = int(float(match[1]) * unit)
    if size < 1:
        raise ValueError(f"{text!r} is not a size; it must be at least one byte")
    return size


def parse_bandwidth(text: str) -> float:
    """The bytes per second of a bandwidth in bits or bytes.

    >>> parse_bandwidth("1Gbit"), parse_bandwidth("100 MB/s")
    (125000000.0, 100000000.0)
    """
    rate = text.strip().lower().removesuffix("/s").removesuffix("ps").strip()
    if rate.endswith("bit"):
        return parse_size(rate.removesuffix("it")) / 8
    return float(parse_size(rate))


def as_bytes(size: int | str) -> int:
    """The number of bytes of a size that is an integer or a text like "16GB".

    >>> as_bytes(0), as_bytes("256MB")
    (0, 256000000)
    """
    if isinstance(size, str):
        return parse_size(size)
    if size < 0:
        raise ValueError(f"{size} is not a size; it must not be negative")
    return size
