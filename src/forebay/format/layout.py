"""Where things are inside a cache. No other module builds a key.

cache.json                            format version, cache id, base layer
plan/000000.safetensors               append-only segments: chunk -> files and ranges
identities/000000.<hash>.safetensors  the samples that a segment kept, where its recipe deduplicates
layers/<layer>/recipe.json            the recipe, readable, with its fingerprint
layers/<layer>/constants.safetensors  columns equal for all rows
layers/<layer>/000035.safetensors     immutable rows
layers/<layer>/000035.r1.safetensors  the same chunk, rebuilt with other bytes
generations/000003.safetensors        what is published, create-only
claims/<layer>/000035.1.json          who computes a chunk
"""

import re

FORMAT_VERSION = 1

CACHE = "cache.json"
GENERATIONS = "generations/"
PLAN = "plan/"
IDENTITIES = "identities/"
LAYERS = "layers/"
CLAIMS = "claims/"

_NUMBERED = re.compile(r"(\d{6,})\.safetensors")
_CHUNK = re.compile(r"(\d{6,})(?:\.r([1-9]\d*))?\.safetensors")
_CLAIM = re.compile(r"(\d{6,})\.([1-9]\d*)\.json")
_IDENTITIES = re.compile(r"(\d{6,})\.[0-9a-f]{16}\.safetensors")
_LAYER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def is_layer_name(name: str) -> bool:
    return _LAYER.fullmatch(name) is not None


def generation(number: int) -> str:
    return f"{GENERATIONS}{number:06d}.safetensors"


def plan_segment(number: int) -> str:
    return f"{PLAN}{number:06d}.safetensors"


def identities(segment: int, digest: str) -> str:
    """Named by its content too, so that planners of the same segment cannot take each other's file for their own."""
    return f"{IDENTITIES}{segment:06d}.{digest[:16]}.safetensors"


def recipe(layer: str) -> str:
    return f"{LAYERS}{layer}/recipe.json"


def constants(layer: str) -> str:
    return f"{LAYERS}{layer}/constants.safetensors"


def layer_folder(layer: str) -> str:
    return f"{LAYERS}{layer}/"


def chunk(layer: str, index: int, revision: int = 0) -> str:
    suffix = f".r{revision}" if revision else ""
    return f"{LAYERS}{layer}/{index:06d}{suffix}.safetensors"


def claims_folder(layer: str) -> str:
    return f"{CLAIMS}{layer}/"


def claim(layer: str, index: int, attempt: int) -> str:
    return f"{CLAIMS}{layer}/{index:06d}.{attempt}.json"


def parse_numbered(key: str) -> int | None:
    """The number of a generation or a plan segment, None for a key that is neither."""
    found = _NUMBERED.fullmatch(key.rpartition("/")[2])
    return int(found[1]) if found else None


def parse_identities(key: str) -> int | None:
    """The segment that a file of identities was written for, None for another key."""
    found = _IDENTITIES.fullmatch(key.rpartition("/")[2])
    return int(found[1]) if found else None


def parse_chunk(key: str) -> tuple[int, int] | None:
    """(chunk, revision) of a chunk's key, None for another key."""
    found = _CHUNK.fullmatch(key.rpartition("/")[2])
    return (int(found[1]), int(found[2] or 0)) if found else None


def parse_claim(key: str) -> tuple[int, int] | None:
    """(chunk, attempt) of a claim's key, None for another key."""
    found = _CLAIM.fullmatch(key.rpartition("/")[2])
    return (int(found[1]), int(found[2])) if found else None


def is_known(key: str, layers: set[str]) -> bool:
    """Whether a key is one that this module makes, for layers that there are."""
    folder, _, name = key.rpartition("/")
    if not folder:
        return key == CACHE
    if f"{folder}/" in (GENERATIONS, PLAN):
        return parse_numbered(key) is not None
    if f"{folder}/" == IDENTITIES:
        return parse_identities(key) is not None
    top, _, layer = folder.partition("/")
    if layer not in layers:
        return False
    if f"{top}/" == CLAIMS:
        return parse_claim(key) is not None
    return f"{top}/" == LAYERS and (name in ("recipe.json", "constants.safetensors") or parse_chunk(key) is not None)
