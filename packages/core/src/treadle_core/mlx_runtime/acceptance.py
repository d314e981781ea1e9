"""How much of each row's draft is kept, on the device, for all rows in one call.

Row r was fed its last token and ``lengths[r]`` draft tokens; the forward gave it logits at
``1 + lengths[r]`` positions, padded to the width of the longest row. Position i is where draft
token i would stand, and the last one is for the token after a draft that was right throughout.

:func:`accept_equal` is what the engine goes by. It samples each position as plain decoding would,
with the noise of (seed, position), and keeps the draft as far as it equals that. The output *is*
plain decoding's, for greedy and for sampled rows, whatever was drafted, whoever drafted it, and
however long the drafts were. A guess x is kept with probability p(x), which is also what the rule
below gives a guess, whose q is one at x: nothing is lost. A drafter that draws can draw with the
same noise (Daliri et al. 2024, "Coupling without communication"): its token then equals the
model's with probability at least (1 - d) / (1 + d), where d is the total variation distance of p
and q, and usually nearly as often as by the rule below.

:func:`accept_residual` is the rule of Leviathan et al. 2023 and Chen et al. 2023 for drafts drawn
from q: keep x with probability min(1, p(x) / q(x)), and in place of the first that is not kept
draw from the normalised positive part of p - q. It keeps a draft with probability 1 - d,
the most that is possible. But the output has the right distribution only: which tokens a seed gives
depends on what was drafted and on how much, and so on measured time and on the rows beside it; and
drafts would have to bring their logits along, and never be cut short because of what they say. It is
here for engines that can do without seeds. SmolLM2 135M at temperature 1 keeps, of a draft token
that its own 4-bit version drew, 0.66 by the first rule and 0.71 by this one; with two layers left
out 0.65 and 0.70, with six 0.49 and 0.54; a drafter with noise of its own gets 0.34, 0.33 and 0.24.

:func:`accept_unverified` is no such rule: it is lossy, and only for those who ask for that.

p is always what the row itself would sample from: after penalties, bias, masks, grammar, its own
processors, temperature and filters, at each position as if the draft before it had been generated.
"""

from collections.abc import Callable

import mlx.core as mx
from msgspec import Struct

from treadle_core.mlx_runtime.sampler import NEGATIVE_INFINITY, NOT_FINITE, NOTHING_ALLOWED

PADDING = -3
"""In a verdict's tokens: nothing stands here. The sampler has the other negative numbers."""

PLAIN = 0
"""Purpose of noise: choosing a token as plain decoding does."""

COIN = 0x9E3779B9
"""Purpose of noise: whether a draft token is kept."""

RESIDUAL = 0x85EBCA6B
"""Purpose of noise: drawing what stands in place of a draft token."""

DRAFT = 0xC2B2AE35
"""Purpose of noise: drawing a draft for :func:`accept_residual`."""


class Verdict(Struct, frozen=True):
    """What each row keeps.

    Attributes:
        accepted: ``[rows]``, draft tokens kept.
        tokens: ``[rows, width]``: the tokens kept, one token more, then :data:`PADDING`. That one
            may be the sampler's NOT_FINITE or NOTHING_ALLOWED, which fails the row after the tokens
            before it; what a rejected draft led to never does.
    """

    accepted: mx.array
    tokens: mx.array


Accept = Callable[[mx.array, mx.array, mx.array], Verdict]
"""A rule that looks at what rows choose, what was drafted for them, and how much."""


def accept_equal(choices: mx.array, drafts: mx.array, lengths: mx.array) -> Verdict:
    """Keep each row's draft as far as it equals what the row chooses itself.

    Args:
        choices: ``[rows, width]``, the token that plain decoding chooses at each position.
        drafts: ``[rows, width - 1]``, padded with anything.
        lengths: ``[rows]``, each row's draft tokens.
    """
    accepted = count_leading(choices[:, :-1] == drafts, lengths)
    place = mx.arange(choices.shape[1])[None]
    return Verdict(accepted, mx.where(place <= accepted[:, None], choices, PADDING))


def accept_residual(
    logits: mx.array,
    drafts: mx.array,
    lengths: mx.array,
    draft_logits: mx.array,
    keys: mx.array,
    positions: mx.array,
) -> Verdict:
    """Keep drawn drafts with probability min(1, p / q), and make up for the first that is not kept.

    A row without a draft gets exactly the token that plain decoding gives it.

    Args:
        logits: ``[rows, width, vocab]``, what each position is sampled from; need not be
            normalised, -infinity forbids a token.
        drafts: ``[rows, width - 1]``, padded with any token ids.
        lengths: ``[rows]``, each row's draft tokens.
        draft_logits: ``[rows, width - 1, vocab]``, what each draft token was drawn from.
        keys: ``[rows, 2]``, the halves of each row's mixed seed.
        positions: ``[rows]``, where in the row the first of the tokens stands.
    """
    width = logits.shape[1]
    p, q = probabilities(logits), probabilities(draft_logits)
    coins = uniform(keys, _places(positions, width - 1), COIN)
    # Not as a quotient: nothing that the row forbids is kept, also where q is 0 too.
    kept = coins * _taken(q, drafts) < _taken(p[:, :-1], drafts)
    accepted = count_leading(kept, lengths)
    last = _last_token(logits, p, q, accepted, lengths, keys, positions)
    place, end = mx.arange(width)[None], accepted[:, None]
    padded = mx.concatenate([drafts.astype(mx.int32), last[:, None]], axis=1)
    tokens = mx.where(place < end, padded, mx.where(place == end, last[:, None], PADDING))
    return Verdict(accepted, tokens)


