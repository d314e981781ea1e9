"""Fitting a head: it learns, goes on where it was stopped, and refuses what it cannot honour."""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from msgspec.structs import replace

from treadle_core.batch import generate_batch
from treadle_core.engine import Engine
from treadle_core.errors import InvalidRequest, Unsupported
from treadle_core.mlx_runtime.load import ModelOptions, make_runner
from treadle_core.mlx_runtime.split import SplitModel
from treadle_core.request import SamplingParams
from treadle_core.testing import zoo
from treadle_speculative.controller import FixedController
from treadle_speculative.mtp import MtpDrafter
from treadle_speculative.mtp.files import WEIGHTS, load_head
from treadle_speculative.mtp.fit import data
from treadle_speculative.mtp.fit.answers import Sampling, answer
from treadle_speculative.mtp.fit.command import from_flags, load_subject, main
from treadle_speculative.mtp.fit.config import FitConfig
from treadle_speculative.mtp.fit.hidden import HiddenStates
from treadle_speculative.mtp.fit.measure import Answer, by_position, on_answers, walk
from treadle_speculative.mtp.fit.passes import chain
from treadle_speculative.mtp.fit.progress import ProgressBar
from treadle_speculative.mtp.fit.run import Fit, FitReport, Subject
from treadle_speculative.mtp.fit.start import new_head, plain_weights
from treadle_speculative.mtp.fit.training import Trainer
from treadle_speculative.mtp.fit.vocabulary import rows_of, shortlist

CHANCE = 1 / zoo.VOCAB_SIZE


