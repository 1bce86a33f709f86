"""Drafts: rows guess their next tokens, and one pass reads the guesses of all rows.

A row guesses what followed the same tokens earlier in its prompt or answer. The look-up does not
wait for the pending token, which the pass under way draws: a row without guesses loses nothing by
it. With a draft model (`draft_model.py`) a step reads what was looked up or what the model says,
whichever promises a token in less time. A pass reads each row's pending token and its guesses, and
the row draws a token at each of these places as it would without guesses: token n with the key of
(seed, n), from its own logits. A guess counts only if it is what was drawn, so an answer has the
tokens, the log-probabilities and the end that it has without drafts. What the caches hold of other
guesses is cut off again.

After every step a batch is as one without drafts: its caches hold all tokens but the pending one.
So rows join, leave, pause and continue as they do there, and each step may do without guesses: if
no row has any, or if reading them takes longer than it saves (`Pacer`).

Everything here belongs to the thread that made the stream.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.states import Batching

from ...engine import Guessed
from .adapters import adapters_of
from .batch_keys import BatchKeys
from .caches import MOST_PADDING, RopePositions, cut_back, layers_of
from .draft_model import DraftModel, DraftRow, DraftRows
from .loader import MODEL_FAULTS, raise_if_passing, shorten
from .sampler import PLAIN, BatchSampler, DrawingBatch, DrawnToken, RowDraws, TableRow, normalise

logger = logging.getLogger(__name__)

GRAM = 3
"""Tokens that must be the same before the place that a guess is taken from."""

LONGEST_MATCH = 16
"""More equal tokens say no more about what follows."""

CANDIDATES = 8
"""Earlier places that a guess looks at, the latest first."""

INDEXED = 4096
"""Tokens that an index reads in a step: a prompt of 32,000 takes eight steps of 2 ms."""


class NgramIndex:
    """An index of the earlier places of one row's tokens, and the place that it follows now.

    Attributes:
        place: of the token that should come next, as it did there; 0: none is known.
        length: how many tokens before that place are the last ones, too; from 1 on where the text
            goes on behind a token that is another one there, as in an edit.
    """

    def __init__(self) -> None:
        self.place = self.length = 0
        self._latest: dict[tuple[int, ...], int] = {}  # the place behind a gram's latest occurrence
        self._earlier: dict[int, int] = {}  # the place behind the occurrence before that
        self._read = GRAM
        self._count = 0  # tokens that the row had before

    def follow(self, tokens: Sequence[int], pending: Sequence[int]) -> list[tuple[int, bool]]:
        """Take the next tokens of a row, and find what should follow them.

        Args:
            tokens: of the row.
            pending: the token behind them, once it is known.

        Returns:
            Of each that was expected, how long the match was, and whether it has come.
        """
        outcomes = []
        count = len(tokens) + len(pending)
        if self.place:
            for token in [*tokens[self._count :], *pending][: count - self._count]:
                is_right = tokens[self.place] == token
                outcomes.append((self.length, is_right))
                if not is_right and self.length < GRAM:
                    self.place = self.length = 0
                    break
                self.length = min(self.length + 1, LONGEST_MATCH) if is_right else 1
                self.place += 1
        self._count = count
        self._read_on(tokens)
        if self.length < GRAM:
            self._find(tokens, pending)
        return outcomes

    def guess(self, tokens: Sequence[int], pending: Sequence[int], most: int) -> list[int]:
        """Return at most so many tokens that should follow those that `follow` has taken, if it has
        found a place."""
        guess: list[int] = []
        for place in range(self.place, self.place + most):
            behind = place - len(tokens)
            token = tokens[place] if behind < 0 else [*pending, *guess][behind]
            if token < 0:  # it stands for a part of a picture
                break
            guess.append(token)
        return guess

    def _read_on(self, tokens: Sequence[int]) -> None:
        end = min(len(tokens), self._read + INDEXED)
        for place in range(self._read, end):
            gram = tuple(tokens[place - GRAM : place])
            earlier = self._latest.get(gram)
            if earlier is not None:
                self._earlier[place] = earlier
            self._latest[gram] = place
        self._read = max(self._read, end)

    def _find(self, tokens: Sequence[int], pending: Sequence[int]) -> None:
        """Look for the earlier place with the longest match."""
        place = self._latest.get((*tokens[len(pending) - GRAM :], *pending))
        if place is None:
            return
        last = [*tokens[-LONGEST_MATCH:], *pending]
        for _ in range(CANDIDATES):
            if place is None:
                return
            if (length := _match(tokens, last, place)) > self.length:
                self.place, self.length = place, length
            place = self._earlier.get(place)


def _match(tokens: Sequence[int], last: Sequence[int], place: int) -> int:
    """Return how many tokens before a place are the last ones, too."""
    length, most = GRAM, min(LONGEST_MATCH, place, len(last))
    while length < most and tokens[place - 1 - length] == last[-1 - length]:
        length += 1
    return length


WORTHWHILE = 0.95
"""Guesses are read if a token takes less than this share of the time without them: what was
measured may be off by as much."""

MEASUREMENTS = 9
"""The median of the latest measurements counts: a pause of the machine is not the pass's."""

