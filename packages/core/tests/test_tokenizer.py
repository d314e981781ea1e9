"""The tokenizer port over a Hugging Face tokenizer: end tokens, opening token, text, chats."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from treadle_core.errors import InvalidRequest
from treadle_core.mlx_runtime.load import ModelOptions, load
from treadle_core.mlx_runtime.tokenizer import ModelTokenizer, token_ids
from treadle_core.testing import zoo

BOS, EOS = zoo.BOS_ID, zoo.EOS_ID
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.save_checkpoint("llama", tmp_path / "tiny")


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def opened(folder: Path) -> ModelTokenizer:
    """The folder's tokenizer, without its model."""
    config = json.loads((folder / "config.json").read_text())
    return ModelTokenizer(load_tokenizer(folder), config)


@pytest.fixture
def tokenizer(folder: Path) -> ModelTokenizer:
    return opened(folder)


@pytest.fixture
def opening(folder: Path) -> ModelTokenizer:
    """A tokenizer that opens each text with its own token, as Llama's do."""
    path = str(folder / "tokenizer.json")
    own = Tokenizer.from_file(path)
    bos = "<|im_start|>"
    own.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    own.save(path)
    return opened(folder)


class TestEndTokens:
    def test_they_are_those_of_tokenizer_config_and_generation_config_together(
        self, folder: Path
    ) -> None:
        edit(folder / "config.json", eos_token_id=[10, 11])
        edit(folder / "generation_config.json", eos_token_id=[12, 10])

        loaded = load(ModelOptions(model=str(folder)))

        assert loaded.tokenizer.end_tokens == {10, 11, 12, EOS}

    @pytest.mark.parametrize("entry", [None, 10, [10]])
    def test_a_config_may_name_none_one_or_several(self, folder: Path, entry: Any) -> None:
        edit(folder / "config.json", eos_token_id=entry)

        loaded = load(ModelOptions(model=str(folder)))

        assert loaded.tokenizer.end_tokens == {EOS} | ({10} if entry else set())

    def test_those_of_the_text_part_of_a_config_count_too(self, folder: Path) -> None:
        edit(folder / "config.json", text_config={"eos_token_id": [13]}, eos_token_id=10)

        assert opened(folder).end_tokens == {10, 13, EOS}

    @pytest.mark.parametrize(
        ("value", "expected"), [(None, set()), (3, {3}), (0, {0}), ([3, 4], {3, 4}), ((), set())]
    )
    def test_ids_of_an_entry(self, value: Any, expected: set[int]) -> None:
        assert token_ids(value) == expected


class TestText:
    TEXTS = (
        "Hello, world .",
        "  two  spaces\n\n\ttabs",
        "naïve Ελλ 你好 👩‍👩‍👧 e\u0301",
        "1 , 2 ' s",
    )

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_survives_encoding_and_decoding(
        self, tokenizer: ModelTokenizer, opening: ModelTokenizer, text: str
    ) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert opening.decode(opening.encode(text)) == text

    def test_special_tokens_and_unknown_ids_have_no_text(self, tokenizer: ModelTokenizer) -> None:
        tokens = [BOS, *b"ab", EOS, 10**6, -1, *b"c"]

        assert tokenizer.decode(tokens) == "abc"
        assert tokenizer.decode([]) == ""
        assert {BOS, EOS} <= tokenizer.special_tokens

    def test_one_token_reads_as_it_is_written(self, tokenizer: ModelTokenizer) -> None:
        assert tokenizer.token_text(97) == "a"
        assert tokenizer.token_text(EOS) == "<|im_end|>"
        assert tokenizer.token_text(tokenizer.vocab_size) == ""
        assert tokenizer.token_text(-1) == ""

    def test_half_a_character_is_not_dropped(self, tokenizer: ModelTokenizer) -> None:
        assert tokenizer.decode(list("é".encode())[:1]) == "\ufffd"

    @pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
    def test_text_that_is_no_unicode_is_refused(self, tokenizer: ModelTokenizer, text: str) -> None:
        for encode in (tokenizer.encode, tokenizer.encode_rendered):
            with pytest.raises(InvalidRequest, match="expected text without lone surrogates"):
                encode(text)

    def test_threads_may_share_it(self, opening: ModelTokenizer) -> None:
        texts = [text * 20 for text in self.TEXTS]
        expected = [opening.encode(text) for text in texts]
        found: list[bool] = []

        def work() -> None:
            for _ in range(50):
                encoded = [
                    opening.encode(text) if number % 2 else [BOS, *opening.encode_rendered(text)]
                    for number, text in enumerate(texts)
                ]
                found.append(encoded == expected)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert found == [True] * 200


