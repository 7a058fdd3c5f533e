"""Turn a SentencePiece BPE model into a Hugging Face fast tokenizer with the same ids.

The tokenizer is made of the building blocks of the `tokenizers` library alone:

* normalizers do what the model's normalizer_spec says, the word-start mark included, on the
  whole text at once, so that a text starts with ▁ even before a marker such as <|user|> and the
  text after a marker does not;
* a Split pre-tokenizer isolates the user-defined symbols, and BPE takes each of them whole;
* bos, eos, unk and pad are known to transformers by name only: tokenizer.json lists no added
  tokens and `split_special_tokens` is on, so nothing is cut out of a text before the normalizers.

Exact for every text: models with the identity normalization (Llama, Mistral and others).

Not exact, or different on purpose:

* nfkc and nmt_nfkc models, also with _cf: texts in which several combining marks follow a
  character, or one follows a character that NFKC spells as several (㎏ and an accent), and
  compositions newer than the Unicode tables of `tokenizers`;
* custom normalization rules: those with several source characters are not applied;
* models that give several ordinary pieces one score (trainers do not), where two of them overlap;
* models without byte fallback: "<s>" alone between two markers becomes that symbol if none of
  its characters is a piece;
* decoding: an unknown piece shows as its name, not as " ⁇ "; with remove_extra_whitespaces only
  one of the ▁ that a text itself starts with is dropped; denormalization rules are not applied;
* control symbols that a chat template writes. mlx-lm and transformers encode a rendered template
  as text, so the beginning symbol is read from the start of a normalized text (what follows it is
  encoded as a text of its own), and the end symbol, or a beginning symbol used per message, is read
  anywhere. Other control symbols, and all of them in models whose chat template writes none, are
  plain characters in a text, as in SentencePiece.
"""

import json
import re
from pathlib import Path

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_proto
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ..errors import UserError

Piece = sentencepiece_proto.ModelProto.SentencePiece
TrainerSpec = sentencepiece_proto.TrainerSpec

SPACE = "▁"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# A noncharacter and private-use codes stand for protected strings during normalization; a word
# joiner keeps characters apart, as it belongs to no grapheme.
GUARD, FIRST_CODE, BREAK = "\ufdd0", 0xE000, "\u2060"


