"""What is reused equals what is computed: every kind of layer, alone, in a batch, after a restart."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from treadle_core import Engine, Finished, Request, SamplingParams, TokenOut
from treadle_core.errors import Unsupported
from treadle_core.layers import state_layout
from treadle_core.mlx_runtime.groups import RowGroup
from treadle_core.mlx_runtime.load import ModelOptions, load, make_runner
from treadle_core.mlx_runtime.runner import ModelRunner
from treadle_core.plan import Open, Resize
from treadle_core.ports import PrefixStore
from treadle_core.prefix import PrefixKey
from treadle_core.testing import RecordingObserver, zoo

from .harness import (
    BLOCK,
    FAMILIES,
    Session,
    full_blocks,
    has_state,
    ram_store,
    runner_of,
    tiered_store,
    tokens,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_prompt_is_computed_once(family: str) -> None:
    prompt, answer = tokens(1, 41), tokens(2, 6)
    session = Session(family, ram_store())
    assert session.ask("cold", prompt, answer) == 0
    warm = session.ask("warm", prompt, answer)
    assert warm == (40 if has_state(family) else full_blocks(40))


@pytest.mark.parametrize("family", FAMILIES)
def test_hits_never_go_backwards_while_a_chat_grows(family: str) -> None:
    session = Session(family, ram_store())
    chat, before = tokens(3, 20), 0
    for turn in range(4):
        answer = tokens(10 + turn, 9)
        cached = session.ask(f"turn {turn}", chat, answer)
        if turn:
            assert cached >= before, f"{cached} after {before}"
        computed = len(chat) + len(answer) - 1
        before = computed if has_state(family) else full_blocks(computed)
        chat = (*chat, *answer, *tokens(20 + turn, 7))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_beginning_is_reused_up_to_its_boundary(family: str) -> None:
    session = Session(family, ram_store(), checkpoint_interval=1000)
    system, answer = tokens(4, 24), tokens(5, 4)
    one, other = (*system, *tokens(6, 15)), (*system, *tokens(7, 18))
    session.ask("one", one, answer, boundaries=(24,))
    assert session.ask("other", other, answer) == 24


@pytest.mark.parametrize("family", [family for family in FAMILIES if not has_state(family)])
def test_a_shared_beginning_that_ends_inside_a_block_is_reused_to_its_last_token(
    family: str,
) -> None:
    session = Session(family, ram_store())
    answer = tokens(5, 4)
    for shared in (29, 13, 24):
        system = tokens(100 + shared, shared)
        one, other = (*system, 251, *tokens(6, 15)), (*system, 252, *tokens(7, 18))
        session.ask(f"one {shared}", one, answer)
        assert session.ask(f"other {shared}", other, answer) == shared
        stored = full_blocks(len(one) + len(answer) - 1)
        assert session.ask(f"again {shared}", one, answer) == min(len(one) - 1, stored)
    prompt = tokens(8, 5 * BLOCK)
    session.ask("whole", prompt, answer)
    assert session.ask("whole again", prompt, answer) == len(prompt) - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_row_joins_rows_that_decode(family: str) -> None:
    session = Session(family, ram_store())
    prompt, answer = tokens(8, 30), tokens(9, 8)
    others = {f"other {i}": (tokens(30 + i, 5 + 11 * i), tokens(40 + i, 30)) for i in range(3)}
    session.ask("cold", prompt, answer)
    for id, (asked, given) in others.items():
        session.add(id, asked, given)
    session.run(until=lambda: all(session.logits[id] for id in others))
    session.add("warm", prompt, answer)
    session.run()
    assert session.check("warm", prompt, answer) > 0
    for id, (asked, given) in others.items():
        session.check(id, asked, given)


@pytest.mark.parametrize("joins", [False, True])
def test_a_prompt_is_stored_whose_last_chunk_went_with_the_decode(*, joins: bool) -> None:
    """Its row decodes in the same step, or waits for another chunk to come with its own."""
    observer = RecordingObserver()
    session = Session("llama", ram_store(), chunked_prefill_tokens=16)
    session.engine.observe(observer)
    running, answer = tokens(1, 12), tokens(2, 30)
    session.add("running", running, answer)
    session.run(until=lambda: len(session.logits["running"]) > 2)
    prompts = [tokens(3, 41), tokens(4, 33)][: 1 + joins]
    for number, prompt in enumerate(prompts):
        session.add(f"cold {number}", prompt, tokens(5, 6))
    session.run()

    fused = {key[0] for plan, result in observer.steps if result.fused for key in plan.saved}
    assert {f"cold {number}" for number in range(len(prompts))} <= fused
    session.check("running", running, answer)
    for number, prompt in enumerate(prompts):
        session.check(f"cold {number}", prompt, tokens(5, 6))
        warm = session.ask(f"warm {number}", prompt, tokens(5, 6))
        assert warm == full_blocks(len(prompt) - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_aborted_prefill_computed_is_kept(family: str) -> None:
    session = Session(family, ram_store(), chunked_prefill_tokens=16, prefill_step_size=16)
    prompt, answer = tokens(11, 70), tokens(12, 4)
    session.add("aborted", prompt, answer)
    for _ in range(3):
        session.engine.step()
    assert session.engine.abort("aborted")
    session.run()
    assert session.finished["aborted"].reason == "abort"
    assert session.ask("again", prompt, answer) >= 32


@pytest.mark.parametrize("bits", [4, 8])
def test_a_stored_block_takes_what_the_live_one_takes(bits: int) -> None:
    prompt, answer = tokens(13, 64), tokens(14, 2)
    used: dict[str, int] = {}
    for family in (f"llama/{bits}", "llama/8"):
        session = Session(family, ram_store())
        session.ask("cold", prompt, answer)
        used[family] = session.store.stats().used_bytes
    layout = state_layout(runner_of(f"llama/{bits}").spec)
    eight = state_layout(runner_of("llama/8").spec)
    difference = used["llama/8"] - used[f"llama/{bits}"]
    assert difference == 64 * (eight.token_bytes - layout.token_bytes)


def test_kv_that_is_quantised_live_is_not_quantised_again() -> None:
    with pytest.raises(Unsupported, match="the model's KV is uint32 already"):
        Session("llama/8", ram_store(kv_storage_bits=8))


@pytest.mark.parametrize("ram_bytes", [256 << 20, 0], ids=["ram", "no ram"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_comes_back_from_disk_after_a_restart(
    family: str, ram_bytes: int, tmp_path: Path
) -> None:
    prompt, answer = tokens(13, 37), tokens(14, 5)
    before = Session(family, tiered_store(tmp_path, ram_bytes=ram_bytes))
    assert before.ask("cold", prompt, answer) == 0
    before.engine.close()
    after = Session(family, tiered_store(tmp_path, ram_bytes=ram_bytes))
    others = {f"other {i}": (tokens(50 + i, 9 + 8 * i), tokens(60 + i, 12)) for i in range(2)}
    for id, (asked, given) in others.items():
        after.add(id, asked, given)
    cached = after.ask("warm", prompt, answer)
    assert cached == (36 if has_state(family) else full_blocks(36))
    for id, (asked, given) in others.items():
        after.check(id, asked, given)
    after.engine.close()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype)
        for family in ("llama", "gemma3", "lfm2", "mamba2_hybrid", "gpt_bigcode")
        for dtype in (mx.float32, mx.float16, mx.bfloat16)
    ]
    # Their experts' matrices are multiplied in float32 only, on the CPU.
    + [("deepseek_v3", mx.float32), ("qwen3_next", mx.float32)],
    ids=str,
)
def test_a_row_comes_back_bit_by_bit(family: str, dtype: mx.Dtype, tmp_path: Path) -> None:
    """One family of each kind of layer, through RAM and through disk."""
    model = zoo.build(family)
    model.set_dtype(dtype)
    runner = make_runner(model, zoo.config(family))
    layout = state_layout(runner.spec)
    prompt = tokens(15, 45)
    first = filled_row(runner, prompt)
    key = PrefixKey(tokens=prompt[:40])
    read = first.reader(0, 40)
    expected = [*read.tokens(0, 40), *read.state()]
    store = tiered_store(tmp_path)
    store.attach(runner.fingerprint, layout)
    store.insert(key, read, store.generation)
    store.close()
    again = tiered_store(tmp_path)
    again.attach(runner.fingerprint, layout)
    found = again.find(key, 40)
    while not found.ready:
        assert found.ticket is not None
        again.wait(1.0)
        found = again.poll(found.ticket) or found
    assert found.num_tokens == 40
    assert found.ticket is not None
    second = filled_row(runner, ())
    second.restore(0, again.load(found.ticket))
    row = second.reader(0, 40)
    restored = [*row.tokens(0, 40), *row.state()]
    assert len(restored) == len(expected)
    for one, other in zip(restored, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
    again.close()


def filled_row(runner: ModelRunner, prompt: Sequence[int]) -> RowGroup:
    """A group of one row that holds the first 40 tokens of ``prompt``, or nothing."""
    group = runner.new_group()
    group.resize(Resize(0, 1, 64))
    group.open(Open(0, 0))
    if prompt:
        group.prefill(0, prompt[:25], 0)
        mx.eval(group.arrays())
        group.prefill(0, prompt[25:40], 25)
        mx.eval(group.arrays())
    return group


SYSTEM = "You are a helpful assistant. Answer in one short sentence. " * 2
QUESTIONS = ("What is the capital of France?", "Name a colour.")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_smollm2_gives_the_same_tokens_cold_warm_and_from_disk(tmp_path: Path) -> None:
    """Greedy, token for token; the second question joins while the first is answered."""
    expected = ask_smollm2(smollm2(None))
    for start in ("new", "restarted"):
        engine = smollm2(tiered_store(tmp_path))
        for turn in ("first", "again") if start == "new" else ("first",):
            for question, (answer, cached) in ask_smollm2(engine).items():
                assert answer == expected[question][0], (start, turn, question)
                assert (cached >= 16) == ((start, turn, question) != ("new", "first", 0))
        engine.close()


def smollm2(store: PrefixStore | None) -> Engine:
    loaded = load(ModelOptions())
    return Engine(loaded.runner, tokenizer=loaded.tokenizer, store=store)


def ask_smollm2(engine: Engine) -> dict[int, tuple[list[int], int]]:
    """Tokens and number of reused ones of each question; the next begins beside the one before."""
    found: dict[int, tuple[list[int], int]] = {}
    given: dict[str, list[int]] = {}
    for number, question in enumerate(QUESTIONS):
        prompt = f"<|im_start|>user\n{SYSTEM}{question}<|im_end|>\n<|im_start|>assistant\n"
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        given[str(number)] = []
        engine.add(Request(id=str(number), prompt=prompt, params=params))
        while engine.has_work and (len(given[str(number)]) < 3 or number == len(QUESTIONS) - 1):
            for event in engine.step():
                if isinstance(event, TokenOut):
                    given[event.request_id].append(event.token)
                elif isinstance(event, Finished):
                    id = event.request_id
                    found[int(id)] = (given[id], event.usage.cached_tokens)
    return found
