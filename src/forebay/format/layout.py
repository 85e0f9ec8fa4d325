"""The keys of a cache, and its two JSON documents. No other module builds a key.

cache.json                            format version, cache id, base layer
plan/000000.safetensors               append-only segments: chunk -> files and ranges
plan/dropped/<layer>.0.json           the recipe of a layer that was dropped: its revisions up to 0 do not count
identities/000000.<hash>.safetensors  hashes of the samples that a segment kept, if its recipe deduplicates
layers/<layer>/recipe.json            the recipe, readable, with its fingerprint
layers/<layer>/constants.safetensors  columns that are the same for all rows
layers/<layer>/constants.<hash>.safetensors   the same, of a layer that was dropped or replaced
layers/<layer>/000035.safetensors     a chunk: immutable rows
layers/<layer>/000035.r1.safetensors  revision 1 of the same chunk
generations/000003.safetensors        what is published, create-only
claims/<layer>/000035.1.json          the builder that computes a chunk
builders/<owner>.json                 the heartbeat of a builder, with its progress
builders/<owner>.000003.safetensors   chunks that it made, left to another builder to list; gone when they are listed
builders/<owner>.listed.safetensors   what the last generation lists, for a builder that ends and need not read it
planning/<hash>.bin                   what planning has found so far; gone when the plan is written
planning/000000.1.json                the builder that plans a segment; gone when the plan is written
seen.bin                              which content source files were found to have at a new time, advisory
dataset.json                          the name of the data set, advisory

A generation has a copy of both documents. A malformed document raises `IndexCorrupt`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from forebay.errors import ForebayError, FormatTooNew, IndexCorrupt
from forebay.recipe import RecipeDocument, input_layers
from forebay.source import MOST_LEVELS, is_shallow

FORMAT_VERSION = 1
CACHE = "cache.json"
SEEN = "seen.bin"
DATASET = "dataset.json"
GENERATIONS = "generations/"
PLAN = "plan/"
DROPPED = "plan/dropped/"
IDENTITIES = "identities/"
LAYERS = "layers/"
CLAIMS = "claims/"
BUILDERS = "builders/"
PLANNING = "planning/"
MAX_NUMBER = 10**15  # of a chunk, a segment or a generation; sums of many fit int64
MAX_REVISION = 10**9
# Six digits, or more without leading zeros, so that a file has one name. ASCII digits: `\d` matches others too.
_NUMBER = r"([0-9]{6}|[1-9][0-9]{6,14})"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}"
_GENERATION = re.compile(rf"generations/{_NUMBER}\.safetensors")
_SEGMENT = re.compile(rf"plan/{_NUMBER}\.safetensors")
_CHUNK = re.compile(rf"layers/{_NAME}/{_NUMBER}(?:\.r([1-9][0-9]{{0,8}}))?\.safetensors")
_DROPPED = re.compile(rf"{DROPPED}({_NAME})\.(0|[1-9][0-9]{{0,8}})\.json")
_CONSTANTS = re.compile(rf"layers/{_NAME}/constants\.[0-9a-f]{{16}}\.safetensors")
_CLAIM = re.compile(rf"(?:claims/{_NAME}|planning)/{_NUMBER}\.([1-9][0-9]{{0,8}})\.json")
_OWNER = r"([0-9A-Za-z]{1,64}-[1-9][0-9]{0,9}-(?:0|[1-9][0-9]{0,18}))"
_BUILDER = re.compile(rf"{BUILDERS}{_OWNER}\.json")
_HANDED = re.compile(rf"{BUILDERS}{_OWNER}\.{_NUMBER}\.safetensors")
_LISTED = re.compile(rf"{BUILDERS}{_OWNER}\.listed\.safetensors")
_IDENTITIES = re.compile(rf"identities/{_NUMBER}\.[0-9a-f]{{16}}\.safetensors")
_PLANNING = re.compile(r"planning/[0-9a-f]{32}\.bin")
_RECIPE = re.compile(rf"layers/({_NAME})/recipe\.json")
_LAYER = re.compile(_NAME)
LAYER_PATTERN = rf"\A{_NAME}\Z"


def is_layer_name(name: str) -> bool:
    """Whether a layer may have this name: up to 128 letters, digits, - and _, not starting with -."""
    return _LAYER.fullmatch(name) is not None


def generation(number: int) -> str:
    return f"{GENERATIONS}{number:06d}.safetensors"


def plan_segment(number: int) -> str:
    return f"{PLAN}{number:06d}.safetensors"


def identities(segment: int, digest: str) -> str:
    """The key has a content hash, so that two planners of one segment write different files."""
    return f"{IDENTITIES}{segment:06d}.{digest[:16]}.safetensors"


def recipe(layer: str) -> str:
    return f"{LAYERS}{layer}/recipe.json"


def constants(layer: str) -> str:
    return f"{LAYERS}{layer}/constants.safetensors"


def dropped_constants(layer: str, digest: str) -> str:
    """Where constants stay for the generations before a layer was dropped, by their SHA-256."""
    return f"{LAYERS}{layer}/constants.{digest[:16]}.safetensors"


def dropped(layer: str, revision: int) -> str:
    return f"{DROPPED}{layer}.{revision}.json"


def layer_folder(layer: str) -> str:
    return f"{LAYERS}{layer}/"


def chunk(layer: str, index: int, revision: int = 0) -> str:
    suffix = f".r{revision}" if revision else ""
    return f"{LAYERS}{layer}/{index:06d}{suffix}.safetensors"


def planning(digest: str) -> str:
    return f"{PLANNING}{digest}.bin"


def is_planning(key: str) -> bool:
    """Whether a key is of something that planning found."""
    return _PLANNING.fullmatch(key) is not None


def claims_folder(layer: str | None) -> str:
    """Where the chunks of a layer are claimed; without a layer, the segments of the plan."""
    return PLANNING if layer is None else f"{CLAIMS}{layer}/"


def claim(layer: str | None, index: int, attempt: int) -> str:
    return f"{claims_folder(layer)}{index:06d}.{attempt}.json"


def builder(owner: str) -> str:
    return f"{BUILDERS}{owner}.json"


def handed(owner: str, number: int) -> str:
    return f"{BUILDERS}{owner}.{number:06d}.safetensors"


def listed(owner: str) -> str:
    return f"{BUILDERS}{owner}.listed.safetensors"


def parse_generation(key: str) -> int | None:
    """The number of a generation's key, None for any other key."""
    return _number(_GENERATION, key)


