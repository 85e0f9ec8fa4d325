"""The keys of a cache, and its two JSON documents. No other module builds a key.

cache.json                                    format version, cache id, base layer
plan/000000.safetensors                       append-only segments: chunk -> files and ranges
identities/000000.<hash>.safetensors          sample hashes of a segment, if its recipe deduplicates
recipes/<layer>.json                          binds a layer name to one recipe; `drop` deletes it
layers/<layer>.<fp>/constants.safetensors     columns that are equal for all rows
layers/<layer>.<fp>/000035.safetensors        a chunk: immutable rows
generations/000003.safetensors                published records, recipes, plan digests
claims/<layer>.<fp>/000035.json               the builder that makes a chunk, advisory
claims/plan.json, claims/publish.json         the builder that plans or publishes, advisory
builders/<owner>.json                         heartbeat and progress of a builder, advisory

<fp> is the first 16 hex digits of the recipe fingerprint: another recipe under the same layer name has another folder.
A generation has a copy of `cache.json` and of every recipe. A malformed document raises `IndexCorrupt`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from forebay.errors import ForebayError, FormatTooNew, IndexCorrupt
from forebay.recipe import RecipeDocument, input_layers
from forebay.source import MOST_LEVELS, is_shallow
from forebay.store.base import index_corrupt

FORMAT_VERSION = 2  # of documents, index files and selections
CHUNK_VERSION = 1  # of chunk files
CACHE = "cache.json"
GENERATIONS = "generations/"
PLAN = "plan/"
IDENTITIES = "identities/"
RECIPES = "recipes/"
LAYERS = "layers/"
CLAIMS = "claims/"
BUILDERS = "builders/"
PLAN_CLAIM = "claims/plan.json"
PUBLISH_CLAIM = "claims/publish.json"
MAX_NUMBER = 10**15  # of a chunk, a segment or a generation; sums of many fit int64
FINGERPRINT_DIGITS = 16  # of a recipe fingerprint in the name of a layer folder
SUFFIX = ".safetensors"
# Six digits, or more without leading zeros, so that a file has one name. ASCII digits: `\d` matches others too.
_NUMBER = r"([0-9]{6}|[1-9][0-9]{6,14})"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}"
_FINGERPRINT = rf"[0-9a-f]{{{FINGERPRINT_DIGITS}}}"
_GENERATION = re.compile(rf"generations/{_NUMBER}\.safetensors")
_SEGMENT = re.compile(rf"plan/{_NUMBER}\.safetensors")
_IDENTITIES = re.compile(rf"identities/{_NUMBER}\.[0-9a-f]{{16}}\.safetensors")
_RECIPE = re.compile(rf"recipes/({_NAME})\.json")
_CHUNK = re.compile(rf"(layers/{_NAME}\.{_FINGERPRINT}/){_NUMBER}\.safetensors")
_CONSTANTS = re.compile(rf"layers/{_NAME}\.{_FINGERPRINT}/constants\.safetensors")
_CLAIM = re.compile(rf"claims/({_NAME}\.{_FINGERPRINT}/){_NUMBER}\.json")
_OWNER = r"([0-9A-Za-z]{1,64}-[1-9][0-9]{0,9}-(?:0|[1-9][0-9]{0,18}))"
_BUILDER = re.compile(rf"builders/{_OWNER}\.json")
_LAYER = re.compile(_NAME)
LAYER_PATTERN = rf"\A{_NAME}\Z"


def is_layer_name(name: str) -> bool:
    """True for up to 128 letters, digits, - and _, not starting with -."""
    return _LAYER.fullmatch(name) is not None


def generation(number: int) -> str:
    return f"{GENERATIONS}{number:06d}{SUFFIX}"


def plan_segment(number: int) -> str:
    return f"{PLAN}{number:06d}{SUFFIX}"


def identities(segment: int, digest: str) -> str:
    """The key of identities; its content hash lets two planners of one segment write different files."""
    return f"{IDENTITIES}{segment:06d}.{digest[:16]}{SUFFIX}"


def recipe(layer: str) -> str:
    return f"{RECIPES}{layer}.json"


def layer_folder(layer: str, fingerprint: str) -> str:
    """The folder of a layer built by one recipe, with the `/` at its end.

    >>> layer_folder("tokens", "0123456789abcdef" * 4)
    'layers/tokens.0123456789abcdef/'
    """
    return f"{LAYERS}{layer}.{fingerprint[:FINGERPRINT_DIGITS]}/"


def document_folder(recipe: RecipeDocument) -> str:
    """The folder of the layer that a recipe document binds."""
    return layer_folder(recipe.layer, recipe.fingerprint)


def layer_of(folder: str) -> str:
    """The layer of a folder."""
    return folder.removeprefix(LAYERS).partition(".")[0]


def constants(folder: str) -> str:
    return f"{folder}constants{SUFFIX}"


def chunk(folder: str, number: int) -> str:
    """
    >>> chunk(layer_folder("tokens", "0123456789abcdef"), 35)
    'layers/tokens.0123456789abcdef/000035.safetensors'
    """
    return f"{folder}{number:06d}{SUFFIX}"


def claims_folder(folder: str) -> str:
    """Where the chunks of a layer folder are claimed."""
    return f"{CLAIMS}{folder.removeprefix(LAYERS)}"


def claim(folder: str, number: int) -> str:
    return f"{claims_folder(folder)}{number:06d}.json"


def builder(owner: str) -> str:
    return f"{BUILDERS}{owner}.json"


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
    match = _RECIPE.fullmatch(key)
    return match[1] if match else None


def parse_chunk(key: str) -> tuple[str, int] | None:
    """(folder, chunk) of a chunk's key, None for any other key."""
    match = _CHUNK.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def parse_claim(key: str) -> tuple[str, int] | None:
    """(layer folder, chunk) of a chunk claim's key, None for any other key."""
    match = _CLAIM.fullmatch(key)
    return (f"{LAYERS}{match[1]}", int(match[2])) if match else None


