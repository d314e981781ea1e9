"""A whole fit: texts in, a head and its figures out, over as many interruptions as there are."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.nn as nn
import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from treadle_core.engine import Engine
from treadle_core.errors import InvalidRequest
from treadle_core.mlx_runtime.fingerprint import fingerprint
from treadle_core.mlx_runtime.split import SplitModel
from treadle_speculative.mtp.files import save_head
from treadle_speculative.mtp.fit import data
from treadle_speculative.mtp.fit.answers import Sampling, answer, write_answers
from treadle_speculative.mtp.fit.config import FitConfig
from treadle_speculative.mtp.fit.folder import Folder
from treadle_speculative.mtp.fit.hidden import HiddenStates
from treadle_speculative.mtp.fit.measure import Acceptance, Answer, agreement, on_answers
from treadle_speculative.mtp.fit.progress import ProgressBar
from treadle_speculative.mtp.fit.start import new_head
from treadle_speculative.mtp.fit.training import Step, Trainer

MEBIBYTE = 2**20
MEASURED_TOKENS = 96
SHOWN_STEPS = 20

# Whatever these are, the result is the same.
HARMLESS = ("data", "save_every", "keep_mb", "overwrite")


class Subject(Struct, frozen=True, kw_only=True):
    """The model that gets a head.

    Attributes:
        name: What people call it.
        model: The model.
        tokenizer: Its text.
        config: The checkpoint's config.
        make_engine: Makes an engine over it, to write answers with.
    """

    name: str
    model: nn.Module
    tokenizer: data.TextTokenizer
    config: dict[str, Any]
    make_engine: Callable[[], Engine]


class FitReport(Struct, frozen=True, kw_only=True):
    """What came of a fit.

    Attributes:
        model: What the model is called.
        settings: How it was fitted.
        steps: Steps that were done.
        seconds: What those took, of all the processes that did them.
        learned_tokens: Tokens that were learned from, the model's answers and their prompts too.
        generated_tokens: Tokens that the model wrote for that.
        held_out_tokens: Tokens of the given texts that were not.
        agreement: Share of first guesses along the held-out texts that are the model's own choice.
        answers: Acceptance in greedy answers to prompts from the held-out texts.
    """

    model: str
    settings: dict[str, Any]
    steps: int
    seconds: float
    learned_tokens: int
    generated_tokens: int
    held_out_tokens: int
    agreement: float
    answers: Acceptance


class Fit:
    """A fit of a head.

    Args:
        subject: The model.
        config: How.
        out: The folder of the run, and of the head.
        bar: Is told how far it is.

    Raises:
        InvalidRequest: There is too little to learn from.
        Unsupported: A file to learn from or the folder cannot be used, or the model can have no
            head.
    """

    def __init__(self, subject: Subject, config: FitConfig, out: Path, bar: ProgressBar) -> None:
        self._subject, self._config, self._bar = subject, config, bar
        self._base = SplitModel(subject.model)
        self._hidden = HiddenStates(self._base, config.keep_mb * MEBIBYTE)
        self._head = new_head(self._base, config.seed)
        documents = data.read(config.data, subject.tokenizer)
        self._corpus = data.split(documents, config.held_out, config.seed)
        self._held_out = data.pack(self._corpus.held_out, config.sequence_length)
        if not self._held_out or not data.pack(self._corpus.learned, config.sequence_length):
            num_tokens = sum(len(document.tokens) for document in documents)
            raise InvalidRequest(
                "data",
                f"{num_tokens} tokens",
                f"a sequence of {config.sequence_length} tokens to learn from and one to hold out: "
                "more text, a smaller sequence_length or a larger held_out",
            )
        self._settings = {
            **{name: value for name, value in asdict(config).items() if name not in HARMLESS},
            "data": data_digest(documents),
            "model": fingerprint(subject.model, subject.config),
        }
        self._folder = Folder(out, self._settings, overwrite=config.overwrite)

    def run(self) -> FitReport:
        """Do what is left of it, and write the head and the report.

        Raises:
            InvalidRequest: There are no prompts for the model to answer.
            RequestFailed: The model could not write an answer.
            Unsupported: What was kept is damaged.
            KeyboardInterrupt: It was stopped; what it had done is kept.
        """
        length, head = self._config.sequence_length, self._head
        written = self._written()
        sequences = data.pack((*self._corpus.learned, *written), length)
        trainer = Trainer(head, self._hidden, sequences, self._config)
        self._train(trainer)
        head.set_dtype(self._base.dtype)
        save_head(head, self._folder.path)
        report = FitReport(
            model=self._subject.name,
            settings=self._settings,
            steps=trainer.num_steps,
            seconds=round(self._folder.run.seconds, 1),
            learned_tokens=len(sequences) * length,
            generated_tokens=sum(len(d.tokens) - len(d.prompt or ()) for d in written),
            held_out_tokens=len(self._held_out) * length,
            agreement=agreement(head, self._hidden, self._held_out),
            answers=on_answers(head, self._hidden, self._greedy_answers()),
        )
        self._folder.finish(report)
        self._bar.clear()
        return report

    def _written(self) -> list[data.Document]:
        """What the model writes to learn from."""
        number = self._config.generate
        if not number:
            return []
        sampling = Sampling(
            num_tokens=self._config.generate_tokens,
            temperature=self._config.temperature,
            seed=self._config.seed,
        )
        prompts = data.prompts(self._corpus.learned, number, self._config.seed)
        if not prompts:
            raise InvalidRequest(
                "generate", number, f"0, as every prompt is over {data.LONGEST_PROMPT} tokens"
            )
        return write_answers(
            self._subject.make_engine(),
            prompts,
            sampling,
            self._folder,
            lambda done: self._bar.show("answers", done, number),
        )

    def _train(self, trainer: Trainer) -> None:
        """Do the steps that are left; whatever stops this, the last whole step is kept."""
        state = self._folder.load()
        if state is not None:
            trainer.restore(state)
            self._bar.note(f"going on behind step {state.step}")
        before, began = self._folder.run.seconds, time.monotonic()

        def keep() -> None:
            self._folder.save(trainer.state, before + time.monotonic() - began)

        recent: deque[Step] = deque(maxlen=SHOWN_STEPS)
        try:
            while trainer.state.step < trainer.num_steps:
                recent.append(trainer.step())
                self._bar.show("steps", trainer.state.step, trainer.num_steps, words(recent))
                if trainer.state.step % self._config.save_every == 0:
                    keep()
        finally:
            if trainer.state.step > self._folder.run.step:
                keep()

    def _greedy_answers(self) -> list[Answer]:
        """The model's answers to prompts from the held-out texts."""
        prompts = data.prompts(self._corpus.held_out, self._config.measure, self._config.seed)
        sampling = Sampling(num_tokens=MEASURED_TOKENS, temperature=0.0, seed=0)
        found = answer(self._subject.make_engine(), prompts, sampling)
        return [
            Answer(tokens=(*prompt, *tokens), start=len(prompt))
            for prompt, tokens in zip(prompts, found, strict=True)
        ]


def words(recent: Sequence[Step]) -> str:
    """What the last steps came to."""
    loss = statistics.fmean(step.loss for step in recent)
    agreed = statistics.fmean(step.agreement for step in recent)
    return f"loss {loss:.3f}, accepts {agreed:.0%},"


def data_digest(documents: Sequence[data.Document]) -> str:
    """A digest of everything that was read."""
    return blake2b(msgspec.json.encode(documents), digest_size=16).hexdigest()