def parse_segment(key: str) -> int | None:
    """The number of a plan segment's key, None for any other key."""
    return _number(_SEGMENT, key)


def parse_identities(key: str) -> int | None:
    """The segment of an identities key, None for any other key."""
    return _number(_IDENTITIES, key)


def parse_recipe(key: str) -> str | None:
    """The layer of a recipe's key, None for any other key."""
    found = _RECIPE.fullmatch(key)
    return found[1] if found else None


def parse_chunk(key: str) -> tuple[int, int] | None:
    """(chunk, revision) of a chunk's key, None for any other key."""
    found = _CHUNK.fullmatch(key)
    return (int(found[1]), int(found[2] or 0)) if found else None


def parse_claim(key: str) -> tuple[int, int] | None:
    """(chunk or segment, attempt) of a claim's key, None for any other key."""
    found = _CLAIM.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None


def parse_builder(key: str) -> str | None:
    """The owner of a heartbeat's key, None for any other key."""
    found = _BUILDER.fullmatch(key)
    return found[1] if found else None


def parse_handed(key: str) -> str | None:
    """The owner of a key of chunks that are left to another builder to list, None for any other key."""
    found = _HANDED.fullmatch(key)
    return found[1] if found else None


def parse_listed(key: str) -> str | None:
    """The owner of a key that says what is listed, None for any other key."""
    found = _LISTED.fullmatch(key)
    return found[1] if found else None


def parse_dropped(key: str) -> tuple[str, int] | None:
    """(layer, revision) of the key of a layer that was dropped, None for any other key."""
    found = _DROPPED.fullmatch(key)
    return (found[1], int(found[2])) if found else None


