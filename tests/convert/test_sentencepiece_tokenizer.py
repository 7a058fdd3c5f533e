"""The fast tokenizer written for a SentencePiece model gives SentencePiece's own ids."""

import functools
import io
import json
import lzma
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer
from mlx_lm.utils import load_tokenizer
from sentencepiece import sentencepiece_model_pb2 as proto
from transformers import AutoTokenizer

from mlx_selective.convert.sentencepiece_tokenizer import write_fast_tokenizer
from mlx_selective.errors import UserError

SENTENCES = """The user asked the model for a short story about the sea.
A hundred and twenty-three users said hello, hello again, and goodbye to the world.
Ein Käfer läuft über die Straße, während der naïve Bär im Café sitzt.
«Où est la bibliothèque ?» demanda-t-il ; personne n'y répondit.
日本語の文章には漢字とかなが混ざっています。 한국어 문장도 있습니다.
The  spaces   between    words differ; so do\ttabs and <s>tags</s> such as <unk> or <|x|>.
if (a < b && b > 0x41) { return [a, b, "ﬁne"]; } // ｆｕｌｌ ～ width
😀 👍🏽 and 👩‍👩‍👧 are emoji; e\u0301 and a\u0323\u0302 are decomposed.""".splitlines()

MARKERS = ["<|user|>", "<|end|>", "\n"]
PARTS = """<|user|> <|end|> <|user <|end| end|> user|> <s> </s> <unk> <pad> <s s> </ <0x41> < >
    <0x0A> a the hello user 123 ▁ ▁▁ é e\u0301 a\u0323\u0302 日本 한 か\u3099 \u1100\u1161\u11a8
    ｆｕ ﬁ ～ … 😀 👍🏽 👩‍👩‍👧 \u200d \u200b \ufeff \u2060 \ufdd0 \ue000 \ue001 \ufffd""".split()
PARTS += [*" \n\t\r\0\x01\x85\xa0\u2028", "  ", "   ", "\n\n", "\r\n"]


def composes_alike(char: str) -> bool:
    """Whether the nfkc rules, which have exceptions, are exact for it: no combining marks."""
    parts = unicodedata.normalize("NFKD", char)
    return all(unicodedata.category(part) not in ("Mn", "Mc", "Me", "Cn") for part in parts)


UNICODE = st.characters(exclude_categories=["Cs"])
TEXTS, NFKC_TEXTS = (
    st.lists(st.sampled_from(PARTS) | chars, max_size=12).map("".join)
    for chars in (UNICODE, UNICODE.filter(composes_alike))
)

KEPT, BARE = {"remove_extra_whitespaces": False}, {"add_dummy_prefix": False}
IDENTITY, NMT = {"normalization_rule_name": "identity"}, {"normalization_rule_name": "nmt_nfkc"}
CONTROLS = {"control_symbols": ["<pad>", "hello"]}
OVERLAPPING = ["<|user|>", "<|user|>\n", "<|", "▁▁", "▁▁▁▁", "\t"]
SETTINGS = {
    "llama": IDENTITY | KEPT,
    "no prefix": IDENTITY | KEPT | BARE,
    "collapse": IDENTITY,
    "no markers": IDENTITY | KEPT | BARE | {"user_defined_symbols": []},
    "overlapping": IDENTITY | KEPT | {"user_defined_symbols": OVERLAPPING} | CONTROLS,
    "across words": IDENTITY | KEPT | {"split_by_whitespace": False, "vocab_size": 450},
    "no bytes": IDENTITY | KEPT | {"byte_fallback": False, "vocab_size": 200},
    "nmt_nfkc": NMT,
    "nmt_nfkc, no prefix": NMT | BARE,
    "nmt_nfkc, spaces kept": NMT | KEPT | {"user_defined_symbols": [*OVERLAPPING, "\n\n", "ﬁ"]},
    "nfkc_cf, collapse": {"normalization_rule_name": "nfkc_cf"} | BARE,
}


