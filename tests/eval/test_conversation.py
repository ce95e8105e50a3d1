"""Conversations: what the model is given, where its answer ends, and what is kept of an answer that was stopped."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbitq.errors import KbitqError
from kbitq.eval.conversation import Conversation
from kbitq.eval.generation import continue_tokens, generate


class Characters:
    """A tokenizer: a token for each character."""

    pad_token_id = eos_token_id = 0

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, **_: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(c) for c in text]], dtype=torch.int64)}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, said: list[dict[str, str]], **_: object) -> str:
        if "refuse" in said[-1]["content"]:
            raise ValueError("no such role")
        return "".join(f"[{m['role'][0]}]{m['content']}" for m in said) + "[a]"


class Parrot:
    """A model: says a text, whatever it is asked; at ``!`` it is interrupted."""

    device = torch.device("cpu")

    def __init__(self, text: str, limit: int | None = None) -> None:
        self.text, self.asked = text, list[str]()
        found = SimpleNamespace(max_position_embeddings=limit)
        self.config = SimpleNamespace(get_text_config=lambda: found)

    def generate(self, ids: torch.Tensor, **given: Any) -> None:
        self.asked.append("".join(map(chr, ids[0].tolist())))
        self.given = given
        given["streamer"].put(ids)
        for character in self.text[: given["max_new_tokens"]]:
            if character == "!":
                raise KeyboardInterrupt
            given["streamer"].put(torch.tensor([ord(character)]))
            if any(bool(criterion(ids, None).all()) for criterion in given["stopping_criteria"]):
                break
        given["streamer"].end()


def say(conversation: Conversation, text: str, max_tokens: int = 100) -> str:
    heard: list[str] = []
    try:
        conversation.answer(text, max_tokens=max_tokens, on_text=heard.append)
    except KeyboardInterrupt:
        heard.append("<stopped>")
    return "".join(heard)


def test_the_template_gets_all_that_was_said() -> None:
    model = Parrot("well")
    talk = Conversation(model, Characters("a template"), "be brief")
    assert [say(talk, "one"), say(talk, "two")] == ["well", "well"]
    assert model.asked == ["[s]be brief[u]one[a]", "[s]be brief[u]one[a]well[u]two[a]"]
    talk.clear()
    say(talk, "three")
    assert model.asked[-1] == "[s]be brief[u]three[a]"
    assert "do_sample" not in model.given  # the model's own way


def test_a_base_model_continues_a_transcript() -> None:
    model = Parrot("Well.\nUsers like it.\nUser: and now?")
    talk = Conversation(model, Characters(), "A talk.")
    assert not talk.has_template
    assert say(talk, "one") == "Well.\nUsers like it."
    say(talk, "two")
    assert model.asked[-1] == "A talk.\nUser: one\nAssistant: Well.\nUsers like it.\nUser: two\nAssistant:"


def test_what_may_begin_a_stop_is_held_back() -> None:
    heard: list[str] = []
    made = continue_tokens(
        Parrot("ab\nUs\nUser:c"), Characters(), torch.ones(1, 1, dtype=torch.int64), max_tokens=50,
        on_text=heard.append, stops=("\nUser:", "zzz"),
    )  # fmt: skip
    assert [piece for piece in heard if piece] == ["a", "b", "\nUs"]
    assert (made.text, made.tokens) == ("ab\nUs", 11)


def test_text_that_only_began_a_stop_is_shown_at_the_end() -> None:
    heard: list[str] = []
    continue_tokens(
        Parrot("ab\nUser"), Characters(), torch.ones(1, 1, dtype=torch.int64), max_tokens=50,
        on_text=heard.append, stops=("\nUser:",),
    )  # fmt: skip
    assert "".join(heard) == "ab\nUser"


def test_a_stopped_answer_is_what_was_said() -> None:
    model = Parrot("half !of it")
    talk = Conversation(model, Characters("a template"))
    assert say(talk, "one") == "half <stopped>"
    model.text = "!"
    assert say(talk, "two") == "<stopped>"
    model.text = "whole"
    say(talk, "three")
    assert model.asked[-1] == "[u]one[a]half[u]three[a]"


def test_the_first_messages_are_forgotten_where_the_context_is_full() -> None:
    model = Parrot("yes", limit=40)
    talk = Conversation(model, Characters("a template"))
    for _ in range(5):
        assert say(talk, "12345") == "yes"
    assert model.asked[1] == "[u]12345[a]yes[u]12345[a]"
    assert model.asked[-1] == model.asked[1]
    assert talk.forgotten == 6
    assert model.given["max_new_tokens"] == 40 - len(model.asked[-1])
    say(talk, "x" * 30)  # less than a 4th is left, but nothing more can be forgotten
    assert model.given["max_new_tokens"] == 4
    with pytest.raises(KbitqError, match="56 tokens with its form, more than the model's 40"):
        say(talk, "x" * 50)
    say(talk, "on")
    assert "xxxxx[a]" in model.asked[-1] or model.asked[-1] == "[u]on[a]"


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "is empty"), ("\ud800", "Unicode"), ("refuse this", "the chat template fails: no such role")],
)
def test_messages_of_no_sense_were_not_said(text: str, says: str) -> None:
    model = Parrot("yes")
    talk = Conversation(model, Characters("a template"))
    with pytest.raises(KbitqError, match=says):
        say(talk, text)
    say(talk, "on")
    assert model.asked == ["[u]on[a]"]


def test_generate_takes_the_template() -> None:
    model = Parrot("yes")
    assert generate(model, Characters("a template"), "why", template=True, system="brief").text == "yes"
    assert model.asked == ["[s]brief[u]why[a]"]
    with pytest.raises(KbitqError, match="the tokenizer has no chat template"):
        generate(model, Characters(), "why", template=True)