def is_constants(key: str, layer: str) -> bool:
    """Whether a key is of a layer's constants, in use or of a generation before the layer was dropped."""
    return key == constants(layer) or (key.startswith(layer_folder(layer)) and _CONSTANTS.fullmatch(key) is not None)


def is_known(key: str, layers: set[str]) -> bool:
    """Whether this module can make a key, given the existing layers."""
    top, _, rest = key.partition("/")
    layer, _, name = rest.partition("/")
    if any(parse(key) is not None for parse in (parse_dropped, parse_builder, parse_handed, parse_listed)):
        return True
    if not name:
        numbers = (parse_generation(key), parse_segment(key), parse_identities(key))
        is_single = key in (CACHE, SEEN, DATASET) or is_planning(key) or parse_claim(key) is not None
        return is_single or any(number is not None for number in numbers)
    if layer not in layers:
        return False
    if f"{top}/" == CLAIMS:
        return parse_claim(key) is not None
    return key == recipe(layer) or is_constants(key, layer) or parse_chunk(key) is not None


def _number(pattern: re.Pattern[str], key: str) -> int | None:
    found = pattern.fullmatch(key)
    return int(found[1]) if found else None


LayerName = Annotated[str, msgspec.Meta(pattern=LAYER_PATTERN)]
_Document = TypeVar("_Document")


class CacheDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`cache.json`: written once, when a cache is created."""

    format_version: int = FORMAT_VERSION
    cache_id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z_-]{1,64}\Z")]
    base: LayerName


def decode_cache_document(text: bytes | str, root: str, where: str) -> CacheDocument:
    return _decode(text, CacheDocument, root, where)


def decode_recipe_document(text: bytes | str, layer: str, root: str, where: str) -> RecipeDocument:
    """The recipe of one layer."""
    kept = _decode(text, RecipeDocument, root, where)
    problem = _recipe_problem(kept, layer)
    if problem is not None:
        raise IndexCorrupt(root, where, problem)
    return kept


def check_no_cycle(recipes: Mapping[str, RecipeDocument]) -> None:
    """Raise `ValueError` if layers read each other in a cycle."""
    below = {name: [one for one in input_layers(kept) if one in recipes] for name, kept in recipes.items()}
    while below:
        free = [name for name, others in below.items() if not any(other in below for other in others)]
        if not free:
            raise ValueError(f"the layers {', '.join(sorted(below))} read each other in a cycle")
        below = {name: others for name, others in below.items() if name not in free}


def one_line(error: Exception) -> str:
    """An error's message on one line, shortened."""
    return " ".join(str(error).split())[:300]


def _decode(text: bytes | str, document: type[_Document], root: str, where: str) -> _Document:
    try:
        version = msgspec.json.decode(text, type=_Versioned).format_version
        if version > FORMAT_VERSION:
            raise FormatTooNew(f"{root}/{where}", version, FORMAT_VERSION)
        return msgspec.json.decode(text, type=document)
    except FormatTooNew:
        raise
    except RecursionError as error:
        raise IndexCorrupt(root, where, "its lists and objects are nested too deeply") from error
    except (msgspec.MsgspecError, ValueError, ForebayError) as error:
        raise IndexCorrupt(root, where, f"it cannot be read: {one_line(error)}") from error


class _Versioned(msgspec.Struct, frozen=True):
    """The version field, which every version of a document has."""

    format_version: Annotated[int, msgspec.Meta(ge=1)]


def _recipe_problem(kept: RecipeDocument, layer: str) -> str | None:
    names = [column.name for column in kept.columns]
    if kept.layer != layer:
        return f"it is the recipe of layer {kept.layer[:80]!r}"
    if len(set(names)) != len(names):
        return "it has two columns with one name"
    if kept.sample_ids and kept.sample_ids not in names:
        return f"its sample ids name the column {kept.sample_ids[:80]!r}, which does not exist"
    if not is_shallow(kept.fields):
        return f"its fields are nested more than {MOST_LEVELS} levels deep"
    return None