LEAST_MEASUREMENTS = 5

RENEWED = 128
"""After so many passes with guesses, steps without them are timed anew. If the machine was busy
when they were timed, guesses seem to save time that they lose."""

WORTH_A_TRY = 0.5
"""Guesses are timed if they may add so many tokens for each row of a pass: a chat
repeats a few words here and there, and should not pay for learning that."""

EASE = 0.1
"""Weight of a new outcome in the share of expected tokens that come."""

HOPE = 0.3
"""That share before there is an outcome."""

MODEL_HOPE = 0.7
"""The same for what a draft model says."""

LENT = 2.0
"""Guesses may lose so many times as long as a step takes without them, to be timed."""

MODEL_LENT = 16.0
"""The same of a draft model, which also reads prompts."""

SAVED = 16.0
"""So many steps of what they have saved they may lose again."""

PAUSE = 4.0
"""A loss of more steps at once was a pause of the machine."""

SPENT = 0.01
"""Once that is lost they may lose this share of the time that passes."""

Choice = tuple[int, float]
"""A number of guesses to add, and the time of a token then, next to a step without guesses;
infinite if none pays."""

NO_GUESS: Choice = (0, math.inf)


@dataclass(slots=True)
class Speed:
    """The measured times of steps of so many rows.

    Attributes:
        plain: seconds that the batch itself took in steps without guesses behind another one.
        more: what each place more in a pass takes, next to a step without guesses. As a share it
            holds where the machine is busier by now, or rows are longer.
        blocks: passes with guesses since `plain` was forgotten.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=MEASUREMENTS))
    more: deque[float] = field(default_factory=lambda: deque(maxlen=MEASUREMENTS))
    blocks: int = 0


class Pacer:
    """Decides how many guesses of one kind pay, by how many are right and by what a pass takes for
    them, and bounds what wrong decisions cost.

    How many are right is learned by the length of the match, from all rows of the model: an edit
    follows its prompt for long, a chat for a few tokens by chance. Tokens that come without a guess
    teach the same as guesses, so text that does not repeat itself takes no pass to find that out.

    What guesses lose is counted next to steps without them in the same company, and they are read
    only while there is credit. So in the first n steps they lose at most as much time as
    `lent + SPENT * n` steps take without them, and what the last one of them does; and never more
    than `SAVED` steps of what they have saved. Guesses that do not pay are tried again only with
    all that is lent: after a hundred steps for each step that they have lost.

    Attributes:
        credit: how many times as long as a step takes without guesses they may lose now.

    Args:
        most: guesses of a row in a pass, at most.
        hope: see `HOPE`.
        lent: see `LENT`.
        learns_alone: whether only guesses that were read teach how many are right; then what they
            taught is forgotten before they are tried again.
    """

    def __init__(
        self, most: int, hope: float = HOPE, *, lent: float = LENT, learns_alone: bool = False
    ) -> None:
        self.most = most
        self.credit = self._lent = lent
        self._learns_alone = learns_alone
        self._shares: defaultdict[int, float] = defaultdict(lambda: hope)  # by bits of the length
        self._speeds: defaultdict[int, Speed] = defaultdict(Speed)  # by rows of the batch
        self._between: deque[float] = deque([0.0], maxlen=MEASUREMENTS)

    def share(self, length: int) -> float:
        """Return the share of tokens expected after such a match that come."""
        return self._shares[length.bit_length()]

    def learn(self, length: int, *, is_right: bool) -> None:
        """A token was expected after such a match, and has come or not."""
        self._shares[length.bit_length()] += EASE * (is_right - self.share(length))

    def choose(self, lengths: Sequence[int], rows: int, *, is_pending_known: bool) -> Choice:
        """Return how many guesses each of the rows that can guess should add.

        Args:
            lengths: of the matches of the rows that can guess; see `share`.
            rows: of the batch.
            is_pending_known: False if the guesses of a row also fail with its pending token.
        """
        speed = self._speeds[rows]
        if not lengths or self.credit <= 0 or len(speed.plain) < LEAST_MEASUREMENTS:
            return NO_GUESS
        if len(speed.more) >= LEAST_MEASUREMENTS:
            gained = self._gain(lengths, is_pending_known=is_pending_known)
            best, least, place = NO_GUESS, WORTHWHILE / rows, median(speed.more)
            for count, more in enumerate(gained, 1):
                if (token := (1.0 + place * count) / (rows + more)) < least:
                    best, least = (count, token), token
            if best is not NO_GUESS or self.credit < self._lent:
                return best
            if self._learns_alone:
                self._shares.clear()
        # On a CPU four may take as long as ten tokens.
        gained = self._gain(lengths, is_pending_known=is_pending_known)
        if gained[-1] < WORTH_A_TRY * rows:
            return NO_GUESS
        self.credit = min(self.credit, self._lent)  # what was saved is not for tries
        return (1, 1.0 / rows)

    def _gain(self, lengths: Sequence[int], *, is_pending_known: bool) -> list[float]:
        """Return how many tokens more all rows should get from 1, 2, … guesses each."""
        alike = Counter(map(int.bit_length, lengths)).items()
        begin = 1 if is_pending_known else 2
        chances = (
            sum(rows * self._shares[bits] ** place for bits, rows in alike)
            for place in range(begin, begin + self.most)
        )
        return list(accumulate(chances))

    def predict_s(self, rows: int) -> float:
        """Return the seconds that guesses may add to a step of so many rows; 0 when unknown."""
        # Of rows that were not timed together each may have passes of its own.
        for speed, passes in ((self._speeds[rows], 1), (self._speeds[1], rows)):
            if speed.plain and speed.more:
                # A pass without guesses may be under way, whose tokens they follow.
                more_s = self.most * median(speed.more) * self._step_s(speed)
                return passes * (median(speed.plain) + more_s)
        return 0.0

    def _step_s(self, speed: Speed) -> float:
        """Return what a step without guesses takes with all that is done before the next."""
        return median(speed.plain) + median(self._between)

    def more_s(self, rows: int, took_s: float) -> float:
        """Return how much longer a step has taken than it does without guesses; 0 when unknown."""
        plain = self._speeds[rows].plain
        return max(took_s - median(plain), 0.0) if plain else 0.0

    def saw_between(self, took_s: float) -> None:
        """A step begins, so long after the one before."""
        self._between.append(took_s)
        if self.credit < self._lent:
            self.credit = min(self.credit + SPENT, self._lent)

    def saw_plain(self, rows: int, took_s: float) -> None:
        """A step without guesses has followed another one: before, a pass was under way."""
        self._speeds[rows].plain.append(took_s)

    def saw_block(
        self, rows: int, width: int, took_s: float, outcomes: Sequence[Guessed] = ()
    ) -> None:
        """A pass has read so many places of each row, and the tokens of all are known.

        Args:
            rows: of the batch.
            width: the places.
            took_s: until then.
            outcomes: of the rows that had guesses.
        """
        if self._learns_alone:
            for one in outcomes:
                for place in range(min(one.accepted + 1, one.read)):
                    self.learn(0, is_right=place < one.accepted)
        speed = self._speeds[rows]
        if not speed.plain:
            return
        more_s = took_s - median(speed.plain)
        speed.more.append(max(more_s, 0.0) / self._step_s(speed) / (width - 1))
        # Not what this pass took: on a busy machine it may have been interrupted.
        self._lose(median(speed.more) * (width - 1) - sum(one.accepted for one in outcomes) / rows)
        speed.blocks += 1
        if speed.blocks == RENEWED:
            speed.blocks = 0
            speed.plain.clear()

    def lose(self, rows: int, more_s: float) -> None:
        """A draft model has made a step of so many rows so much longer."""
        if (speed := self._speeds[rows]).plain:
            self._lose(more_s / self._step_s(speed))

    def _lose(self, steps: float) -> None:
        self.credit = min(self.credit - min(steps, PAUSE), SAVED)


class Drafts:
    """The guesses of one model's rows.

    Attributes:
        pacer: decides how many there are in a step, of those that were looked up.
        model: a draft model, which guesses, too; None: there is none, or it has failed.
        model_pacer: decides about its guesses.
        context_length: no place behind it is read.
        is_cuttable: whether caches can be cut back; if not, a row guesses only while it is alone,
            and what guesses change is copied before.
        pads: whether passes are padded to few shapes; see `prompt_batch`.
        more_s: seconds that guesses have added to the last step, so that the cost model learns from
            what it would have taken without them.

    Args:
        tokens: that a row may guess at most.
        context_length, is_cuttable, model: see the attributes.
    """

    def __init__(
        self,
        tokens: int,
        context_length: int,
        *,
        is_cuttable: bool = True,
        model: DraftModel | None = None,
    ) -> None:
        self.pacer = Pacer(tokens)
        self.model = model
        self.model_pacer = Pacer(tokens, MODEL_HOPE, lent=MODEL_LENT, learns_alone=True)
        self.context_length = context_length
        self.is_cuttable = is_cuttable
        self.pads = False
        self.more_s = 0.0
        self._counts: dict[int, Guessed] = {}  # of the last step, by uid

    def saw_between(self, took_s: float) -> None:
        """See `Pacer.saw_between`."""
        for pacer in (self.pacer, self.model_pacer):
            pacer.saw_between(took_s)

    def saw_plain(self, rows: int, took_s: float) -> None:
        """See `Pacer.saw_plain`."""
        for pacer in (self.pacer, self.model_pacer):
            pacer.saw_plain(rows, took_s)

    def predict_s(self, rows: int) -> float:
        """See `Pacer.predict_s`."""
        return max(pacer.predict_s(rows) for pacer in (self.pacer, self.model_pacer))

    def count(self, uid: int, guessed: Guessed) -> None:
        """Note what a pass has made of a row's guesses."""
        self._counts[uid] = guessed

    def take(self) -> tuple[dict[int, Guessed], float]:
        """Return what the last step has made of guesses, by the rows' uids, and `more_s`."""
        counts, more_s = self._counts, self.more_s
        self._counts, self.more_s = {}, 0.0
        return counts, more_s


