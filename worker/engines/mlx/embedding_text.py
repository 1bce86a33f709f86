"""The text side of a model that embeds or ranks: tokens, and what is put around a text."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.context_length import find_context_length
from mlxsup.protocol.errors import invalid, unfit
from mlxsup.protocol.pooling import Pooling, PoolingBody
from mlxsup.protocol.tasks import Task

from ...engine import Detokenizer, Prompt, TextCodec
from ...pooling_rows import check_lengths, other_task
from ...text.channels import ChannelRules
from ...text.detokenizer import WindowDetokenizer
from .encoders import ENCODER_CLASSES
from .folder import ModelFolder
from .tokenizer import load_tokenizer, tokenizer_error

OTHER_NAMES = {
    "query": ("query", "search_query", "retrieval.query"),
    "document": ("document", "passage", "corpus", "search_document", "retrieval.passage"),
}
"""What models call the two kinds of text that every search has."""


class EmbeddingText(TextCodec):
    """Tokenises texts; `encode_texts` runs on a helper thread.

    Attributes:
        limit: tokens of a text, at most, with what is put around it.
        vocabulary_size: valid ids are below it.
        answers: the tokens that say whether a document fits; see `Pooling.answers`.

    Args:
        tokenizer: that of transformers; becomes this one's own.
        pooling: what the model's folder says.
        limit, vocabulary_size: see above.
        dimensions: of an embedding.
        separator: the token after a query, where the model tells its document apart by kind.
        question: writes a query and a document; None: they stand side by side, with the
            tokenizer's marks.
        answers: see above.
    """

    def __init__(
        self,
        tokenizer: Any,
        pooling: Pooling,
        *,
        limit: int,
        vocabulary_size: int,
        dimensions: int,
        separator: int | None,
        question: Question | None,
        answers: tuple[int, ...],
    ) -> None:
        self._tokenizer = tokenizer
        self._pooling = pooling
        self.limit = limit
        self.vocabulary_size = vocabulary_size
        self._dimensions = dimensions
        self._separator = separator
        self._question = question
        self.answers = answers
        self._in_use = threading.Lock()

    def twin(self) -> EmbeddingText:
        """See `TextCodec.twin`."""
        other = copy.copy(self)
        with self._in_use:
            other._tokenizer = copy.deepcopy(self._tokenizer)
        other._in_use = threading.Lock()
        return other

    @property
    def channel_rules(self) -> ChannelRules:
        """See `TextCodec.channel_rules`: there are no answers to mark parts of."""
        return ChannelRules()

    def encode(self, body: RequestBody) -> Prompt:
        """See `TextCodec.encode`: the tokens alone may be asked for, of a text or as ids.

        Raises:
            RemoteError: `invalid_request`; an answer or a chat is asked for, or an id is unknown.
        """
        if body.tokenize is None or body.messages is not None:
            raise other_task(self._pooling.task, Task.GENERATE)
        tokens = body.prompt_tokens
        if tokens is None:
            is_special = body.tokenizes("add_special_tokens")
            text = self._lowered(body.prompt or "")
            with self._in_use:
                tokens = self._tokenizer(text, add_special_tokens=is_special, verbose=False)[
                    "input_ids"
                ]
        if max(tokens, default=0) >= self.vocabulary_size:
            raise invalid("prompt_tokens", self._known_ids, max(tokens))
        return Prompt(tokens=list(tokens))

    def prompt_text(self, body: RequestBody, tokens: Sequence[int]) -> str:
        """See `TextCodec.prompt_text`."""
        return self._decode(tokens) if body.prompt is None else body.prompt

    def _decode(self, tokens: Sequence[int]) -> str:
        with self._in_use:
            return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    @property
    def _known_ids(self) -> str:
        return f"ids below this model's vocabulary of {self.vocabulary_size}"

    def detokenizer(self) -> Detokenizer:
        """See `TextCodec.detokenizer`: a request for tokens has one, and gives it none."""
        return WindowDetokenizer(self._decode)

    def token_alone(self, token: int) -> tuple[str, bytes]:
        """See `TextCodec.token_alone`."""
        return "", b""

    def encode_texts(self, body: PoolingBody) -> Prompt:
        """See `TextCodec.encode_texts`."""
        asked = Task.EMBED if body.query is None else Task.RERANK
        if asked is not self._pooling.task:
            raise other_task(self._pooling.task, asked)
        size = body.dimensions
        if size is not None and size > self._dimensions:
            raise invalid("dimensions", f"at most the {self._dimensions} of this model", size)
        with self._in_use:
            ids = self._encode(body)
        lengths = [len(one) for one in ids]
        check_lengths(lengths, body, self.limit)
        for nth, one in enumerate(ids):
            if not one:
                subject = f"{body.name}[{nth}]"
                raise invalid(
                    "texts", "text of at least one token", subject=subject, shown="text of none"
                )
            if max(one) >= self.vocabulary_size:
                raise invalid(
                    "texts",
                    self._known_ids,
                    max(one),
                    subject=f"{body.name}[{nth}]",
                )
        return Prompt(tokens=[token for one in ids for token in one], lengths=tuple(lengths))

    def _encode(self, body: PoolingBody) -> list[list[int]]:
        options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
        if body.truncate:
            options |= {"truncation": True, "max_length": self.limit}
        if body.query is not None:
            documents = [one for one in body.texts if isinstance(one, str)]
            if self._question is not None:
                return [self._ranked(body.query, one, body.truncate) for one in documents]
            queries = [body.query] * len(documents)
            found: list[list[int]] = self._tokenizer(queries, documents, **options)["input_ids"]
            return found
        before = self._before(body.input_type)
        texts = [before + self._lowered(one) for one in body.texts if isinstance(one, str)]
        encoded = iter(self._tokenizer(texts, **options)["input_ids"] if texts else ())
        most = self.limit if body.truncate else None
        return [next(encoded) if isinstance(one, str) else one[:most] for one in body.texts]

    def _ranked(self, query: str, document: str, is_cut: bool | None) -> list[int]:
        """Return the tokens of the question whether a document fits a query; the end of the
        document is left out if they are too many and may be cut."""
        assert self._question is not None
        while True:
            text = self._question(self._tokenizer, query, document)
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            too_many = len(ids) - self.limit
            if too_many <= 0 or not is_cut or not document:
                return ids
            parts = self._tokenizer.encode(document, add_special_tokens=False)
            shorter = self._tokenizer.decode(parts[: max(0, len(parts) - too_many)])
            document = shorter if len(shorter) < len(document) else ""

    def _lowered(self, text: str) -> str:
        return text.lower() if self._pooling.lowercases else text

    def _before(self, kind: str | None) -> str:
        """Return what stands before a text of this kind.

        Raises:
            RemoteError: `invalid_request`; the model does not know the kind.
        """
        prompts = self._pooling.prompts
        if kind is None:
            return prompts.get(self._pooling.default_prompt, "")
        known = next((names for names in OTHER_NAMES.values() if kind in names), (kind,))
        for name in (kind, *known):
            if name in prompts:
                return prompts[name]
        if len(known) > 1:
            return ""  # a model without words before its texts embeds both kinds alike
        names = ", ".join(sorted({*prompts, *OTHER_NAMES}))
        raise unfit("input_type", f"input_type must be one of {names[:300]}, not {kind!r}")

    def kinds(self, ids: Any) -> Any:
        """Return 1 for each token behind the first separator; None: the model needs no kinds.

        Args:
            ids: of texts, (texts, length), as an array of numpy.
        """
        if self._separator is None:
            return None
        is_end = ids == self._separator
        return (is_end.cumsum(axis=1) - is_end > 0).astype(ids.dtype)


QWEN_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN_QUESTION = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {task}
<Query>: {query}
<Document>: {document}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
"""The form that Qwen3-Reranker was trained with, in its makers' words."""

