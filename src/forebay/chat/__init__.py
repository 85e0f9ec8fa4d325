"""Conversations to packed tokens with spans: templates, layouts, encoding, packing."""

from forebay.chat.cache_source import ChatCacheSource, repack
from forebay.chat.conversations import Conversation, FieldNames, read_conversation
from forebay.chat.packed_view import PackedView, packed_view
from forebay.chat.preferences import PreferenceRecipe
from forebay.chat.recipe import ChatRecipe
from forebay.chat.template import ChatTemplate, TemplateSource, load_template
from forebay.chat.trainers import prepared, write_dpo, write_sft

__all__ = [
    "ChatCacheSource",
    "ChatRecipe",
    "ChatTemplate",
    "Conversation",
    "FieldNames",
    "PackedView",
    "PreferenceRecipe",
    "TemplateSource",
    "load_template",
    "packed_view",
    "prepared",
    "read_conversation",
    "repack",
    "write_dpo",
    "write_sft",
]