class TestOpeningToken:
    @pytest.mark.parametrize("text", ["Hi", "<|im_start|>Hi", ""])
    def test_a_text_gets_it_exactly_once(self, opening: ModelTokenizer, text: str) -> None:
        tokens = opening.encode(text)

        assert tokens[0] == BOS
        assert tokens.count(BOS) == 1

    def test_a_rendered_chat_gets_none_beside_its_own(self, opening: ModelTokenizer) -> None:
        text = opening.render_chat(CHAT)

        tokens = opening.encode_rendered(text)

        assert tokens[:2] == [BOS, ord("u")]
        assert tokens.count(BOS) == text.count("<|im_start|>") == 2

    def test_a_tokenizer_without_one_adds_none(self, tokenizer: ModelTokenizer) -> None:
        assert tokenizer.encode("Hi") == list(b"Hi")


class TestChats:
    def test_a_chat_is_rendered_by_the_models_template(self, tokenizer: ModelTokenizer) -> None:
        assert tokenizer.has_chat_template
        assert tokenizer.render_chat(CHAT) == (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == (
            "<|im_start|>user\nHi<|im_end|>\n"
        )

    def test_tools_and_other_arguments_reach_the_template(self, folder: Path) -> None:
        template = "{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}{{ mood }}"
        tokenizer = self.with_template(folder, template)

        assert tokenizer.render_chat(CHAT, tools=[{"name": "clock"}], mood="!") == "[clock]!"
        assert tokenizer.render_chat(CHAT) == ""

    def test_a_model_without_a_template_says_so(self, folder: Path) -> None:
        edit(folder / "tokenizer_config.json", chat_template=None)
        tokenizer = opened(folder)

        assert not tokenizer.has_chat_template
        with pytest.raises(InvalidRequest, match="the model has no chat template"):
            tokenizer.render_chat(CHAT)

    @pytest.mark.parametrize(
        ("template", "reason"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[0].nothing.at.all }}", "nothing"),
            ("{{ 1 + messages[0]['content'] }}", "unsupported operand"),
            ("{% if %}", "Expected an expression"),
            ("{{ messages[0].__class__.__mro__ }}", "."),
            ("{{ 1 // 0 }}", "."),
        ],
    )
    def test_what_a_template_refuses_is_the_requests_fault(
        self, folder: Path, template: str, reason: str
    ) -> None:
        tokenizer = self.with_template(folder, template)

        with pytest.raises(InvalidRequest, match=rf"what the chat template accepts .*{reason}"):
            tokenizer.render_chat(CHAT)

    def test_the_callers_messages_are_not_changed(self, folder: Path) -> None:
        tokenizer = self.with_template(folder, "{% set _ = messages[0].update({'role': 'x'}) %}")
        messages = [{"role": "user", "content": "Hi"}]

        try_to(lambda: tokenizer.render_chat(messages))

        assert messages == CHAT

    def test_somebody_else_may_render_and_its_own_refusal_comes_as_it_is(
        self, folder: Path
    ) -> None:
        def render(messages: list[Any], **options: Any) -> str:
            if not messages[0]["content"]:
                raise InvalidRequest("text", "", "some")
            return f"{messages[0]['content']}{options['mood']}"

        config = json.loads((folder / "config.json").read_text())
        tokenizer = ModelTokenizer(load_tokenizer(folder), config, render=render)

        assert tokenizer.has_chat_template
        assert tokenizer.render_chat(CHAT, mood="!") == "Hi!"
        with pytest.raises(InvalidRequest, match="text: got '', expected some"):
            tokenizer.render_chat([{"role": "user", "content": ""}], mood="")
        with pytest.raises(InvalidRequest, match="what the chat template accepts"):
            tokenizer.render_chat(CHAT)

    @staticmethod
    def with_template(folder: Path, template: str) -> ModelTokenizer:
        edit(folder / "tokenizer_config.json", chat_template=template)
        return opened(folder)


def try_to(action: Callable[[], Any]) -> None:
    """Run an action that may be refused."""
    try:
        action()
    except InvalidRequest:
        return