class Notes:
    """A terminal that remembers, and stops whoever writes the words ``stop`` to it."""

    def __init__(self, stop: str | None = None, *, live: bool = True) -> None:
        self.text = ""
        self._stop, self._live = stop, live

    def isatty(self) -> bool:
        return self._live

    def flush(self) -> None:
        pass

    def write(self, text: str) -> int:
        self.text += text
        if self._stop is not None and self._stop in text:
            raise KeyboardInterrupt
        return len(text)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def subject(checkpoint: Path) -> Subject:
    return load_subject(ModelOptions(model=str(checkpoint)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> FitConfig:
    """A language that says one thing, and a few steps."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("up and down; " * 30)
    return FitConfig(
        data=(str(path),),
        sequence_length=26,
        batch_size=4,
        epochs=2,
        held_out=0.1,
        learning_rate=5e-3,
        depth=2,
        save_every=3,
        generate=8,
        generate_tokens=8,
        measure=2,
    )


def fit(subject: Subject, config: FitConfig, out: Path, notes: Notes | None = None) -> FitReport:
    return Fit(subject, config, out, ProgressBar(notes or Notes())).run()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(
    subject: Subject, config: FitConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FitReport, Path]:
    out = tmp_path_factory.mktemp("finished")
    return fit(subject, config, out), out


@pytest.mark.parametrize("targets", ["soft", "text"])
def test_the_loss_falls_and_predictable_text_is_guessed(
    subject: Subject, config: FitConfig, targets: Any
) -> None:
    config = replace(config, targets=targets, epochs=20, depth=1, shortlist=64)
    base = SplitModel(subject.model)
    sequences = data.pack(data.read(config.data, subject.tokenizer), 26)[:4]
    trainer = Trainer(new_head(base, 0), HiddenStates(base, 2**20), sequences, config)
    steps = [trainer.step() for _ in range(trainer.num_steps)]

    first, last = steps[:5], steps[-5:]
    assert statistics.fmean(s.loss for s in last) < 0.8 * statistics.fmean(s.loss for s in first)
    if targets == "soft":
        assert statistics.fmean(s.agreement for s in last) > 100 * CHANCE


def test_a_run_that_was_stopped_ends_bit_for_bit_like_one_that_was_not(
    subject: Subject, config: FitConfig, finished: tuple[FitReport, Path], tmp_path: Path
) -> None:
    report, whole = finished
    assert report.steps > 5
    for moment in ("answers", "steps [", f" 4/{report.steps}", f" 5/{report.steps}"):
        with pytest.raises(KeyboardInterrupt):
            fit(subject, config, tmp_path, Notes(stop=moment))
        assert not (tmp_path / WEIGHTS).exists()
    notes = Notes()
    again = fit(subject, replace(config, save_every=1, keep_mb=0), tmp_path, notes)

    assert "going on behind step 5" in notes.text
    assert replace(again, seconds=0.0) == replace(report, seconds=0.0)
    assert (tmp_path / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in whole.iterdir()}


def test_the_head_is_one_that_drafters_load(
    subject: Subject, finished: tuple[FitReport, Path]
) -> None:
    report, out = finished
    head = load_head(out, SplitModel(subject.model))

    assert head.form.num_layers == 1
    assert json.loads((out / "report.json").read_text())["agreement"] == report.agreement
    assert 8 <= report.generated_tokens <= 64


def test_a_run_goes_on_with_its_own_settings_only(
    subject: Subject, config: FitConfig, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(subject, config, tmp_path, Notes(stop=" 1/"))

    with pytest.raises(Unsupported, match=r"other settings: epochs \(2, now 3\); .*--overwrite"):
        fit(subject, replace(config, epochs=3), tmp_path)


def test_a_finished_head_is_replaced_only_when_told(
    subject: Subject, config: FitConfig, tmp_path: Path
) -> None:
    once = replace(config, epochs=1, generate=0)
    fit(subject, once, tmp_path)
    first = (tmp_path / WEIGHTS).read_bytes()

    with pytest.raises(Unsupported, match="finished head already; --overwrite"):
        fit(subject, once, tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == first
    fit(subject, replace(once, seed=1, overwrite=True), tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() != first


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        *((which, "flip") for which in ("fit-*.safetensors", "fit.json", "answers.json")),
        *((which, "cut") for which in ("fit-*.safetensors", "fit.json", "answers.json")),
        ("fit-*.safetensors", "remove"),
    ],
)
def test_what_is_damaged_is_refused(
    which: str, damage: str, stopped: Path, tmp_path: Path, subject: Subject, config: FitConfig
) -> None:
    for path in stopped.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (path,) = tmp_path.glob(which)
    content = bytearray(path.read_bytes())
    match damage:
        case "flip":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case _:
            path.unlink()

    with pytest.raises(Unsupported, match=r"is damaged|other settings"):
        fit(subject, config, tmp_path)


@pytest.fixture(scope="module")
def stopped(subject: Subject, config: FitConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        fit(subject, config, out, Notes(stop=" 2/"))
    return out


@pytest.mark.parametrize("family", ["llama", "moe", "deepseek_v3", "qwen3_next"])
def test_a_chain_is_what_the_head_does_step_by_step_with_its_own_caches(
    family: str, config: FitConfig
) -> None:
    base = SplitModel(zoo.build(family))
    head = new_head(base, 3)
    rng = random.Random(0)
    tokens = mx.array([[rng.randrange(256) for _ in range(10)]])
    hidden = base.hidden(tokens, base.new_cache())
    passes = chain(head, tokens, hidden, 3)

    for place in range(6):
        caches = head.new_cache()
        state = head(hidden[:, : place + 1], tokens[:, 1 : place + 2], caches)[:, -1:]
        for step in range(3):
            assert mx.allclose(passes[step][:, place : place + 1], state, atol=1e-4)
            state = head(state, tokens[:, place + 2 + step : place + 3 + step], caches)

    sequence = tuple(range(20))
    trainer = Trainer(head, HiddenStates(base, 0), [sequence], replace(config, epochs=10))
    steps = [trainer.step() for _ in range(10)]
    assert steps[-1].loss < steps[0].loss


def test_a_model_whose_layers_keep_several_caches_is_refused() -> None:
    with pytest.raises(Unsupported, match="the layers of deepseek_v32 keep several caches"):
        new_head(SplitModel(zoo.build("deepseek_v32")), 0)


@pytest.mark.parametrize("tied", [False, True])
def test_part_of_the_vocabulary_has_the_logits_of_the_whole(tied: bool) -> None:
    for bits in (None, 8):
        model = zoo.build("llama", num_hidden_layers=1, tie_word_embeddings=tied)
        if bits is not None:
            nn.quantize(model, group_size=32, bits=bits)
        base = SplitModel(model)
        states = mx.random.normal((3, base.hidden_size), key=mx.random.key(0))
        chosen = mx.array([5, 300, 7])
        weights, _ = rows_of(base, chosen)
        assert mx.allclose(states @ weights.T, base.logits(states)[:, chosen], atol=1e-4)


def test_a_head_begins_as_the_last_layer_even_of_a_quantised_model() -> None:
    model = zoo.build("llama", num_hidden_layers=1)
    plain = plain_weights(model.layers[0])
    nn.quantize(model, group_size=32, bits=8)
    head = new_head(SplitModel(model), 0)

    for name, weight in plain_weights(head.layers[0]).items():
        assert mx.allclose(weight, plain[name], atol=0.02)
        assert weight.dtype == mx.float32


def test_a_shortlist_has_its_own_and_others_at_random() -> None:
    found = shortlist({3, 90}, 100, 10, random.Random(0))
    assert (len(found), found) == (10, sorted(found))
    assert {3, 90} < set(found)
    assert shortlist({3, 90}, 100, 10, random.Random(1)) != found
    assert shortlist({3}, 100, 100, random.Random(0)) == list(range(100))
    assert shortlist(set(range(20)), 100, 10, random.Random(0)) == list(range(20))


def test_acceptance_is_counted_along_chains() -> None:
    T, F = True, False  # noqa: N806
    hits = [[[T, F, T, T], [T, T, F], [F, T], [T]]]

    # Place 0 has two right guesses, place 1 none, place 2 one, place 3 one and no more room.
    assert by_position(hits) == (0.75, 0.5, 0.0, 0.0)
    assert walk(hits, 1) == (2 + 2) / 2
    assert walk(hits, 2) == (3 + 2) / 2


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_what_is_measured_is_what_a_drafter_gets(
    depth: int, subject: Subject, config: FitConfig
) -> None:
    prompts = [tuple(b"up and"), tuple(b"and down; up"), tuple(b"wn; u")]
    greedy = Sampling(num_tokens=40, temperature=0.0, seed=0)
    found = answer(subject.make_engine(), prompts, greedy)
    texts = [(*p, *tokens) for p, tokens in zip(prompts, found, strict=True)]
    runner = make_runner(subject.model, subject.config, slack=depth)
    base = runner.split()
    head, hidden = new_head(base, 0), HiddenStates(base, 2**20)
    trainer = Trainer(head, hidden, texts, replace(config, epochs=12, batch_size=1))
    while trainer.state.step < trainer.num_steps:
        trainer.step()

    drafter = MtpDrafter(head, context_length=runner.spec.context_length)
    runner.listen(drafter, base)
    engine = Engine(
        runner,
        drafter=drafter,
        controller=FixedController(depth),
    )
    for prompt, tokens in zip(prompts, found, strict=True):
        (drafted,) = generate_batch(
            engine, [prompt], SamplingParams(temperature=0.0, max_tokens=len(tokens))
        )
        measured = on_answers(head, hidden, [Answer((*prompt, *tokens), len(prompt))])
        assert drafted.tokens == tokens
        assert drafted.usage is not None
        assert drafted.usage.drafts is not None
        # One forward more, for the first token; a last guess may be right of a token more than 40.
        forwards = len(tokens) - drafted.usage.drafts.forwards_saved - 1
        assert (len(tokens) - 1) / forwards <= measured.tokens_per_forward[depth - 1] + 1e-3
        assert measured.tokens_per_forward[depth - 1] <= len(tokens) / forwards + 1e-3
    total = engine.stats().drafts
    assert total is not None
    assert total.accepted > 10
    assert total.rejected > 10


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", "", "a.txt: got 0 bytes, expected a file of 1 to 1073741824 bytes"),
        ("a.txt", b"one\ntw\xff", r"a.txt, line 2: got b'\\xff', expected UTF-8"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', "a.jsonl, line 2: got no JSON .* a JSON object"),
        ("a.jsonl", "[]\n", "line 1: got no such object, expected an object with either"),
        ("a.jsonl", '{"text": ""}\n', "line 1: got an object with text, expected"),
        ("a.jsonl", '{"text": "x", "messages": []}\n', "line 1: got an object with messages, text"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "line 1: got an object with messages"),
        ("a.jsonl", '\n\n{"text": "\\ud800"}\n', "line 3: .*lone surrogates"),
        (
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": "no question"}]}\n',
            "line 1: got an object with messages",
        ),
    ],
)
def test_bad_data_is_told_with_file_line_and_limit(
    name: str, content: str | bytes, told: str, tmp_path: Path, subject: Subject
) -> None:
    with pytest.raises(Unsupported, match=told):
        data.read([write(tmp_path / name, content)], subject.tokenizer)


def test_a_long_line_is_refused(tmp_path: Path, subject: Subject) -> None:
    path = write(tmp_path / "a.jsonl", b"\n" + b'"' * (data.MOST_LINE_BYTES + 1))
    with pytest.raises(Unsupported, match="line 2: got over 16777216 bytes, expected at most"):
        data.read([path], subject.tokenizer)
    with pytest.raises(Unsupported, match="nowhere: got No such file or directory, expected"):
        data.read([str(tmp_path / "nowhere")], subject.tokenizer)


def test_chats_and_prose_become_documents(tmp_path: Path, subject: Subject) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
    ]
    lines = f'{{"text": "prose"}}\n\n{json.dumps({"messages": chat})}\n'
    prose, talk = data.read([write(tmp_path / "a.jsonl", lines)], subject.tokenizer)

    assert prose.tokens[: len("prose")] == tuple(b"prose")
    assert prose.tokens[-1] in subject.tokenizer.end_tokens
    assert prose.prompt is None
    assert talk.prompt is not None
    assert talk.tokens[: len(talk.prompt)] == talk.prompt
    assert data.prompts([talk], 2, 0) == [talk.prompt] * 2


def test_what_is_held_out_is_not_learned_from() -> None:
    documents = [
        data.Document(tokens=tuple(range(100 * n, 100 * n + 60)), prompt=(n,) if n % 2 else None)
        for n in range(10)
    ]
    for seed in range(5):
        corpus = data.split(documents, 0.25, seed)
        learned = [token for d in corpus.learned for token in d.tokens]
        held_out = [token for d in corpus.held_out for token in d.tokens]
        assert sorted(learned + held_out) == sorted(t for d in documents for t in d.tokens)
        assert 150 <= len(held_out) <= 180
    assert data.split(documents, 0.2, 1) == data.split(documents, 0.2, 1)
    assert data.pack(documents, 250)[1] == tuple([t for d in documents for t in d.tokens][250:500])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_length", 15),
        ("batch_size", 0),
        ("held_out", 0.6),
        ("learning_rate", 0.0),
        ("depth", 9),
        ("targets", "hard"),
        ("generate", -1),
        ("temperature", float("nan")),
        ("data", ()),
        ("overwrite", "yes"),
    ],
)
def test_options_have_limits(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: got"):
        FitConfig(**{"data": ("x",), field: value})  # pyright: ignore[reportArgumentType]


def test_the_command_line_is_read_by_type() -> None:
    given = {"data": ["a", "b"], "epochs": "7", "held_out": "0.1", "overwrite": True, "out": "x"}
    assert from_flags(given) == FitConfig(data=("a", "b"), epochs=7, held_out=0.1, overwrite=True)
    with pytest.raises(InvalidRequest, match="epochs: got 'many', expected `int`"):
        from_flags({"data": ["a"], "epochs": "many"})


def test_too_little_text_is_refused_by_the_command(checkpoint: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "short")
    words = ["--model", str(checkpoint), "--data", path, "--out", str(tmp_path / "out")]
    with pytest.raises(InvalidRequest, match="data: got '6 tokens', expected a sequence of 256"):
        main(words)
    assert not (tmp_path / "out").exists()


def test_progress_is_a_bar_on_a_terminal_and_a_line_now_and_then_elsewhere() -> None:
    for live in (True, False):
        notes, now = Notes(live=live), [0.0]
        bar = ProgressBar(notes, lambda now=now: now[0])  # type: ignore[arg-type]
        for done in range(5):
            bar.show("steps", done, 4, "loss 1.0,")
            now[0] += 6.0
        bar.clear()
        if live:
            assert notes.text.count("\r") == 5 + 2
            assert "steps [############............] 2/4 loss 1.0, 0:12 left" in notes.text
        else:
            assert [line.split(" loss")[0][-3:] for line in notes.text.splitlines()] == [
                "0/4",
                "2/4",
                "4/4",
            ]
