"""A head over whole sequences at once: what it guesses one, two, … tokens ahead, at every position.

While it drafts, a head attends to what it was given for the positions before, then to its own chain: a
guess, and its hidden state in place of the model's. For every position of a sequence this is computed
in one pass for each token of the chain. With three positions, and the second pass::

                 first pass        second pass
                 0   1   2         0   1   2
    position 0   o                 o
    position 1   o   o                 o
    position 2   o   o   o                 o

The tokens of a chain are the text's: what follows is looked at only where the guesses were right.
"""

import mlx.core as mx

from treadle_speculative.mtp.head import MtpHead


class ChainCache:
    """Keys and values of one layer over all passes; the layer takes it for a cache of its own."""

    def __init__(self) -> None:
        self.offset = 0
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add a pass, and give all there were."""
        self._keys.append(keys)
        self._values.append(values)
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)


def chain(head: MtpHead, tokens: mx.array, hidden: mx.array, depth: int) -> list[mx.array]:
    """The head's hidden states ``[B, L - 1, hidden]`` of each pass.

    In pass ``d``, from 0, the state of position ``i`` leads to a guess of token ``i + 2 + d``; there
    are positions at the end for which the sequence has no such token.

    Args:
        head: The head.
        tokens: ``[B, L]``.
        hidden: ``[B, L, hidden]``, the model's hidden states of them.
        depth: Number of passes.
    """
    length = tokens.shape[1] - 1
    caches = [ChainCache() for _ in head.layers]
    causal = mx.tril(mx.ones((length, length), dtype=mx.bool_))
    itself = mx.eye(length, dtype=mx.bool_)
    states, found = hidden[:, :-1], list[mx.array]()
    for step in range(depth):
        for cache in caches:
            cache.offset = step
        mask = mx.concatenate([causal, *[itself] * step], axis=1)
        states = head(states, shifted(tokens, step + 1), caches, mask)
        found.append(states)
    return found


def shifted(tokens: mx.array, by: int) -> mx.array:
    """``tokens [B, L]`` from place ``by`` on, with zeros at the end: ``[B, L - 1]``."""
    rest = tokens[:, by:]
    return mx.pad(rest, [(0, 0), (0, tokens.shape[1] - 1 - rest.shape[1])])


def num_guesses(length: int, step: int) -> int:
    """Positions of a sequence of ``length`` tokens whose guess in a pass can be compared."""
    return max(0, length - 2 - step)