_ROLE_OF_QUERY = re.compile(r"""['"]query['"]""")

Question = Callable[[Any, str, str], str]
"""Writes a query and a document as a model was trained to read them, with its tokenizer."""


def _find_question(tokenizer: Any, pooling: Pooling, config: dict[str, Any]) -> Question | None:
    """Return what writes the question that a decoder ranks by; None: the texts stand side by side.

    The chat template of such a model may know the roles `query` and `document`; the words of its
    makers on the task are then those of the system.
    """
    template = tokenizer.chat_template
    task = pooling.prompts.get(pooling.default_prompt, "")
    if isinstance(template, str) and _ROLE_OF_QUERY.search(template):
        return partial(_render_question, task)
    if config["model_type"] == "qwen3":
        return partial(_ask_qwen, task or QWEN_TASK)
    return None


def _render_question(task: str, tokenizer: Any, query: str, document: str) -> str:
    messages = [{"role": "system", "content": task}] if task else []
    messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _ask_qwen(task: str, tokenizer: Any, query: str, document: str) -> str:
    return _QWEN_QUESTION.format(task=task, query=query, document=document)


def _find_answers(tokenizer: Any, answers: Sequence[int | str]) -> tuple[int, ...]:
    """Return the tokens of a model's answers.

    Raises:
        ValueError: a word is not one token of its vocabulary.
    """
    found = []
    for answer in answers:
        token = answer
        if isinstance(answer, str):
            token = tokenizer.convert_tokens_to_ids(answer)
            if token is None or token == tokenizer.unk_token_id:
                raise ValueError(f"its vocabulary has no token {answer!r}")
        found.append(int(token))
    return tuple(found)


def load_embedding_text(
    folder: ModelFolder, pooling: Pooling, dimensions: int, asked: int
) -> EmbeddingText:
    """Return the text side of a folder.

    Args:
        folder: of the model.
        pooling: what it says.
        dimensions: of an embedding.
        asked: tokens of a text, as the model's entry limits them; 0: as many as the model takes.

    Raises:
        BadModelError: the tokenizer cannot be used; names the file.
    """
    config = folder.config
    try:
        tokenizer = load_tokenizer(folder.path, None)._tokenizer
        answers = _find_answers(tokenizer, pooling.answers)
    except MemoryError:
        raise
    except Exception as error:
        raise tokenizer_error(folder.path, error) from error
    limit = find_context_length(config, asked).tokens
    if pooling.max_tokens is not None:
        limit = min(limit, pooling.max_tokens)
    has_kinds = config["model_type"] == "bert" and config.get("type_vocab_size", 2) > 1
    is_encoder = config["model_type"] in ENCODER_CLASSES
    is_ranking = pooling.task is Task.RERANK
    return EmbeddingText(
        tokenizer,
        pooling,
        limit=limit,
        vocabulary_size=folder.number("vocab_size") or len(tokenizer),
        dimensions=dimensions,
        separator=tokenizer.sep_token_id if has_kinds and is_ranking else None,
        question=None if is_encoder else _find_question(tokenizer, pooling, config),
        answers=answers,
    )