@functools.cache
def trained(name: str) -> bytes:
    """A model trained in a moment on the sentences above."""
    chosen = {"vocab_size": 420, "user_defined_symbols": MARKERS, "byte_fallback": True}
    chosen |= {"model_type": "bpe", "minloglevel": 3, **SETTINGS.get(name, {})}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3), model_writer=model, **chosen
    )
    return model.getvalue()


def handmade(**normalizer) -> proto.ModelProto:
    """A model with known ids: markers 3 and 4, byte b at 5 + b, the other pieces from 261 on."""
    model = proto.ModelProto()
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|user|>": 4, "<|end|>": 4}
    for piece, kind in (kinds | {f"<0x{byte:02X}>": 6 for byte in range(256)}).items():
        model.pieces.add(piece=piece, type=kind)
    # No two pieces merge into "acb", so a text never becomes it.
    for rank, piece in enumerate(["▁", "a", "b", "c", "s", "ab", "▁ab", "acb"]):
        model.pieces.add(piece=piece, score=-rank)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    normalizer = {"name": "identity", "remove_extra_whitespaces": False} | normalizer
    model.normalizer_spec.MergeFrom(proto.NormalizerSpec(**normalizer))
    return model


def written(model, folder: Path, config: dict | None = None, load=AutoTokenizer.from_pretrained):
    """The tokenizer written for a model (its bytes or its message) and loaded again."""
    model_file = folder / "tokenizer.model"
    model_file.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    write_fast_tokenizer(model_file, config or {}, folder)
    return load(folder)


def own(model) -> sentencepiece.SentencePieceProcessor:
    model = model if isinstance(model, bytes) else model.SerializeToString()
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.fixture(scope="module", params=SETTINGS)
def pair(request, tmp_path_factory):
    """The name of a setting, SentencePiece's processor of its model, and our tokenizer."""
    model = trained(request.param)
    return request.param, own(model), written(model, tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(text=TEXTS, nfkc_text=NFKC_TEXTS)
@example(text="<|user|>\nHi<|end|>\n", nfkc_text="<|user|>\nHi<|end|>\n")
@example(text="<|end|><s><|end|></s><|end|>", nfkc_text="<|end|><unk><|end|><0x0A><|end|>")
@example(text="  \t ", nfkc_text="  \t ")
@example(text="\x01", nfkc_text="\x01\x01a")
def test_ids_and_decoded_text_are_those_of_sentencepiece(pair, text, nfkc_text):
    name, processor, tokenizer = pair
    text = nfkc_text if "nfkc" in name else text
    ids = processor.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == [1, *ids]
    # The two documented exceptions of decoding: unknown pieces, and ▁ at the start of a text.
    if name != "no bytes" and not ("collapse" in name and text.lstrip().startswith("▁")):
        assert tokenizer.decode(ids) == processor.decode(ids)


FIXED_IDS = {
    "": [],
    "ab": [267],
    " ab": [261, 267],
    "<|user|>": [261, 3],
    "<|end|>": [261, 4],
    "<|user|>ab<|end|> ab": [261, 3, 266, 4, 267],
    "<|user|>acb<|end|>": [261, 3, 262, 264, 263, 4],
    "<s>": [261, 65, 265, 67],
    "<|user|><s><|end|>": [261, 3, 65, 265, 67, 4],
    "<|user|></s><|end|>": [261, 3, 65, 52, 265, 67, 4],
    "<|user|><0x0A><|end|>": [261, 3, 65, 53, 125, 53, 70, 67, 4],
    "é\n": [261, 200, 174, 15],
}


def test_fixed_ids(tmp_path):
    processor, tokenizer = own(handmade()), written(handmade(), tmp_path)
    assert {text: processor.encode(text) for text in FIXED_IDS} == FIXED_IDS
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in FIXED_IDS}
    assert ids == FIXED_IDS