def is_cuttable(model: Any, way: Batching) -> bool:
    """True if the caches of several rows can be cut back after a pass, each row's by its own count.

    Sliding windows and states have overwritten what they held before. Where rows cannot read their
    prompts together, they cannot read several tokens each in another pass either.

    Args:
        model: materialised.
        way: how its rows share passes.
    """
    layers = layers_of(make_prompt_cache(model))
    plain = (KVCache, RopePositions)
    return way is not Batching.SERIAL_PREFILL and all(type(one) in plain for one in layers)


def with_guesses(layers: Iterable[CacheLayers], tokens: int) -> tuple[CacheLayers, ...]:
    """Return what layers keep for a row that guesses so many tokens: also the places of its
    guesses, and those before it that are empty because others had more of theirs drawn."""
    return tuple(
        replace(part, row_bytes=part.row_bytes + (MOST_PADDING + tokens) * part.token_bytes)
        for part in layers
    )


def may_guess(draws: RowDraws) -> bool:
    """True if a row's logits at a place follow from its tokens alone."""
    return not (draws.processors or draws.has_penalties or draws.forced)


class BegunStep(NamedTuple):
    """A step that has begun: how many seconds that took, the pacer that has decided, the guesses of
    each row, and for how many of the seconds a draft model was asked for them."""

    took_s: float
    pacer: Pacer
    guesses: list[list[int]]
    asked_s: float


