"""What the model writes itself: to learn from, and to measure with."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from treadle_core.batch import generate_batch
from treadle_core.engine import Engine
from treadle_core.errors import RequestFailed
from treadle_core.request import SamplingParams
from treadle_speculative.mtp.fit.data import Document
from treadle_speculative.mtp.fit.folder import Folder

Prompt = tuple[int, ...]

ROUND = 16
"""Answers between two times that they are written down."""


class Sampling(Struct, frozen=True, kw_only=True):
    """How answers are sampled."""

    num_tokens: int
    temperature: float
    seed: int


def answer(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[int]]:
    """The model's answers.

    Raises:
        RequestFailed: One could not be written.
    """
    params = [
        SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.num_tokens,
            seed=(sampling.seed + number) % 2**32,
        )
        for number in range(len(prompts))
    ]
    found = generate_batch(engine, prompts, params)
    for number, completion in enumerate(found):
        if completion.error is not None:
            raise RequestFailed(f"of prompt {number}", str(completion.error))
    return [completion.tokens for completion in found]


def write_answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    folder: Folder,
    tell: Callable[[int], None],
) -> list[Document]:
    """Answers to learn from, with their prompts; those that were written before are not again.

    Args:
        engine: Has no other work.
        prompts: What to answer.
        sampling: How.
        folder: Where they are kept.
        tell: Is told how many there are.

    Raises:
        RequestFailed: One could not be written.
        Unsupported: Those from before are damaged.
    """
    found = folder.load_answers()
    tell(len(found))
    while len(found) < len(prompts):
        start = len(found)
        shifted = Sampling(
            num_tokens=sampling.num_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed + start,
        )
        found += answer(engine, prompts[start : start + ROUND], shifted)
        folder.save_answers(found)
        tell(len(found))
    return [
        Document(tokens=(*prompt, *tokens), prompt=prompt)
        for prompt, tokens in zip(prompts, found, strict=True)
    ]
