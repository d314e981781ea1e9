"""Where other chats may branch off from one, so that state is worth keeping there.

Layers that cannot be cut at any token can go on only from where their state was kept. Which tokens
a later chat shares depends on the template: it may move instructions, close a turn, or drop what
the model thought. So chats that go on differently are rendered, and compared with this one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from treadle_core import InvalidRequest

SHORTEST = 32
"""Fewer tokens are computed again: a state costs more than that."""

PLACEHOLDERS = ("x", "y")

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], Sequence[int]]
"""Renders and encodes a chat; raises InvalidRequest if the template refuses it."""


def find_boundaries(
    messages: Sequence[Message], tokens: Sequence[int], render: Render
) -> tuple[int, ...]:
    """Numbers of first tokens that are shared with chats which go on differently.

    Args:
        messages: The chat, as templates know it.
        tokens: What it renders to.
        render: Renders another chat in the same way. It is called at most three times.

    Returns:
        Ascending. The last token is never among them: a prompt that comes again needs its logits.
    """
    most = len(tokens) - 1
    found = {min(num_common(tokens, render, branch), most) for branch in branches(messages)}
    return tuple(sorted(num for num in found if num >= SHORTEST))


def moved(nums: Sequence[int], written: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    """The same numbers for a prompt in which media take the places of what was written for them.

    Those before the first and behind the last of the media are found, those between them are not.

    Args:
        nums: Numbers of first tokens of ``written``.
        written: The chat's tokens, as its template writes media.
        tokens: The prompt's.
    """
    head = common(written, tokens)
    tail = common(written[::-1], tokens[::-1])
    longer = len(tokens) - len(written)
    before = [num for num in nums if num <= head]
    behind = [num + longer for num in nums if num > head and len(written) - num <= tail]
    return tuple(before + behind)


def branches(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Chats that share instructions, all but the last question, or everything with this one."""
    roles = [message["role"] for message in messages]
    num_system = next((n for n, role in enumerate(roles) if role != "system"), len(roles))
    yield [*messages[:num_system], other_user(messages[num_system:])]
    last = max((n for n, role in enumerate(roles) if role == "user"), default=num_system)
    if last > num_system:
        yield [*messages[:last], other_user(messages[last:])]
    answer = [] if roles[-1] == "assistant" else [{"role": "assistant", "content": "x"}]
    yield [*messages, *answer, other_user(())]


def other_user(rest: Sequence[Message]) -> Message:
    """A user's message that begins unlike the first of ``rest``."""
    said = str(rest[0]["content"]).strip() if rest else ""
    return {"role": "user", "content": next(p for p in PLACEHOLDERS if not said.startswith(p))}


def num_common(tokens: Sequence[int], render: Render, branch: Sequence[Message]) -> int:
    """How many first tokens a chat shares; 0 if the template refuses it."""
    try:
        other = render(branch)
    except InvalidRequest:
        return 0
    return common(tokens, other)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
