"""`generate`, as both clients offer it: sent when called, and never awaited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypedDict, TypeVar

from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.places import find_place

from .connection import RequestIds
from .parameters import encode_generate
from .streams import OnNotice

StreamType = TypeVar("StreamType")


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of every request; see `generate`."""

    timeout_s: float | None
    queue_timeout_s: float | None
    first_token_timeout_s: float | None
    priority: str | None
    client: str | None
    resume: bool
    keep_alive: float | None
    on_notice: OnNotice | None


class GenerateParameters(RequestOptions, total=False):
    """The keyword arguments of `generate` and `complete`."""

    prompt: str | None
    prompt_tokens: list[int] | None
    messages: list[dict[str, Any]] | None
    messages_as_text: bool | None
    max_tokens: int | None
    cap_max_tokens: bool | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    penalty_window: int | None
    logit_bias: dict[int, float] | dict[str, float] | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    seed: int | None
    logprobs: bool | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    echo: bool | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    chat_template_kwargs: dict[str, Any] | None
    continue_final_message: bool | None
    response_format: dict[str, Any] | None


class TokenizeParameters(TypedDict, total=False):
    """The keyword arguments of `tokenize`; those of its inputs are as in `generate`.

    `add_special_tokens`: False: a text does not begin with the begin-of-text token.
    `add_generation_prompt`: False: a chat ends with its last message.
    """

    prompt: str | None
    messages: list[dict[str, Any]] | None
    messages_as_text: bool | None
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    continue_final_message: bool | None
    add_special_tokens: bool
    add_generation_prompt: bool
    client: str | None


