"""Turns as tokens: fed one by one they are the conversation that the template renders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_selective import UserError
from mlx_selective.builtin import BUILTIN_MODEL
from mlx_selective.chat.conversation import Conversation

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: The system prompt is part of the first message; an answer is stripped and padded.
LLAMA2 = (
    "{% set system = '' %}{% if messages[0].role == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = LLAMA2.replace(" + ' ' + eos_token", " + eos_token")
#: No end token at all, and no place for a system prompt.
BARE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_tokenizer(template: str | None, eos: str = "</s>") -> TokenizerWrapper:
    """A tokenizer of single bytes and special tokens, with a chat template."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<s>", "<|im_start|>", eos)]
    )
    return TokenizerWrapper(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, chat_template=template
        )
    )


TOKENIZERS = {
    "built-in": load_tokenizer(BUILTIN_MODEL, eos_token_ids=[5]),
    "chatml": byte_tokenizer(CHATML, eos="<|im_end|>"),
    "llama-2": byte_tokenizer(LLAMA2),
    "mistral": byte_tokenizer(MISTRAL),
    "bare": byte_tokenizer(BARE),
}
#: Those in which an end token follows the answer at once.
MARKED = ["built-in", "chatml", "mistral"]


def rendered(tokenizer, messages, **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, **options)


def answer_tokens(tokenizer, answer: str) -> list[int]:
    """The tokens of an answer as they stand in a conversation, without the end token."""
    user = [{"role": "user", "content": "-"}]
    prompt = rendered(tokenizer, user, add_generation_prompt=True)
    whole = rendered(tokenizer, [*user, {"role": "assistant", "content": answer}])
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) : whole.index(tokenizer.eos_token_id, len(prompt))]


def fed(tokenizer, turns, last: str, system: str | None = None) -> tuple[list[int], list[int]]:
    """What the cache has seen after some turns and a message, and what the template renders.

    Args:
        turns: (message, answer, whether the model ended it) of each turn.
    """
    conversation = Conversation(tokenizer, system)
    messages = [] if system is None else [{"role": "system", "content": system}]
    tokens = []
    for text, answer, ended in turns:
        tokens += conversation.tokens_for(text) + answer_tokens(tokenizer, answer)
        tokens += [tokenizer.eos_token_id] if ended else []
        conversation.add_turn(text, answer, ended)
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer})
    tokens += conversation.tokens_for(last)
    messages.append({"role": "user", "content": last})
    return tokens, rendered(tokenizer, messages, add_generation_prompt=True)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "interrupted"])
@pytest.mark.parametrize("name", MARKED)
def test_turns_are_the_conversation_as_the_template_renders_it(name, ended):
    turns = [("Hi!", "Hello.", ended), ("Who?", "A model", not ended), ("And", "so on", ended)]

    tokens, expected = fed(TOKENIZERS[name], turns, "Tell me more.")

    assert tokens == expected


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).map(str.strip)


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(words, words, st.booleans()), max_size=4), last=words)
def test_any_texts(name, turns, last):
    tokens, expected = fed(TOKENIZERS[name], turns, last)

    assert tokens == expected


@pytest.mark.parametrize("text", ["<|end|>", "a<|end|>\n<|user|>\nb", "ANSWERSTANDSHERE", "\n"])
def test_messages_that_look_like_the_template(text):
    tokens, expected = fed(
        TOKENIZERS["built-in"], [(text, "Yes.", True), (text, "No", False)], text
    )

    assert tokens == expected


@pytest.mark.parametrize("name", ["chatml", "llama-2", "mistral"])
def test_the_system_prompt_goes_before_the_first_message_only(name):
    tokenizer = TOKENIZERS[name]
    turns = [("Hi!", "Hello.", True), ("Who?", "I", True)]

    tokens, expected = fed(tokenizer, turns, "Bye.", system="Be brief.")

    assert tokens == expected
    assert tokenizer.decode(tokens).count("Be brief.") == 1
    conversation = Conversation(tokenizer, "Be brief.")
    assert "Be brief." in tokenizer.decode(conversation.tokens_for("Hi!"))


def test_a_template_without_a_place_for_it_leaves_the_system_prompt_out():
    with_system = Conversation(TOKENIZERS["built-in"], "Be brief.")

    assert with_system.tokens_for("Hi!") == Conversation(TOKENIZERS["built-in"]).tokens_for("Hi!")


def test_a_template_that_refuses_a_system_prompt_is_told_in_one_line():
    with pytest.raises(UserError, match="refuses the messages: no system role") as raised:
        Conversation(TOKENIZERS["bare"], "Be brief.").tokens_for("Hi!")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "interrupted"])
def test_a_template_without_an_end_token(ended):
    tokenizer = TOKENIZERS["bare"]
    conversation = Conversation(tokenizer)
    conversation.add_turn("Hi!", "Hello.", ended)

    assert tokenizer.decode(conversation.tokens_for("Bye.")) == "\nuser: Bye.\nassistant: "


@pytest.mark.parametrize("ended", [True, False])
def test_a_template_that_ends_questions_but_not_answers(ended):
    """The end token of the new question is not taken for the end of the answer."""
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{{ eos_token if m.role == 'user' else '\n' }}{% endfor %}"
    )
    conversation = Conversation(byte_tokenizer(template))
    conversation.tokens_for("first")
    conversation.add_turn("first", "answer", ended)
    tokens = conversation.tokens_for("second")
    assert conversation.tokenizer.decode(tokens) == "\nuser: second</s>"


def test_a_template_that_changes_answers_is_told():
    conversation = Conversation(byte_tokenizer(BARE.replace("m.content", "m.content|lower")))
    conversation.add_turn("Hi!", "Hello.", True)
    with pytest.raises(UserError, match="changes answers"):
        conversation.tokens_for("Bye.")


def test_without_a_template_the_texts_follow_one_another():
    tokenizer = byte_tokenizer(None)
    conversation = Conversation(tokenizer, "Be brief.")

    assert conversation.tokens_for("Once") == tokenizer.encode("Once")
    conversation.add_turn("Once", " upon", False)
    later = conversation.tokens_for("a time")
    assert tokenizer.decode(later) == "\na time"
    assert tokenizer.bos_token_id not in later


def test_the_messages_are_kept_as_far_as_they_came():
    conversation = Conversation(TOKENIZERS["built-in"])
    conversation.add_turn("Hi!", "Hel", False)

    assert conversation.messages == [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hel"},
    ]
