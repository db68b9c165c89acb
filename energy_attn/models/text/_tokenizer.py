"""The tokenizer of a checkpoint: text and chats to tokens, and tokens to text."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from energy_attn.kernels.internal import check_flag, received

from ..checkpoint._config import read_json
from ..checkpoint._folder import located
from ._template import chat_templates, check_messages, named_templates, plain, render
from ._text_stream import TextStream
from ._vocabulary import AbstractVocabulary, Tokens, ids, special_tokens, vocabulary


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """Text and chats to tokens, and tokens to text, as the files of a checkpoint say.

    Made by [`Tokenizer.load`][energy_attn.models.Tokenizer.load]. The tokens and the text of chats are
    those of transformers for the same files.

    Attributes:
        special_tokens: the tokens that have a name: `bos_token`, `eos_token`, `pad_token` and others.
        chat_templates: by name; `"default"` is the one that is used.

    Examples:
        >>> from importlib import resources
        >>> from energy_attn.models import Tokenizer
        >>> folder = resources.files("energy_attn") / "cli" / "demo" / "model"
        >>> template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
        >>> tokenizer = Tokenizer.load(folder, chat_template=template)
        >>> tokenizer.encode("né"), tokenizer.decode([110, 195, 169])
        ([110, 195, 169], 'né')
        >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
        'user: Hello\\n'
    """

    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    _vocabulary: AbstractVocabulary
    _folder: Path

    @classmethod
    def load(
        cls, directory: str | os.PathLike[str], *, chat_template: str | None = None
    ) -> "Tokenizer":
        """Reads the tokenizer of a checkpoint.

        These are `tokenizer.json`, by the library tokenizers, and, where they are, `tokenizer_config.json`,
        `special_tokens_map.json`, `chat_template.jinja`, `additional_chat_templates/NAME.jinja` and
        `chat_template.json`. Without a
        `tokenizer.json`, a `config.json` with a vocabulary of 256 tokens means a token for each byte. Padding
        and truncation that a `tokenizer.json` asks for are switched off.

        Args:
            directory: the folder; `"demo"`: that of the library's own model.
            chat_template: in place of that of the files.

        Raises:
            ImportError: tokenizers is not installed.
            TypeError: an argument of another type.
            ValueError: a file that is missing or cannot be read.
        """
        folder = located(directory)
        if chat_template is not None and not isinstance(chat_template, str):
            raise TypeError(
                f"chat_template: wanted None or a template, got {received(chat_template)}"
            )
        config = _entries(folder / "tokenizer_config.json")
        special = special_tokens(folder, config)
        if chat_template is None:
            templates = chat_templates(folder, config)
        else:
            templates = named_templates(chat_template, "chat_template")
        found = vocabulary(folder, special, _entries(folder / "config.json"))
        return cls(special.named, templates, found, folder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text.

        Args:
            text: the text; special tokens in it become tokens.
            add_special_tokens: whether to add those that the files put around a text.

        Raises:
            TypeError: an argument of another type.
            ValueError: text that the file of the tokenizer has no tokens for.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: wanted a string, got {received(text)}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise ValueError(
                f"text: wanted text that UTF-8 can encode, got {received(text)}"
            ) from error
        return self._vocabulary.encode(text, check_flag("add_special_tokens", add_special_tokens))

    def decode(self, tokens: Tokens, *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; U+FFFD in place of bytes that are no UTF-8.

        Args:
            tokens: the tokens; those below 0, which a `Generation` has after the end, are left out.
            skip_special_tokens: whether to leave out special tokens.

        Raises:
            TypeError: an argument of another type.
            ValueError: an array with another number of axes, or numbers past 32 bits.
        """
        skip = check_flag("skip_special_tokens", skip_special_tokens)
        return self._vocabulary.decode(ids("tokens", tokens), skip)

    def token_id(self, token: str) -> int | None:
        """The number of a token; None if it is not in the vocabulary."""
        return self._vocabulary.number(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The text of a chat, by the checkpoint's template.

        The text has its special tokens in it: `encode(text, add_special_tokens=False)` gives the tokens.

        Args:
            messages: mappings with `role` and `content`, of strings, numbers, lists and mappings.
            add_generation_prompt: whether to end with what begins an answer.
            variables: others that the template knows, such as `tools`, which chooses the template called
                `"tool_use"` where there is one.

        Raises:
            ImportError: jinja2 is not installed.
            TypeError: an argument of another type.
            ValueError: a checkpoint without a chat template, or one that refuses the messages or writes
                more than 2²⁶ characters.
        """
        chat = check_messages("messages", messages)
        check_flag("add_generation_prompt", add_generation_prompt)
        given = {name: plain(name, x) for name, x in variables.items()}
        has_tools = given.get("tools") is not None and "tool_use" in self.chat_templates
        name = "tool_use" if has_tools else "default"
        if name not in self.chat_templates:
            has = ", ".join(self.chat_templates) or "none"
            raise ValueError(
                "messages: wanted a checkpoint with a chat template called 'default', or chat_template= of "
                f"Tokenizer.load, got {self._folder}, which has {has}"
            )
        known = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        return render(self.chat_templates[name], str(self._folder), chat, known | given)

    def stream(self, before: Tokens = (), *, stop: str | Sequence[str] | None = None) -> TextStream:
        """Text of tokens as they come, which never cuts a character.

        Special tokens are left out.

        Args:
            before: the tokens that the text follows, which may decide whether it begins with a space.
            stop: a string that ends the text, or several.

        Raises:
            TypeError: an argument of another type.
            ValueError: an empty stop string; tokens that `decode` refuses.
        """
        return TextStream(self._vocabulary, before, stop)


def special_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """The numbers of the special tokens among `texts`, which decoded text lacks."""
    numbers = (tokenizer.token_id(text) for text in texts)
    return [x for x in numbers if x is not None and not tokenizer.decode([x])]


def _entries(file: Path) -> Mapping[str, Any]:
    return read_json(file, file.name) if file.is_file() else {}