def parse_builder(key: str) -> str | None:
    """The owner of a heartbeat's key, None for any other key."""
    match = _BUILDER.fullmatch(key)
    return match[1] if match else None


def is_constants(key: str) -> bool:
    return _CONSTANTS.fullmatch(key) is not None


def is_known(key: str) -> bool:
    """True if this module can make the key."""
    if key in (CACHE, PLAN_CLAIM, PUBLISH_CLAIM) or is_constants(key):
        return True
    parsers = (
        parse_chunk,
        parse_claim,
        parse_generation,
        parse_segment,
        parse_identities,
        parse_recipe,
        parse_builder,
    )
    return any(parse(key) is not None for parse in parsers)


def _number(pattern: re.Pattern[str], key: str) -> int | None:
    match = pattern.fullmatch(key)
    return int(match[1]) if match else None


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
    document = _decode(text, RecipeDocument, root, where)
    problem = _recipe_problem(document, layer)
    if problem is not None:
        raise index_corrupt(root, where, problem)
    return document


def check_no_cycle(recipes: Mapping[str, RecipeDocument]) -> None:
    """Raise `ValueError` if layers read each other in a cycle."""
    below = {name: [one for one in input_layers(document) if one in recipes] for name, document in recipes.items()}
    while below:
        free = [name for name, others in below.items() if not any(other in below for other in others)]
        if not free:
            raise ValueError(f"the layers {', '.join(sorted(below))} read each other in a cycle")
        below = {name: others for name, others in below.items() if name not in free}


def one_line(error: Exception) -> str:
    """An error's message on one line, shortened."""
    return " ".join(str(error).split())[:300]


def old_version(version: int) -> str:
    """The problem of a file that a development version of forebay wrote."""
    return f"it has format version {version}, and this forebay reads version {FORMAT_VERSION}; build the cache again"


def _decode(text: bytes | str, document: type[_Document], root: str, where: str) -> _Document:
    try:
        version = msgspec.json.decode(text, type=_Versioned).format_version
        if version > FORMAT_VERSION:
            raise FormatTooNew(
                f"'{root}/{where}' has format version {version}; this forebay reads up to {FORMAT_VERSION}",
                hint="upgrade forebay",
            )
        if version < FORMAT_VERSION:
            raise index_corrupt(root, where, old_version(version))
        return msgspec.json.decode(text, type=document)
    except (FormatTooNew, IndexCorrupt):
        raise
    except RecursionError as error:
        raise index_corrupt(root, where, "its lists and objects are nested too deeply") from error
    except (msgspec.MsgspecError, ValueError, ForebayError) as error:
        raise index_corrupt(root, where, f"it cannot be read: {one_line(error)}") from error


class _Versioned(msgspec.Struct, frozen=True):
    """The version field, which every version of a document has."""

    format_version: Annotated[int, msgspec.Meta(ge=1)]


def _recipe_problem(document: RecipeDocument, layer: str) -> str | None:
    names = [column.name for column in document.columns]
    if document.layer != layer:
        return f"it is the recipe of layer {document.layer[:80]!r}"
    if len(set(names)) != len(names):
        return "it has two columns with one name"
    if document.sample_ids and document.sample_ids not in names:
        return f"its sample ids name the column {document.sample_ids[:80]!r}, which does not exist"
    if not is_shallow(document.fields):
        return f"its fields are nested more than {MOST_LEVELS} levels deep"
    return None