def write_fast_tokenizer(model_file: Path, config: dict, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for a SentencePiece BPE model.

    `AutoTokenizer.from_pretrained(folder)` then encodes as the model does, see the top of this
    module for the exceptions.

    Args:
        model_file: the SentencePiece model, usually named tokenizer.model.
        config: the content of the source's tokenizer_config.json; may be empty. Used are the
            special tokens (default: those of the model), `add_bos_token` (default: true if there
            is a beginning token), `add_eos_token` (default: false), `chat_template` (or the file
            chat_template.jinja beside the model), `model_max_length` and `padding_side`.
        folder: where the two files are written; it must exist.

    Raises:
        UserError: the file is not a whole SentencePiece model, its type or settings are not
            supported, or the config names a token that the model lacks.
    """
    model = _read_model(model_file)
    vocab = {piece.piece: number for number, piece in enumerate(model.pieces)}
    names = _special_tokens(model, config)
    extra, added = _further_tokens(config)
    for name, token in [*names.items(), *(("added token", token) for token in extra + added)]:
        if token not in vocab:
            raise UserError(
                f"{model_file}: {name} {token!r} of tokenizer_config.json is not one of its pieces;"
                " correct the config or use the model that belongs to it"
            )
    controls = _template_controls(model, _template(model_file, config), names)
    tokenizer = _build_tokenizer(model, vocab, controls, model_file)
    tokenizer.post_processor = _post_processor(config, names, vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(_written_config(config, names, extra), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _read_model(model_file: Path):
    """Parse the model and refuse, in one line, what cannot be written exactly."""
    model = sentencepiece_proto.ModelProto()
    try:
        model.ParseFromString(model_file.read_bytes())
    except OSError as error:
        raise UserError(f"{model_file}: {error.strerror}; check the path") from None
    except DecodeError:
        model.Clear()
    # The specs follow the pieces in the file, so a file cut between two fields lacks them.
    if not (model.pieces and model.HasField("trainer_spec") and model.HasField("normalizer_spec")):
        raise UserError(
            f"{model_file}: not a whole SentencePiece model (cut short, or another kind of file);"
            " download or copy it again"
        )
    kind = TrainerSpec.ModelType.Name(model.trainer_spec.model_type)
    spaced = (p.type == Piece.USER_DEFINED and " " in p.piece for p in model.pieces)
    unsupported = {
        f"model type {kind}, other than BPE,": kind != "BPE",
        "whitespace as suffix": model.trainer_spec.treat_whitespace_as_suffix,
        "escape_whitespaces=false": not model.normalizer_spec.escape_whitespaces,
        "a piece marked as unused": any(p.type == Piece.UNUSED for p in model.pieces),
        "a user-defined symbol with a space": any(spaced),
    }
    for what, applies in unsupported.items():
        if applies:
            raise UserError(
                f"{model_file}: {what} is not supported; put a tokenizer.json beside it instead"
            )
    return model


def _special_tokens(model, config: dict) -> dict[str, str]:
    """The special tokens by name: the config's, or else the model's own."""
    trainer = model.trainer_spec
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    names = {name: model.pieces[i].piece for name, i in ids.items() if 0 <= i < len(model.pieces)}
    for name in SPECIAL_NAMES:
        if name in config:
            names[name] = _content(config[name])
    return {name: token for name, token in names.items() if token is not None}


def _content(token) -> str | None:
    """The text of a token that a config gives as a string or as an AddedToken's fields."""
    return token.get("content") if isinstance(token, dict) else token


def _further_tokens(config: dict) -> tuple[list[str], list[str]]:
    """The config's further special tokens, and the other tokens of its table of added ones."""
    special = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = [*(special.values() if isinstance(special, dict) else special)]
    added = (config.get("added_tokens_decoder") or {}).values()
    special += [token for token in added if token.get("special")]
    return list(dict.fromkeys(map(_content, special))), [_content(token) for token in added]


def _template(model_file: Path, config: dict) -> str:
    """The chat template, all of them if they are named ones, of the config or the file beside."""
    beside = model_file.parent / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = config.get("chat_template") or ""
    return template if isinstance(template, str) else "".join(t["template"] for t in template)


def _template_controls(model, template: str, names: dict) -> tuple[str | None, list[str]]:
    """The control symbols that the chat template writes.

    Returns:
        The beginning symbol if it is to be read at the start of a text, and the symbols to be
        read anywhere: the end symbol, and the beginning symbol if it is written within a loop.
    """
    loop = re.split(r"\{%[-+]?\s*for\b", template, maxsplit=1)[1:]
    control = {piece.piece for piece in model.pieces if piece.type == Piece.CONTROL}

    def written(name: str, text: str) -> bool:
        token = names.get(name)
        return token in control and (name in text or token in text)

    leading = names["bos_token"] if written("bos_token", template) else None
    anywhere = [names["bos_token"]] if loop and written("bos_token", loop[0]) else []
    anywhere += [names["eos_token"]] if written("eos_token", template) else []
    return leading, anywhere


def _build_tokenizer(model, vocab: dict, controls: tuple, model_file: Path) -> Tokenizer:
    """The tokenizer without its post-processor."""
    leading, anywhere = controls
    spec = model.normalizer_spec
    user_defined = [piece.piece for piece in model.pieces if piece.type == Piece.USER_DEFINED]
    options = {
        "vocab": vocab,
        "merges": _merges(model, model_file),
        "unk_token": next((p.piece for p in model.pieces if p.type == Piece.UNKNOWN), None),
        "fuse_unk": True,
        "byte_fallback": model.trainer_spec.byte_fallback,
    }
    # ignore_merges lets BPE take an isolated symbol whole, since no merges lead to it.
    tokenizer = Tokenizer(BPE(**options, ignore_merges=True))
    tokenizer.normalizer = normalizers.Sequence(_normalizers(spec, user_defined, leading))
    # The plain space after a leading beginning symbol occurs in no other normalized text.
    whole = [*user_defined, *anywhere, *([leading + " "] if leading else [])]
    splits = [pre_tokenizers.Split(Regex(_any_of(whole)), "isolated")] if whole else []
    splits += _cut_unmergeable(BPE(**options), vocab, set(whole))
    if leading:
        splits.append(pre_tokenizers.Split(" ", "removed"))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    # Exactly these steps make mlx-lm choose its SentencePiece streaming detokenizer.
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _any_of(strings) -> str:
    """A regular expression for the longest of the strings at a place, as SentencePiece matches."""
    return "|".join(re.escape(string) for string in sorted(strings, key=len, reverse=True))


def _merges(model, model_file: Path) -> list[tuple[str, str]]:
    """All ways to join two ordinary pieces into a third, best score first."""
    normal = {p.piece: (-p.score, n) for n, p in enumerate(model.pieces) if p.type == Piece.NORMAL}
    known = {piece.piece for piece in model.pieces}
    ranked = []
    for piece, rank in normal.items():
        # SentencePiece also joins characters that are no pieces; BPE of `tokenizers` cannot.
        if len(piece) > 1 and not known.issuperset(piece):
            raise UserError(
                f"{model_file}: piece {piece!r} with characters that are no pieces is not"
                " supported; put a tokenizer.json beside it instead"
            )
        for split in range(1, len(piece)):
            left, right = piece[:split], piece[split:]
            if left in normal and right in normal:
                ranked.append((*rank, left, right))
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _normalizers(spec, user_defined: list[str], leading: str | None) -> list:
    """SentencePiece's normalization of a whole text, step by step."""
    replace = normalizers.Replace
    charsmap = _charsmap_steps(spec, user_defined)
    # Precompiled misplaces what it changes at the very start, so it gets a prefix in any case.
    steps = [normalizers.Prepend(" "), *charsmap] if spec.add_dummy_prefix or charsmap else []
    if charsmap and not spec.add_dummy_prefix:
        steps.append(replace(Regex(r"\A "), ""))
    if spec.remove_extra_whitespaces:
        steps.append(replace(Regex(" {2,}"), " "))
        if not spec.add_dummy_prefix:
            steps.append(replace(Regex(r"\A "), ""))
    steps.append(replace(" ", SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(replace(Regex(SPACE + r"+\z"), ""))
    if leading:
        start = SPACE if spec.add_dummy_prefix else ""
        bos = rf"\A{start}{re.escape(leading)}"
        if spec.remove_extra_whitespaces:
            bos += f"{SPACE}?"
        # What follows the beginning symbol is a text of its own, if it is not empty.
        if start:
            steps.append(replace(Regex(bos + r"\z"), leading + " "))
        steps.append(replace(Regex(bos), leading + " " + start))
    return steps


def _charsmap_steps(spec, user_defined: list[str]) -> list:
    """The model's table of character replacements; user-defined symbols are exempt from it."""
    if not spec.precompiled_charsmap:
        return []
    replace, charsmap = normalizers.Replace, normalizers.Precompiled(spec.precompiled_charsmap)
    # Precompiled may drop what follows the first character of a grapheme; so make each its own.
    apart = replace(Regex(r"(?=[^\x00-\x09\x0b-\x7f])"), BREAK)
    steps = [apart, charsmap, replace(BREAK, "")]
    # It applies no rule with several source characters; in these tables all are compositions.
    if "nfkc" in spec.name:
        steps = [normalizers.NFKC(), *steps, normalizers.NFC()]
    whole = normalizers.Sequence([normalizers.Prepend(" "), *steps])
    kept = [symbol for symbol in user_defined if whole.normalize_str(symbol) != " " + symbol]
    # The nmt rules keep the full-width tilde, which NFKC would replace.
    if charsmap.normalize_str("～") == "～" and whole.normalize_str("～") != " ～":
        kept.append("～")
    # Each kept string becomes the guard and a code; the guard itself becomes two characters too.
    kept = [GUARD, BREAK, *sorted(kept, key=len, reverse=True)]
    codes = {string: GUARD + chr(FIRST_CODE + n) for n, string in enumerate(kept)}
    protect = [replace(string, code) for string, code in codes.items()]
    restore = [replace(code, string) for string, code in reversed(codes.items())]
    return [*protect, *steps, *restore]


def _cut_unmergeable(bpe: BPE, vocab: dict, whole: set[str]) -> list:
    """Pre-tokenizers that cut a text part which is spelled like a piece but must not become it.

    Control, unknown and byte pieces are never read from text ("<s>" between two markers is three
    characters), yet ignore_merges would take a part that equals one of them. Cutting the part
    where BPE, left to its merges, has a boundary changes nothing else.
    """
    rests: dict[str, str] = {}
    heads: dict[str, list[str]] = {}
    for piece, number in vocab.items():
        tokens = bpe.tokenize(piece)
        if piece in whole or (len(tokens) == 1 and tokens[0].id == number):
            continue
        # Byte pieces may end within a character, where a text cannot be cut.
        starts = {len(piece[:n].encode()): n for n in range(1, len(piece))}
        cut = next((starts[t.offsets[1]] for t in tokens if t.offsets[1] in starts), None)
        if cut:
            rests[piece] = piece[cut:]
            heads.setdefault(piece[:cut], []).append(piece[cut:])
    if not rests:
        return []
    passes, left = 1, set(rests.values()) & rests.keys()
    while left:
        passes, left = passes + 1, {rests[rest] for rest in left} & rests.keys()
    ends = (rf"{re.escape(head)}(?=(?:{_any_of(tails)})\z)" for head, tails in heads.items())
    pattern = Regex(rf"\A(?:{'|'.join(ends)})")
    return [pre_tokenizers.Split(pattern, "isolated") for _ in range(passes)]


def _adds(config: dict, names: dict) -> tuple[bool, bool]:
    """Whether encoding puts the beginning token first and the end token last."""
    bos = bool(config.get("add_bos_token", True)) and "bos_token" in names
    return bos, bool(config.get("add_eos_token", False)) and "eos_token" in names


def _post_processor(config: dict, names: dict, vocab: dict) -> processors.TemplateProcessing:
    """The template that adds the beginning and end tokens; transformers takes it as it is."""
    add_bos, add_eos = _adds(config, names)
    bos, eos = names.get("bos_token"), names.get("eos_token")
    before, after = [bos] if add_bos else [], [eos] if add_eos else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A:0", *after, *before, "$B:0", *after],
        special_tokens=[(token, vocab[token]) for token in dict.fromkeys([*before, *after])],
    )


def _written_config(config: dict, names: dict, extra: list[str]) -> dict:
    """The content of the tokenizer_config.json to write."""
    add_bos, add_eos = _adds(config, names)
    written = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        # Special tokens cut out of a text would spoil the ids of what surrounds them; the empty
        # table keeps transformers from reading more from older files in the folder.
        "split_special_tokens": True,
        "added_tokens_decoder": {},
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": config.get("padding_side", "left"),
    }
    if further := [token for token in extra if token not in names.values()]:
        written["extra_special_tokens"] = further
    kept = ("chat_template", "model_max_length")
    return written | {name: config[name] for name in kept if config.get(name) is not None}
