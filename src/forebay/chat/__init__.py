"""Conversations to packed tokens with spans: templates, layouts, encoding, packing."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.chat.cache_source import ChatCacheSource, repack
    from forebay.chat.conversations import Conversation, FieldNames, read_conversation
    from forebay.chat.preferences import PreferenceRecipe
    from forebay.chat.recipe import ChatRecipe
    from forebay.chat.rendering import ChatTemplate
    from forebay.chat.template import TemplateSource, load_template
    from forebay.chat.trainers import prepared, write_dpo, write_sft

# Where each public name lives. The process that renders templates imports none of them.
_HOMES = {
    **dict.fromkeys(("ChatCacheSource", "repack"), "cache_source"),
    **dict.fromkeys(("Conversation", "FieldNames", "read_conversation"), "conversations"),
    "PreferenceRecipe": "preferences",
    "ChatRecipe": "recipe",
    "ChatTemplate": "rendering",
    **dict.fromkeys(("TemplateSource", "load_template"), "template"),
    **dict.fromkeys(("prepared", "write_dpo", "write_sft"), "trainers"),
}
__all__ = [
    "ChatCacheSource", "ChatRecipe", "ChatTemplate", "Conversation", "FieldNames", "PreferenceRecipe",
    "TemplateSource", "load_template", "prepared", "read_conversation", "repack", "write_dpo",
    "write_sft",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"forebay.chat.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'forebay.chat' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return list(__all__)
