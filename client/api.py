"""The calls of both clients: `generate`, which is never awaited, and the commands.

A command is a method that returns what its daemon answers; of `AsyncClient`, each is awaited.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from mlxsup.protocol.client_messages import (
    AddModel,
    Attach,
    CancelRequest,
    Configure,
    Load,
    PauseRequest,
    Ping,
    Prioritize,
    Reload,
    RemoveModel,
    RequestsQuery,
    Restart,
    ResumeRequest,
    SettingsQuery,
    StatusQuery,
    Stop,
    Unload,
)
from mlxsup.protocol.codec import encode
from mlxsup.protocol.discovery import find_place
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Command

from .connection import RequestIds
from .parameters import (
    check_changes,
    check_client,
    check_count,
    check_keep_alive,
    check_limit,
    check_model,
    check_name,
    check_priority,
    check_request,
    encode_generate,
)
from .streams import OnNotice

StreamType = TypeVar("StreamType")
Answer = TypeVar("Answer", covariant=True)
"""A map, or what is awaited for one."""


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


class ClientBase(ABC, Generic[StreamType, Answer]):
    """A client of one daemon.

    Args:
        endpoint: `ipc://…`; by default, that of the daemon which commands without options use
            (`discovery.find_place`).

    Raises:
        ValueError: the endpoint is invalid, or the configuration file that names it cannot be read.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = find_place(endpoint).endpoint
        self._ids = RequestIds()

    @property
    def endpoint(self) -> str:
        """Return the endpoint at which it looks for the daemon."""
        return self._endpoint

    # ------------------------------------------------------------ requests

    def generate(self, model: str, **parameters: Unpack[GenerateParameters]) -> StreamType:
        """Send a request, and return its stream of `Delta`.

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
                of the assistant, as it does by default unless it must have a form; False: it begins
                a new turn.
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
                changes, in the thread that reads the stream.

        Raises:
            RequestError: `invalid_request`; every other error comes out of the stream.
        """
        body: dict[str, Any] = dict(parameters)
        options = {name: body.pop(name) for name in RequestOptions.__annotations__ if name in body}
        return self._send(model, body, **options)

    def attach(self, request: str) -> StreamType:
        """Join the stream of an open request of any client, from its first token; return at once.

        Ending this stream, as `cancel` does, does not end the request. Notices are for those who
        sent it, and so are the log-probabilities of tokens that had come before.

        Args:
            request: its id, or, as `#12`, the number that the status shows for it.

        Raises:
            RequestError: out of the stream, `invalid_request`: no open request has that id, or
                several do, or too many have joined it, or its model is not READY and some of the
                answer has come before; `worker_crashed`: the worker could not show that in time.
        """
        attach = Attach(id=self._ids.next(), request=check_request(request))
        return self._open_stream(attach.id, encode(attach), None)

    def _send(
        self, model: str, body: dict[str, Any], *, on_notice: OnNotice | None = None, **options: Any
    ) -> StreamType:
        """Send a request with this body; `options` are the others of `RequestOptions`."""
        request_id, has_notices = self._ids.next(), on_notice is not None
        frames = encode_generate(request_id, model, body, notices=has_notices, **options)
        return self._open_stream(request_id, frames, on_notice)

    @abstractmethod
    def _open_stream(
        self, request_id: RequestId, frames: list[bytes], on_notice: OnNotice | None
    ) -> StreamType:
        """Send the frames, and return the stream of their answer."""

    # ------------------------------------------------------------ commands

    @abstractmethod
    def _call(self, message: Command, *, wait: bool = True) -> Answer:
        """Send a command, and return what it is answered with.

        Args:
            message: the command.
            wait: False to return an empty map once the daemon has accepted it.
        """

    def ping(self) -> Answer:
        """Return once the daemon has answered."""
        return self._call(Ping(id=self._ids.next()))

    def status(self, *, debug: bool = False) -> Answer:
        """Return what `mlxsup status --json` prints; `debug` adds each model's latest events."""
        return self._call(StatusQuery(id=self._ids.next(), debug=debug))

    def requests(self, *, client: str | None = None) -> Answer:
        """Return every open request, and how far it is.

        Args:
            client: only those of this account, or of the process or terminal with this number.

        Returns:
            `requests`, a list of maps (`id`, `number`, `model`, `client`, `state`, `place`,
            `prefill`, `expected_s`, `tokens_sent`, `tokens_per_s`, `engine_s` and others; see
            docs/protocol.md), and `more`: how many there are besides.
        """
        return self._call(RequestsQuery(id=self._ids.next(), client=check_client(client)))

    def load(
        self,
        model: str,
        *,
        dry_run: bool = False,
        keep_alive: float | None = None,
        context_length: int | None = None,
    ) -> Answer:
        """Return once the model is READY.

        Args:
            model: which one.
            dry_run: change nothing, and return at once what the load would lead to: `outcome`
                (`loaded`, `fits`, `evicts`, `swaps` or `waits`), `evicts` and `swaps` (names),
                `needed_bytes` and `reason`. A load that would be refused raises its error.
            keep_alive: as for `generate`, but above 0.
            context_length: tokens of prompt and answer together, 0 for the model's own limit, until
                the configuration is read again; None: as it is. Another one takes a new process.
        """
        message = Load(
            id=self._ids.next(),
            model=check_model(model),
            dry_run=dry_run,
            keep_alive=check_keep_alive(keep_alive),
            context_length=check_count("context_length", context_length),
        )
        return self._call(message)

    def unload(self, model: str) -> Answer:
        """Return once the model's process is gone."""
        return self._call(Unload(id=self._ids.next(), model=check_model(model)))

    def restart(self, model: str, *, now: bool = False, wait: bool = True) -> Answer:
        """Return once the model is READY in a new process.

        Args:
            model: which one.
            now: whether to cut running requests off.
            wait: False to return as soon as the daemon has accepted it.
        """
        restart = Restart(id=self._ids.next(), model=check_model(model), now=now)
        return self._call(restart, wait=wait)

    def prioritize(self, request: str, priority: str) -> Answer:
        """Give an open request of any client another class, and return what is known of it.

        Args:
            request: its id, or, as `#12`, the number that the status shows for it.
            priority: `interactive`, `normal` or `batch`; its wait so far no longer counts.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do.
        """
        name, wanted = check_request(request), check_priority(priority)
        return self._call(Prioritize(id=self._ids.next(), request=name, priority=wanted))

    def pause(self, request: str) -> Answer:
        """Make an open request of any client wait until it is resumed; return at once.

        Args:
            request: as for `prioritize`.

        Returns:
            `request`, `number`, `model`, `tokens_sent`, and `stage`: `pausing` until its row has
            left the batch, then `paused`.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do, or it is
                paused already or may not be paused.
        """
        return self._call(PauseRequest(id=self._ids.next(), request=check_request(request)))

    def resume(self, request: str) -> Answer:
        """Let a paused request continue; return at once.

        Args:
            request: as for `prioritize`.

        Returns:
            The same as `pause`; its `stage` is `queued`.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do, or it is
                not paused.
        """
        return self._call(ResumeRequest(id=self._ids.next(), request=check_request(request)))

    def cancel(self, request: str) -> Answer:
        """End an open request of any client; its stream ends normally, as `cancelled`.

        Args:
            request: as for `prioritize`.

        Returns:
            `request`, `number`, `model` and `tokens_sent`.

        Raises:
            RequestError: `invalid_request`: no open request has that id, or several do.
        """
        return self._call(CancelRequest(id=self._ids.next(), request=check_request(request)))

    def reload(self, *, dry_run: bool = False) -> Answer:
        """Make the daemon read its configuration file again; a wrong one changes nothing.

        Args:
            dry_run: change nothing, and return what would change.

        Returns:
            The names of the models that were `added`, `changed` and `removed`, the other `settings`
            that have changed, and in `later` the keys that take effect at the next start. A dry run
            also has in `foreseen` what would happen to each of the models, and in `evicts` and
            `refuses` which would be evicted, and which could not be loaded.

        Raises:
            RequestError: the file is wrong; `detail["problems"]` lists everything that is wrong.
        """
        return self._call(Reload(id=self._ids.next(), dry_run=dry_run))

    def add(self, model: str, *, name: str | None = None, revision: str | None = None) -> Answer:
        """Make the daemon serve one more model, from now on and after its next start.

        The model is written into the configuration file; all other lines of it stay. One that is
        configured already keeps its entry. A repository that is not on the daemon's machine is
        downloaded when it is loaded.

        Args:
            model: OWNER/NAME, its address on the hub, an absolute folder, or the name of a model
                that is found on the daemon's machine.
            name: what to call it; None: by a short name.
            revision: of a repository; None: that of the address, or `main`.

        Returns:
            What `reload` returns, with `model`, its name, `files`, its repository or folder, and
            `config_path`: None if the daemon has no file, and forgets the model when it ends.

        Raises:
            RequestError: it is no model, or its name or the file cannot be had; nothing has
                changed. `detail` has `problem`, a word, and `hint`.
        """
        message = AddModel(
            id=self._ids.next(),
            model=check_name("model", model),
            name=None if name is None else check_model(name, "name"),
            revision=None if revision is None else check_name("revision", revision),
        )
        return self._call(message)

    def remove(self, model: str) -> Answer:
        """Take a model out of the configuration file, and end it once its requests have finished.

        Args:
            model: its name, not another one that means it.

        Returns:
            As `add` does.

        Raises:
            RequestError: as `add` does.
        """
        return self._call(RemoveModel(id=self._ids.next(), model=check_model(model)))

    def configure(self, changes: Mapping[str, str | None]) -> Answer:
        """Set keys of the configuration file or take them out, and have the daemon read it again.

        All other lines of the file stay. Either all changes are made, or none.

        Args:
            changes: by the key's whole name, such as `models.NAME.idle_unload_s`,
                `defaults.preload` or `clients.NAME.weight`: the value as text, as
                `mlxsup config set` takes it; None takes the key out.

        Returns:
            What `reload` returns, with `values`, what the file has now by key, and `config_path`.

        Raises:
            RequestError: there is no such key or model, a value is wrong, or the file cannot be
                written; nothing has changed. `detail` has `problem`, a word, and `hint`.
        """
        return self._call(Configure(id=self._ids.next(), changes=check_changes(changes)))

    def settings(self, model: str) -> Answer:
        """Return what the configuration file says about a model.

        Returns:
            `model`, `config_path`, None for a daemon without a file, and `settings`, each with its
            `key`, as `configure` takes it, its `label`, what it `does` and `takes`, its `value`
            and `default` as text, empty if there is none, and `choices` if there are few.

        Raises:
            RequestError: there is no such model, or the file is wrong.
        """
        return self._call(SettingsQuery(id=self._ids.next(), model=check_model(model)))

    def stop(self, *, now: bool = False, timeout_s: float | None = None) -> Answer:
        """Ask the daemon to end; return at once with the pids that will go.

        Args:
            now: whether to cut running requests off.
            timeout_s: how long they may take; None for the configured limit.
        """
        limit_s = check_limit("timeout_s", timeout_s)
        return self._call(Stop(id=self._ids.next(), now=now, timeout_s=limit_s))
