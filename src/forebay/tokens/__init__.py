"""Text to packed tokens: vocabulary, encoders, packing, recipe."""

from forebay.tokens.encoders import decode
from forebay.tokens.packing import Pieces, pack_best_fit, split_documents
from forebay.tokens.recipe import TokenRecipe
from forebay.tokens.vocabulary import Vocabulary, load_vocabulary

__all__ = ["Pieces", "TokenRecipe", "Vocabulary", "decode", "load_vocabulary", "pack_best_fit", "split_documents"]