class DraftingBatch(DrawingBatch):
    """Rows that decode, and guess.

    Attributes:
        drafts: of the model; set by `start`.
    """

    drafts: Drafts
    prompt_cache: list[Any]
    _indexes: dict[int, NgramIndex]
    _asked: DraftRows | None = None  # of the draft model, once it was asked
    _pending: list[int] | None = None  # of each row; None: the pass that draws it is under way
    _able: list[int] | None = None  # the rows that may guess, until one joins or leaves
    _is_lone = False
    _begun: BegunStep | None = None
    _ended_at = 0.0
    _was_plain = False

    def start(self, drafts: Drafts) -> DraftingBatch:
        """Let the rows guess from now on."""
        self.drafts, self._indexes = drafts, {}
        return self

    def filter(self, keep: list[int]) -> None:
        """Keeps only these rows."""
        super().filter(keep)
        self._was_plain, self._able = False, None
        if self._pending is not None:
            self._pending = [self._pending[row] for row in keep]
        for uid in self._indexes.keys() - set(self.uids):
            del self._indexes[uid]
        if self._asked is not None:
            self._asked.keep(self.uids)

    def extend(self, batch: Any) -> None:
        """Adds rows."""
        super().extend(batch)
        self._was_plain, self._pending, self._able = False, None, None

    def will_guess(self) -> bool:
        """True if `next`, which must follow, reads guesses, and so waits for its own pass."""
        self._begun = self._begin() if self.uids else None
        return self._begun is not None and any(self._begun.guesses)

    def _begin(self) -> BegunStep:
        """Begin a step: guess, if that pays."""
        began_at = time.perf_counter()
        if self._is_lone:
            self._ended_at = began_at  # others have had their steps since
        self.drafts.saw_between(began_at - self._ended_at)
        guessed = self._guess()
        return BegunStep(time.perf_counter() - began_at, *guessed)

    def next(self) -> list[Any]:
        """The next tokens of each row, at least one, in their order."""
        begun, self._begun = self._begun, None
        if not self.uids:
            return []
        drafts, rows = self.drafts, len(self.uids)
        guessing_s, pacer, guesses, asked_s = begun or self._begin()
        # Prompts may have been read since it has begun.
        known_at = time.perf_counter()
        if any(guesses):
            block, outcomes, waited_s = self._read(guesses)
            self._was_plain = False
            self._ended_at = time.perf_counter()
            drafts.more_s += pacer.more_s(rows, guessing_s + self._ended_at - known_at)
            took_s = asked_s + self._ended_at - known_at - waited_s
            pacer.saw_block(rows, 1 + max(map(len, guesses)), took_s, outcomes)
            return block
        # What a draft model has read of prompts is no part of a step without guesses.
        was_plain, self._was_plain = self._was_plain and not asked_s, True
        drafts.more_s += asked_s
        if asked_s:
            drafts.model_pacer.lose(rows, asked_s)
        self._pending = None
        responses: list[Any] = super().next()
        ended_at = time.perf_counter()
        if was_plain:
            drafts.saw_plain(rows, guessing_s + ended_at - known_at)
        self._ended_at = ended_at
        return responses

    def _guess(self) -> tuple[Pacer, list[list[int]], float]:
        """Guess, if that pays.

        Returns:
            The pacer that has decided, the guesses of each row, tokens behind its pending one, and
            for how many seconds a draft model was asked for them.
        """
        drafts, rows = self.drafts, len(self.uids)
        none: list[list[int]] = [[] for _ in self.uids]
        if rows > 1 and not drafts.is_cuttable:
            return drafts.pacer, none, 0.0
        if self._able is None:
            self._able = [row for row, draws in enumerate(self.samplers) if may_guess(draws)]
        able = self._able
        indexes = self._look_up(able)
        is_known = self._pending is not None
        lengths = [index.length for index in indexes.values()]
        most, token = drafts.pacer.choose(lengths, rows, is_pending_known=is_known)
        longest = max(map(len, self.tokens))
        if drafts.model is not None:
            asked, asked_token = drafts.model_pacer.choose(
                [0] * len(able), rows, is_pending_known=True
            )
            asked = min(asked, drafts.context_length - longest - 1)
            if asked > 0 and asked_token < token:
                return drafts.model_pacer, *self._ask(drafts.model, able, asked)
        most = min(most, drafts.context_length - longest - 1)
        if most <= 0:
            return drafts.pacer, none, 0.0
        guesses = list(none)
        before = 1 if self._pending is None else 0  # the first that should come is the pending one
        for row, index in indexes.items():
            count = before + min(most, self._left(row))
            guesses[row] = index.guess(self.tokens[row], self._known(row), count)[before:]
        return drafts.pacer, guesses, 0.0

    def _left(self, row: int) -> int:
        """Return how many tokens a row may have behind its pending one."""
        left: int = self.max_tokens[row] - self._num_tokens[row] - 1
        return left

    def _known(self, row: int) -> list[int]:
        """Return the pending token of a row, if it is known already."""
        return [] if self._pending is None else [self._pending[row]]

    def _look_up(self, able: Sequence[int]) -> dict[int, NgramIndex]:
        """Return the indexes that know what should come next, of these rows."""
        found = {}
        for row in able:
            if (index := self._indexes.get(self.uids[row])) is None:
                index = self._indexes[self.uids[row]] = NgramIndex()
            for length, is_right in index.follow(self.tokens[row], self._known(row)):
                self.drafts.pacer.learn(length, is_right=is_right)
            if index.place:
                found[row] = index
        return found

    def _ask(
        self, model: DraftModel, able: Sequence[int], most: int
    ) -> tuple[list[list[int]], float]:
        """Return what a draft model guesses, so many tokens of each of these rows, and how long it
        took; nothing of rows that it has not read yet."""
        if self._pending is None:
            self._pending = self._next_tokens.tolist()
        began_at = time.perf_counter()
        if self._asked is None:
            width, draw = self.model.width, self.fallback_sampler
            self._asked = DraftRows(model, width, draw, pads=self.drafts.pads)
        guesses: list[list[int]] = [[] for _ in self.uids]
        rows = {
            self.uids[row]: DraftRow(self.tokens[row], self._pending[row], self.samplers[row])
            for row in able
        }
        try:
            said = self._asked.guess(rows, most)
        except MODEL_FAULTS as error:
            raise_if_passing(error)
            # Answers do not need it: only their speed is lost.
            logger.warning("draft model failed, and is not asked again error=%s", shorten(error))
            self.drafts.model = self._asked = None
        else:
            for row in able:
                guesses[row] = said.get(self.uids[row], [])[: max(self._left(row), 0)]
        return guesses, time.perf_counter() - began_at

    def _read(self, guesses: list[list[int]]) -> tuple[list[DrawnToken], list[Guessed], float]:
        """Run a pass over the pending tokens and these guesses.

        Returns:
            The next tokens, see `next`, what has become of the guesses of each row that had some,
            and for how many seconds the pending tokens were waited for.
        """
        width = 1 + max(map(len, guesses))
        if self.drafts.pads:
            width = self._pad(width)
        padded = [[*guess, *[0] * (width - 1 - len(guess))] for guess in guesses]
        first = self._next_tokens[:, None].astype(mx.uint32)
        ids = mx.concatenate([first, mx.array(padded, mx.uint32)], axis=1)
        copies = [] if self.drafts.is_cuttable else [_copy(one) for one in self.prompt_cache]
        logits = self.model(ids, cache=self.prompt_cache, **adapters_of(self.samplers))
        behind, others, tables = self._draw_all(logits.astype(mx.float32), guesses)
        under_way_at = time.perf_counter()
        pending: Any = self._next_tokens.tolist()
        waited_s = time.perf_counter() - under_way_at
        at_pending: Any = behind.tolist()
        at_guesses: Any = others.tolist()
        rest = iter(at_guesses)
        said = []
        outcomes = []
        for row, guess in enumerate(guesses):
            drawn = [at_pending[row], *islice(rest, len(guess))]
            accepted = 0
            while accepted < len(guess) and drawn[accepted] == guess[accepted]:
                accepted += 1
            known = zip(
                [pending[row], *guess[:accepted]],
                [self._next_logprobs[row], *tables[row]],
                strict=False,
            )
            said.append(self._say(row, known))
            if self.samplers[row] is not PLAIN:
                self.samplers[row].number += accepted
            if guess:
                outcomes.append(Guessed(read=len(guess), accepted=len(said[row]) - 1))
                self.drafts.count(self.uids[row], outcomes[-1])
            pending[row], self._next_logprobs[row] = drawn[accepted], tables[row][accepted]
        self._next_tokens, self._pending = mx.array(pending, dtype=mx.uint32), pending
        if copies:
            self._go_back(copies, ids, len(said[0]))
        else:
            longest = max(map(len, self.tokens))
            cut_back(self.prompt_cache, [width - len(tokens) for tokens in said], longest)
        self._let_ended_go(said)
        return [token for tokens in said for token in tokens], outcomes, waited_s

    def _pad(self, width: int) -> int:
        """Pad the keys and the places of a pass; return how many places it has."""
        for layer in self.prompt_cache:
            if isinstance(layer, BatchKeys):
                layer.pads = True
        longest = max(map(len, self.tokens))
        most = min(1 + self.drafts.pacer.most, self.drafts.context_length - longest)
        return max(width, most)

    def _draw_all(
        self, logits: mx.array, guesses: list[list[int]]
    ) -> tuple[mx.array, mx.array, list[list[TableRow]]]:
        """Draw a token behind each row's pending token and behind each of its guesses.

        Args:
            logits: (rows, places, vocabulary), float32.
            guesses: of each row.

        Returns:
            The tokens behind the pending ones (rows,), under way, those behind the guesses of all
            rows, one after the other, and of each row the log-probabilities that its tokens are
            drawn from.
        """
        sampler = self._sampler_for(logits.shape[-1])
        first = normalise(sampler.shape(logits[:, 0], self._next_tokens))
        at_pending = sampler.draw(first)
        tables = [[(first, row)] for row in range(len(guesses))]
        behind = [
            (row, place) for row, own in enumerate(guesses) for place in range(1, len(own) + 1)
        ]
        rows, places = (mx.array(list(each)) for each in zip(*behind, strict=True))
        draws = [self.samplers[row].later(place - 1) for row, place in behind]
        others = BatchSampler(draws, [[]] * len(draws), logits.shape[-1], self.fallback_sampler)
        latest = mx.array([guesses[row][place - 1] for row, place in behind])
        table = normalise(others.shape(logits[rows, places], latest))
        at_guesses = others.draw(table)
        mx.async_eval(at_pending, at_guesses, first, table)  # type: ignore[no-untyped-call]
        for nth, (row, _) in enumerate(behind):
            tables[row].append((table, nth))
        return at_pending, at_guesses, tables

    def _say(self, row: int, known: Iterable[tuple[int, TableRow]]) -> list[DrawnToken]:
        """Take the next tokens of a row, up to the one that ends its answer, if one does."""
        said: list[DrawnToken] = []
        for token, logprobs in known:
            finish = None
            self.tokens[row].append(token)
            self._num_tokens[row] += 1
            if self._num_tokens[row] >= self.max_tokens[row]:
                finish = "length"
            if self._matchers[row].advance(token):
                finish = "stop"
            said.append(
                DrawnToken(
                    uid=self.uids[row],
                    token=token,
                    logprobs=logprobs,
                    finish_reason=finish,
                    prompt_cache=None,
                    all_tokens=None,
                )
            )
            if finish is not None:
                break
        return said

    def _go_back(self, copies: list[Any], ids: mx.array, count: int) -> None:
        """Have the caches of the only row hold the first tokens of a pass, and no others.

        Args:
            copies: of the layers before the pass; None for each that can be cut back.
            ids: of the pass (1, places).
            count: how many of them to hold.
        """
        if count == ids.shape[1]:
            return
        for place, layer in enumerate(copies):
            if layer is None:
                self.prompt_cache[place].trim(ids.shape[1])
            else:
                self.prompt_cache[place] = layer
        adapters = adapters_of(self.samplers)
        self.model(ids[:, :count], cache=self.prompt_cache, **adapters)
        mx.eval([layer.state for layer in self.prompt_cache])

    def _let_ended_go(self, said: list[list[DrawnToken]]) -> None:
        keep = [row for row, tokens in enumerate(said) if tokens[-1].finish_reason is None]
        for row in set(range(len(said))) - set(keep):
            last = said[row][-1]
            last.prompt_cache, last.all_tokens = self.extract_cache(row), self.tokens[row]
        if len(keep) < len(said):
            self.filter(keep)


def _copy(layer: Any) -> Any:
    """Return a copy of a layer's cache, which costs nothing until one of both is written to; None
    if it can be cut back instead."""
    can_cut = isinstance(layer, KVCache | BatchKVCache | RopePositions)
    return None if can_cut else copy.deepcopy(layer)


class LoneDraftingRow(DraftingBatch):
    """A batch of one row, over its plain cache; see `LoneRow`."""

    _is_lone = True

    def extract_cache(self, idx: int) -> list[Any]:
        """The row's cache; nothing needs to be taken apart."""
        return list(self.prompt_cache)
