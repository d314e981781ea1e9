"""Every position of every row has the logits of mlx-lm's own run of that sequence alone."""

import random

import pytest

from treadle_core.plan import Resize
from treadle_core.testing import zoo

from .harness import (
    POISON,
    SOLO,
    Driver,
    Script,
    play,
    poisoned,
    random_scripts,
    random_tokens,
    subject,
)

BATCHED = [family for family in zoo.FAMILIES if family not in SOLO]
ONE_OF_EACH_KIND = ["llama", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2_hybrid"]
WINDOWED = ["gemma3", "gpt_oss", "olmo3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "seed"), [(f, 1) for f in zoo.FAMILIES] + [(f, 2) for f in ONE_OF_EACH_KIND]
)
def test_rows_that_join_and_leave_at_random_equal_their_own_runs(family: str, seed: int) -> None:
    rng = random.Random(f"{family} {seed}")
    lengths = [1, 300, 2, *(rng.randint(1, 150) for _ in range(3))]
    outgrows_its_group = Script(("outgrows", 0), random_tokens(rng, 80), 60, 7, 80)
    driver = Driver(subject(family))

    scripts = random_scripts(rng, lengths, num_decoded=30)
    play(driver, [outgrows_its_group, *scripts], rng)

    assert driver.obeyed >= {"Open", "Promote", "Close"}
    assert family in SOLO or driver.obeyed >= {"Resize", "Transfer"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "deepseek_v32", "qwen3_next", "mamba2_hybrid", "lfm2"]
)
def test_rows_equal_their_own_runs_when_bytes_run_out_and_rows_start_again(family: str) -> None:
    rng = random.Random(f"{family} budget")
    target = subject(family)
    roomy = Driver(target).layout
    roomy.admit(("probe", 0), 128, 0)
    driver = Driver(target, budget_bytes=3 * roomy.allocated_bytes)

    play(driver, random_scripts(rng, [90, 1, 50, 64, 7], num_decoded=40), rng)


@pytest.mark.slow
@pytest.mark.parametrize("family", BATCHED)
def test_up_to_five_tokens_per_row_of_which_each_row_keeps_some_equal_its_own_run(
    family: str,
) -> None:
    rng = random.Random(f"{family} five")
    driver = Driver(subject(family), slack=4)

    play(driver, random_scripts(rng, [1, 31, 2, 60, 100], num_decoded=60), rng, num_tokens=5)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_ring_without_slack_is_too_short_to_take_tokens_back(family: str) -> None:
    rng = random.Random(family)
    driver = Driver(subject(family), slack=0)

    with pytest.raises(AssertionError, match=r"off by .* of the logits' scale"):
        play(driver, random_scripts(rng, [31, 60, 100], num_decoded=60), rng, num_tokens=3)


@pytest.mark.parametrize(
    ("family", "window"),
    [("gemma3", w) for w in (1, 2, 100)] + [("gpt_oss", w) for w in (5, 64, 65)],
)
def test_windows_narrower_and_wider_than_a_buffer_equal_their_own_runs(
    family: str, window: int
) -> None:
    rng = random.Random(f"{family} {window}")
    driver = Driver(subject(family, sliding_window=window), slack=2)

    lengths = [1, window, window + 1, 2 * window]
    play(driver, random_scripts(rng, lengths, num_decoded=20), rng, num_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "moe", "gpt_oss", "deepseek_v3", "mamba2_hybrid", "llama4"]
)
def test_rows_whose_values_are_not_finite_disturb_no_row_before_or_after_them(family: str) -> None:
    rng = random.Random(f"{family} poison")
    driver = Driver(poisoned(family), spoils=False)
    scripts = random_scripts(rng, [20, 1, 60, 5, 90, 33, 7, 40], num_decoded=40)
    for script in scripts[1::2]:
        position = rng.randrange(len(script.tokens))
        script.tokens = (*script.tokens[:position], POISON, *script.tokens[position + 1 :])

    play(driver, scripts, rng)


def test_a_row_that_changes_groups_finds_nothing_of_the_row_that_was_there_before() -> None:
    rng = random.Random("transfer")
    driver = Driver(poisoned("llama"), spoils=False)
    stays, guilty, grows = (
        Script((name, 0), random_tokens(rng, num_tokens), num_prompt, None, num_tokens)
        for name, num_tokens, num_prompt in [
            ("stays", 128, 100),
            ("guilty", 99, 99),
            ("grows", 80, 60),
        ]
    )
    guilty.tokens = (*guilty.tokens[:95], POISON, *guilty.tokens[96:])
    for script in (stays, guilty, grows):
        driver.admit(script)
        driver.prefill(script)
    driver.decode(1, rng)

    driver.release(guilty)
    while not grows.is_over:
        driver.decode(1, rng)

    assert "Transfer" in driver.obeyed
    assert driver.layout.place(grows.key) == (1, 1)


def test_a_ring_that_a_larger_group_keeps_has_nothing_of_the_row_that_was_there_before() -> None:
    rng = random.Random("ring")
    driver = Driver(poisoned("gpt_oss"), spoils=False)
    stays, guilty, follows = (
        Script((name, 0), random_tokens(rng, num_tokens), num_prompt, None, num_tokens)
        for name, num_tokens, num_prompt in [
            ("stays", 60, 20),
            ("guilty", 20, 20),
            ("follows", 20, 5),
        ]
    )
    guilty.tokens = (*guilty.tokens[:15], POISON, *guilty.tokens[16:])
    for script in (stays, guilty):
        driver.admit(script)
        driver.prefill(script)
    driver.decode(1, rng)

    driver.release(guilty)
    driver.obey([Resize(0, 2, 128)])
    driver.admit(follows)
    driver.prefill(follows)
    while not follows.is_over:
        driver.decode(1, rng)

    assert driver.layout.place(follows.key) == (0, 1)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("width_step", [1, 256])
def test_the_granularity_of_attention_width_changes_nothing(family: str, width_step: int) -> None:
    rng = random.Random(f"{family} {width_step}")
    driver = Driver(subject(family), width_step=width_step)

    play(driver, random_scripts(rng, [3, 64, 40, 1], num_decoded=40), rng)