def test_special_tokens_are_known_and_files_of_older_formats_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "added_tokens.json").write_text('{"<|user|>": 3}')
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": True},
        "pad_token": "<unk>",
        "additional_special_tokens": ["<|user|>"],
        "added_tokens_decoder": {"4": {"content": "<|end|>", "lstrip": True, "special": True}},
        "model_max_length": 1024,
    }
    tokenizer = written(handmade(), tmp_path, config)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 4, 0)
    assert (tokenizer.pad_token, tokenizer.model_max_length) == ("<unk>", 1024)
    assert len(tokenizer) == 269
    ids = tokenizer.encode(" <|user|> ab<|end|>")
    assert ids == [1, 261, 261, 3, 267, 4]
    assert tokenizer.decode(ids[1:]) == " <|user|> ab<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "  ab"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.encode(" <|user|> ab<|end|>") == ids


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": False, "add_eos_token": True, "eos_token": "<|end|>"}, [], [4]),
        ({"bos_token": None}, [], []),
    ],
)
def test_beginning_and_end_are_added_as_configured(tmp_path, config, before, after):
    tokenizer = written(handmade(), tmp_path, config)
    assert tokenizer.encode("ab") == [*before, 267, *after]
    assert tokenizer("ab", "ab")["input_ids"] == [*before, 267, *after] * 2
    assert tokenizer.encode("ab", add_special_tokens=False) == [267]
    stored = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (stored["add_bos_token"], stored["add_eos_token"]) == (bool(before), bool(after))


@pytest.mark.parametrize(("prefix", "beside"), [(True, False), (True, True), (False, False)])
def test_template_writes_the_beginning_symbol(tmp_path, prefix, beside):
    template = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    if beside:
        (tmp_path / "chat_template.jinja").write_text(template)
    model = handmade(add_dummy_prefix=prefix)
    tokenizer = written(model, tmp_path, {} if beside else {"chat_template": template})
    start = [261] if prefix else []
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "<s>"}], return_dict=False)
    assert ids == [1, *start, 3, 65, 265, 67, 4]
    assert tokenizer.encode("<s>", add_special_tokens=False) == [1]
    for text in ["ab", " ab", " ", "a<s>b</s>", "<s>", "</s>"]:
        ids = own(model).encode(text)
        assert tokenizer.encode("<s>" + text, add_special_tokens=False) == [1, *ids]
        ids = own(model).encode("a" + text)
        assert tokenizer.encode("a" + text, add_special_tokens=False) == ids


def test_template_writes_control_symbols_for_each_message(tmp_path):
    turns = "{% for m in messages %}{{ bos_token + m.content + eos_token }}{% endfor %}"
    config = {"chat_template": [{"name": "default", "template": turns}]}
    tokenizer = written(handmade(), tmp_path, config)
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "<unk>"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    assert ids == [1, 267, 2, 1, 65, 122, 115, 112, 67, 2]


def refusal(model: bytes | None, folder: Path, config: dict | None = None) -> str:
    """The one line that refuses a model; nothing may have been written."""
    model_file = folder / "some.model"
    if model is not None:
        model_file.write_bytes(model)
    with pytest.raises(UserError) as caught:
        write_fast_tokenizer(model_file, config or {}, folder)
    message = str(caught.value)
    assert message.startswith(f"{model_file}: ") and "\n" not in message
    assert not (folder / "tokenizer.json").exists()
    return message


