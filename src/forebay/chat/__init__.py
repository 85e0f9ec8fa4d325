"""Conversations to packed tokens with spans: templates, layouts, encoding, packing."""

from typing import TYPE_CHECKING

from forebay.exports import lazy_exports

# fmt: off
# isort: off
if TYPE_CHECKING:
    from forebay.chat.cache_source import ChatCacheSource as ChatCacheSource, repack as repack
    from forebay.chat.conversations import (
        Conversation as Conversation, FieldNames as FieldNames, read_conversation as read_conversation,
    )
    from forebay.chat.preferences import PreferenceRecipe as PreferenceRecipe
    from forebay.chat.recipe import ChatRecipe as ChatRecipe
    from forebay.chat.rendering import ChatTemplate as ChatTemplate
    from forebay.chat.template import TemplateSource as TemplateSource, load_template as load_template
    from forebay.chat.trainers import prepared as prepared, write_dpo as write_dpo, write_sft as write_sft
# fmt: on
# isort: on

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)  # the process that renders templates imports none