def accept_unverified(choices: mx.array, drafts: mx.array, lengths: mx.array) -> Verdict:
    """Keep each row's draft whatever the row would have chosen: lossy.

    Args:
        choices: ``[rows, width]``, what plain decoding chooses at each position, or why it cannot.
        drafts: ``[rows, width - 1]``, padded with anything.
        lengths: ``[rows]``, each row's draft tokens that may stand where they do.
    """
    accepted = count_leading(choices[:, :-1] >= 0, lengths)
    place = mx.arange(choices.shape[1])[None]
    last = mx.take_along_axis(choices, accepted[:, None], axis=1)
    padded = mx.concatenate([drafts.astype(mx.int32), last], axis=1)
    end = accepted[:, None]
    tokens = mx.where(place < end, padded, mx.where(place == end, last, PADDING))
    return Verdict(accepted, tokens)


def count_leading(kept: mx.array, lengths: mx.array) -> mx.array:
    """How many tokens of each row ``[rows]`` are kept before the first that is not.

    Args:
        kept: ``[rows, width - 1]``.
        lengths: ``[rows]``; what lies beyond is padding.
    """
    inside = mx.arange(kept.shape[1])[None] < lengths[:, None]
    return mx.sum(mx.cumprod((kept & inside).astype(mx.int32), axis=1), axis=1).astype(mx.int32)


def probabilities(logits: mx.array) -> mx.array:
    """Softmax over the last axis; all zeros where it has none (all forbidden, or not finite)."""
    logits = logits.astype(mx.float32)
    usable = mx.isfinite(mx.max(logits, axis=-1, keepdims=True))
    return mx.where(usable, mx.softmax(mx.where(usable, logits, 0.0), axis=-1), 0.0)


def tagged(keys: mx.array, positions: mx.array, purpose: int) -> mx.array:
    """Keys ``[n, 2]`` of the noise at ``positions [n]`` for one purpose.

    With :data:`PLAIN` they are those of plain decoding.
    """
    high = mx.bitwise_xor(keys[:, 0], mx.array(purpose, dtype=mx.uint32))
    low = mx.bitwise_xor(keys[:, 1], positions.astype(mx.uint32))
    return mx.stack([high, low], axis=1)


def uniform(keys: mx.array, places: mx.array, purpose: int) -> mx.array:
    """Numbers in [0, 1), one for each of ``places [rows, n]``."""
    rows, num = places.shape
    if num == 0:
        return mx.zeros((rows, 0))
    each = tagged(mx.repeat(keys, num, axis=0), places.reshape(-1), purpose)
    draw: Callable[[mx.array], mx.array] = mx.vmap(lambda key: mx.random.uniform(key=key))
    return draw(each).reshape(rows, num)


def gumbel(tagged_keys: mx.array, vocab_size: int) -> mx.array:
    """Gumbel noise ``[rows, vocab]``; plain decoding's where the keys are plain decoding's."""
    draw: Callable[[mx.array], mx.array] = mx.vmap(
        lambda key: mx.random.gumbel((vocab_size,), key=key)
    )
    return draw(tagged_keys)


def _last_token(
    logits: mx.array,
    p: mx.array,
    q: mx.array,
    accepted: mx.array,
    lengths: mx.array,
    keys: mx.array,
    positions: mx.array,
) -> mx.array:
    """The token ``[rows]`` that follows those kept: a replacement, or one on top."""
    rows, vocab_size = mx.arange(logits.shape[0]), logits.shape[-1]
    scores, here = logits[rows, accepted].astype(mx.float32), p[rows, accepted]
    # Relative to the best, as plain decoding has it: noise added to huge numbers would vanish.
    scores = scores - mx.max(scores, axis=-1, keepdims=True)
    rejected = (accepted < lengths)[:, None]
    place = positions + accepted
    chosen_keys = tagged(keys, place, PLAIN)
    if q.shape[1]:
        drafted = q[rows, mx.minimum(accepted, q.shape[1] - 1)]
        scores = mx.where(rejected, _residual(here, drafted), scores)
        chosen_keys = mx.where(rejected, tagged(keys, place, RESIDUAL), chosen_keys)
    token = mx.argmax(scores + gumbel(chosen_keys, vocab_size), axis=-1).astype(mx.int32)
    return _or_failure(token, logits[rows, accepted])


def _residual(p: mx.array, q: mx.array) -> mx.array:
    """Logits of the positive part of p - q; of p where rounding leaves none of it."""
    positive = mx.maximum(p - q, 0.0)
    some = mx.sum(positive, axis=-1, keepdims=True) > 0
    return mx.log(mx.where(some, positive, p))


def _or_failure(token: mx.array, logits: mx.array) -> mx.array:
    """``token``, or why there is none among ``logits``."""
    largest = mx.max(logits.astype(mx.float32), axis=-1)
    token = mx.where(largest == NEGATIVE_INFINITY, NOTHING_ALLOWED, token)
    finite = mx.isfinite(largest) | (largest == NEGATIVE_INFINITY)
    return mx.where(finite, token, NOT_FINITE)


def _taken(probability: mx.array, drafts: mx.array) -> mx.array:
    return mx.take_along_axis(probability, drafts[:, :, None].astype(mx.int32), axis=-1)[:, :, 0]


def _places(positions: mx.array, num: int) -> mx.array:
    return positions[:, None] + mx.arange(num)[None]