REFUSED = {
    "model type UNIGRAM, other than BPE,": {"trainer_spec": {"model_type": 1}},
    "whitespace as suffix": {"trainer_spec": {"treat_whitespace_as_suffix": True}},
    "escape_whitespaces=false": {"normalizer_spec": {"escape_whitespaces": False}},
    "a piece marked as unused": {"pieces": [{"piece": "ac", "type": 5}]},
    "a user-defined symbol with a space": {"pieces": [{"piece": "a b", "type": 4}]},
    "piece 'xy' with characters that are no pieces": {"pieces": [{"piece": "xy"}]},
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_models_are_refused(tmp_path, what):
    model = handmade()
    model.MergeFrom(proto.ModelProto(**REFUSED[what]))
    message = refusal(model.SerializeToString(), tmp_path)
    assert f": {what} is not supported; put a tokenizer.json beside it instead" in message


def test_what_is_no_whole_model_is_refused(tmp_path):
    whole = handmade().SerializeToString()
    cuts = [0, 1, 100, len(whole) // 2, len(whole) - 30, len(whole) - 3]
    others = [b"version https://git-lfs.github.com/spec/v1\n", b"{}"]
    for model in [whole[:cut] for cut in cuts] + others:
        assert "not a whole SentencePiece model" in refusal(model, tmp_path)
    (tmp_path / "some.model").unlink()
    assert "No such file or directory; check the path" in refusal(None, tmp_path)


def test_tokens_that_the_model_lacks_are_refused(tmp_path):
    added = {"added_tokens_decoder": {"269": {"content": "<new>"}}}
    for name, config in {"eos_token": {"eos_token": "<new>"}, "added token": added}.items():
        message = refusal(handmade().SerializeToString(), tmp_path, config)
        assert f"{name} '<new>' of tokenizer_config.json is not one of its pieces" in message


def streamed(tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


@pytest.mark.parametrize("name", ["llama", "no prefix", "nmt_nfkc"])
def test_mlx_lm_streams_the_decoded_text(tmp_path, name):
    tokenizer = written(trained(name), tmp_path, load=load_tokenizer)
    assert isinstance(tokenizer.detokenizer, SPMStreamingDetokenizer)
    for text in ["hello world", "<|user|>\nthe 日本 😀 <s>", "Où  est é?", *SENTENCES]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)
        assert tokenizer.decode(ids) == own(trained(name)).decode(ids)


SHARED = Path(__file__).resolve().parents[2].parent / "shared"
CHECKPOINT = SHARED / "checkpoints" / "llama-selective"
DOCUMENTS = SHARED / "data" / "valid.jsonl.xz"
needs_checkpoint = pytest.mark.skipif(
    not (CHECKPOINT.is_dir() and DOCUMENTS.is_file()),
    reason="the reference checkpoints and documents (../shared) are absent",
)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The tokenizer of the reference checkpoint, as mlx-lm loads it, and SentencePiece's own."""
    folder = tmp_path_factory.mktemp("real")
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    write_fast_tokenizer(CHECKPOINT / "tokenizer.model", config, folder)
    return load_tokenizer(folder), own((CHECKPOINT / "tokenizer.model").read_bytes())


@needs_checkpoint
def test_checkpoint_documents_have_the_expected_ids(real):
    tokenizer, processor = real
    expected = np.load(CHECKPOINT / "expected.npz")
    wanted = [expected[name].tolist() for name in expected.files if name.startswith("doc_")]
    starts, found = {processor.decode(ids[1:13]) for ids in wanted}, []
    with lzma.open(DOCUMENTS, "rt", encoding="utf-8") as lines:
        for _, text in map(json.loads, lines):
            if any(text.startswith(start) for start in starts):
                ids = tokenizer.encode(text)
                found.append(ids[:1025])
                assert tokenizer.decode(ids[1:]) == text
                # mlx-lm's streaming leaves out all spaces that a text starts with.
                assert streamed(tokenizer, ids[1:400]) == tokenizer.decode(ids[1:400]).lstrip(" ")
    assert len(wanted) == 24
    assert all(ids in found for ids in wanted)


@needs_checkpoint
def test_checkpoint_chat_template(real):
    tokenizer, _ = real
    assert tokenizer.eos_token_ids == {5}
    chat = [{"role": "user", "content": "Hi <s>"}, {"role": "assistant", "content": "Yes"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    hi, yes = [8137, 8106, 8100, 67, 8107, 69], [8145, 283]
    assert ids == [1, 8100, 3, 6, *hi, 5, 6, 4, 6, *yes, 5, 6, 4, 6]
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [8100, 5]
    assert tokenizer.encode("hi</s>") == [1, 7852, 67, 8173, 8107, 69]


@needs_checkpoint
@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=TEXTS.filter(lambda text: not text.startswith("<s>")))
def test_checkpoint_ids_of_any_text(real, text):
    tokenizer, processor = real
    ids = processor.encode(text)
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == processor.decode(ids)
