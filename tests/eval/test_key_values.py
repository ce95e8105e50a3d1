"""Conversations that keep keys and values: the text is that of a model that reads all anew, and little is read."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.small_models import llama_config
from kbitq.eval.conversation import Conversation

pytest.importorskip("transformers", reason="transformers is not installed")


class Letters:
    """A tokenizer: a token for each character, of 128. It decodes to characters none of which is a space."""

    pad_token_id = eos_token_id = 0
    chat_template = "a template"

    def __call__(self, text: str, **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(c) % 128 for c in text]], dtype=torch.int64)}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(0x100 + i) for i in ids)

    def apply_chat_template(self, said: list[dict[str, str]], **_: object) -> str:
        return "".join(f"[{m['role'][0]}]{m['content']}" for m in said) + "[a]"


def llama(**more: Any) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(vocab_size=128, num_hidden_layers=2, max_position_embeddings=400, **more))


def mistral() -> Any:
    """Its layers keep a window of 24 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(
            vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=400, sliding_window=24,
        )
    )  # fmt: skip


class Talk:
    """A conversation with a random model, greedy, and how many tokens the model has read for each answer."""

    def __init__(self, make: Callable[[], Any], *, keep: bool, tokenizer: Any = None) -> None:
        torch.manual_seed(3)
        self.model = make().eval()
        self.read: list[int] = []
        self.stop_after: int | None = None
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.model.model.layers[-1].register_forward_hook(self._interrupt)
        self.talk = Conversation(self.model, tokenizer or Letters(), "be brief")
        if not keep:
            nothing: Any = SimpleNamespace(begin=lambda ids: {}, end=lambda *_, **__: None, _cache=None)
            self.talk._kept = nothing

    def _count(self, model: object, given: object, named: dict[str, Any]) -> None:
        self.read[-1] += named["input_ids"].shape[1]

    def _interrupt(self, *_: object) -> None:
        """As Ctrl-C does in the middle of a token: the last layer has not the same length as the others then."""
        if self.stop_after is not None:
            self.stop_after -= 1
            if self.stop_after < 0:
                kept: Any = self.talk._kept._cache
                if kept is not None:
                    kept.layers[-1].keys = kept.layers[-1].keys[..., :-1, :]
                raise KeyboardInterrupt

    def say(self, text: str, stop_after: int | None = None) -> str:
        self.read.append(0)
        self.stop_after, heard = stop_after, list[str]()
        try:
            self.talk.answer(text, max_tokens=12, temperature=0.0, on_text=heard.append)
        except KeyboardInterrupt:
            heard.append("<stopped>")
        return "".join(heard)


MESSAGES = ("Hello you", "and then", "what of it", "no")


@pytest.mark.parametrize("make", [llama, mistral])
def test_answers_are_those_of_a_model_that_reads_all(make: Callable[[], Any]) -> None:
    keeping, anew = Talk(make, keep=True), Talk(make, keep=False)
    for text in MESSAGES:
        assert keeping.say(text) == anew.say(text)
    assert keeping.read[0] == anew.read[0]
    if make is llama:  # of an answer the last token, and what the template puts around the message, is new
        assert all(read <= len(text) + 10 + 12 for read, text in zip(keeping.read[1:], MESSAGES[1:], strict=True))
        assert sum(anew.read[1:]) > 3 * sum(keeping.read[1:])


@pytest.mark.parametrize("make", [llama, mistral])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_stopped_answer_leaves_nothing_that_is_wrong(make: Callable[[], Any], after: int) -> None:
    keeping, anew = Talk(make, keep=True), Talk(make, keep=False)
    for text, stop in zip(MESSAGES, (None, after, None, None), strict=True):
        assert keeping.say(text, stop) == anew.say(text, stop)


def test_what_is_forgotten_or_cleared_is_not_reused() -> None:
    keeping, anew = Talk(llama, keep=True), Talk(llama, keep=False)
    for talk in (keeping, anew):
        talk.model.config.max_position_embeddings = 90
    for text in (*MESSAGES, *MESSAGES):
        assert keeping.say(text) == anew.say(text)
    assert keeping.talk.forgotten == anew.talk.forgotten > 0
    for talk in (keeping, anew):
        talk.talk.clear()
    assert keeping.say("Hello") == anew.say("Hello")


def test_a_tokenizer_that_makes_other_tokens_of_an_answer() -> None:
    """The next prompt has the answer's text, not its tokens: kept is what comes before."""

    class Doubling(Letters):
        def __call__(self, text: str, **more: object) -> dict[str, torch.Tensor]:
            return super().__call__(text.replace("[u]", "[u]]"), **more)

    keeping, anew = (Talk(llama, keep=keep, tokenizer=Doubling()) for keep in (True, False))
    strip = {id(talk): talk.talk for talk in (keeping, anew)}
    for text in MESSAGES:
        assert keeping.say(text) == anew.say(text)
        for talk in strip.values():
            talk._said[-1]["content"] = talk._said[-1]["content"].upper()
    assert sum(keeping.read) < sum(anew.read)


def test_a_model_with_a_cache_of_its_own_reads_anew() -> None:
    talk = Talk(llama, keep=True)
    talk.model.generation_config.cache_implementation = "static"
    assert talk.talk._kept.begin(torch.ones(1, 4, dtype=torch.int64)) == {}