class ClientBase(ABC, Generic[StreamType]):
    """A client of one daemon.

    Args:
        endpoint: `ipc://…`; by default, that of the daemon which commands without options use
            (`places.find_place`).

    Raises:
        ValueError: the endpoint is invalid, or the configuration file that names it cannot be read.
    """

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = find_place(endpoint).endpoint
        self._ids = RequestIds()

    @property
    def endpoint(self) -> str:
        """The endpoint at which it looks for the daemon."""
        return self._endpoint

    def generate(
        self,
        model: str,
        *,
        prompt: str | None = None,
        prompt_tokens: list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        messages_as_text: bool | None = None,
        max_tokens: int | None = None,
        cap_max_tokens: bool | None = None,
        min_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        xtc_probability: float | None = None,
        xtc_threshold: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        penalty_window: int | None = None,
        logit_bias: dict[int, float] | dict[str, float] | None = None,
        stop: list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        ignore_eos: bool | None = None,
        seed: int | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        echo: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        continue_final_message: bool | None = None,
        response_format: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        first_token_timeout_s: float | None = None,
        priority: str | None = None,
        client: str | None = None,
        resume: bool = True,
        keep_alive: float | None = None,
        on_notice: OnNotice | None = None,
    ) -> StreamType:
        """Sends a request and returns its stream of `Delta`.

        Args:
            model: the model that must answer.
            prompt: text, tokenised as it is; exactly one of the three inputs must be given.
            prompt_tokens: token ids, used as they are.
            messages: a chat, rendered with the model's template; the content of a message is text,
                or a list of `{"type": "text", "text": …}` and, for models that take pictures,
                `{"type": "image", "data": bytes}`, the bytes of a file.
            messages_as_text: whether a model without a chat template continues the text of the
                messages; otherwise it refuses them.
            max_tokens: how many tokens to generate at most; None for as many as fit; 0 for none.
            cap_max_tokens: whether a `max_tokens` that does not fit into the context means as many
                as fit; otherwise it is refused.
            min_tokens: the answer does not end before it has this many tokens.
            temperature: 0 picks the likeliest token; higher values vary more. None, here and below:
                as the model's entry says, or else no effect.
            top_k: sample from this many of the likeliest tokens; 0: from all.
            top_p: sample from the smallest set of tokens whose probabilities reach this sum.
            min_p: leave out tokens less likely than this share of the likeliest one's probability.
            xtc_probability: how often to leave out all likely tokens but the least likely.
            xtc_threshold: the probability from which xtc counts a token as likely.
            repetition_penalty: divides the logits of tokens that have already appeared; 1 for none.
            presence_penalty: subtracted from the logits of tokens that have already appeared.
            frequency_penalty: the same, once for each time they have appeared.
            penalty_window: how many of the latest tokens, prompt included, the penalties look at;
                0: all.
            logit_bias: added to the logits, by token id.
            stop: texts that end the answer; they are not part of it.
            stop_token_ids: tokens that end the answer; they are not part of it.
            ignore_eos: whether to continue past the model's own end-of-text tokens.
            seed: makes sampling repeatable.
            logprobs: whether to return how likely each token was.
            top_logprobs: for how many of the likeliest tokens at each position to return it, too.
            prompt_logprobs: before the answer, how likely each token of the prompt was, and so many
                of the likeliest at each position. The prompt is then read in full.
            echo: the text of the prompt before the answer, on the channel `prompt`.
            tools: what the model may call, in OpenAI's form.
            tool_choice: `auto`; `none` to answer as if there were no tools; `required`, a function
                or `allowed_tools`, in OpenAI's form, for an answer that is a call.
            chat_template_kwargs: further arguments for the template, such as `enable_thinking`.
            continue_final_message: whether the answer continues the last message, if that is a text
                of the assistant, as it does by default; False: it begins a new turn.
            response_format: a JSON schema, any JSON object, or a regular expression that the
                answer must match.
            timeout_s: time limit for the last token; None or 0 for none.
            queue_timeout_s: how long it may wait for its turn; None for the configured limit.
            first_token_timeout_s: time limit for the first token; None for the configured limit.
            priority: `interactive`, `normal` or `batch`: who waits for the same model with a higher
                class starts first. None for what the configuration says of the client.
            client: on whose behalf, for limits and fairness, if the configuration lists the name;
                otherwise it is this process.
            resume: whether the answer continues after a crash; otherwise it ends with
                `worker_crashed`.
            keep_alive: how many seconds the model stays loaded once it is idle, until the next
                request says otherwise; 0 unloads it then, -1 keeps it. None: as configured.
            on_notice: called with a `Notice` of what the request is waiting for, each time that
                changes, by whoever reads the stream.

        Raises:
            RequestError: `invalid_request`; every other error comes out of the stream.
        """
        body: dict[str, Any] = {
            "prompt": prompt,
            "prompt_tokens": prompt_tokens,
            "messages": messages,
            "messages_as_text": messages_as_text,
            "max_tokens": max_tokens,
            "cap_max_tokens": cap_max_tokens,
            "min_tokens": min_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "xtc_probability": xtc_probability,
            "xtc_threshold": xtc_threshold,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "penalty_window": penalty_window,
            "logit_bias": logit_bias,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "ignore_eos": ignore_eos,
            "seed": seed,
            "logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "prompt_logprobs": prompt_logprobs,
            "echo": echo,
            "tools": tools,
            "tool_choice": tool_choice,
            "chat_template_kwargs": chat_template_kwargs,
            "continue_final_message": continue_final_message,
            "response_format": response_format,
        }
        return self._send(
            model,
            body,
            on_notice,
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
            first_token_timeout_s=first_token_timeout_s,
            priority=priority,
            client=client,
            resume=resume,
            keep_alive=keep_alive,
        )

    def _tokenizing(
        self,
        model: str,
        *,
        ids: bool,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        client: str | None = None,
        **body: Any,
    ) -> StreamType:
        """Sends a request for the tokens of a prompt, or for their text."""
        asked = {
            "ids": ids,
            "add_special_tokens": add_special_tokens,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._send(model, {**body, "echo": not ids, "tokenize": asked}, client=client)

    def _send(
        self,
        model: str,
        body: dict[str, Any],
        on_notice: OnNotice | None = None,
        **options: Any,
    ) -> StreamType:
        request_id, has_notices = self._ids.next(), on_notice is not None
        frames = encode_generate(request_id, model, body, notices=has_notices, **options)
        return self._open_stream(request_id, frames, on_notice)

    def stream_vectors(
        self, model: str, body: dict[str, Any], options: RequestOptions
    ) -> StreamType:
        """Sends a request for embeddings or a ranking, and returns the stream of its vectors."""
        request_id, on_notice = self._ids.next(), options.get("on_notice")
        frames = encode_generate(
            request_id,
            model,
            body,
            timeout_s=options.get("timeout_s"),
            queue_timeout_s=options.get("queue_timeout_s"),
            first_token_timeout_s=options.get("first_token_timeout_s"),
            priority=options.get("priority"),
            client=options.get("client"),
            resume=options.get("resume", True),
            keep_alive=options.get("keep_alive"),
            notices=on_notice is not None,
        )
        return self._open_stream(request_id, frames, on_notice)

    @abstractmethod
    def _open_stream(
        self, request_id: RequestId, frames: list[bytes], on_notice: OnNotice | None
    ) -> StreamType:
        """Sends the frames and returns the stream of their answer."""
