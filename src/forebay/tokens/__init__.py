"""Text to packed tokens: vocabulary, encoders, packing, recipe."""

from forebay.tokens.encoders import decode
from forebay.tokens.packing import DocumentPieces, pack_best_fit, split_documents
from forebay.tokens.recipe import TokenRecipe
from forebay.tokens.vocabulary import Vocabulary, load_vocabulary

__all__ = [
    "DocumentPieces",
    "TokenRecipe",
    "Vocabulary",
    "decode",
    "load_vocabulary",
    "pack_best_fit",
    "split_documents",
]
