"""``mlx-selective convert``."""

import argparse
import json
from typing import Any

import mlx.core as mx
from mlx_lm.convert import MODEL_CONVERSION_DTYPES

from ..attention import METHODS
from ..files import one_line
from .pipeline import convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of mlx_lm.convert that apply, and --attention."""
    parser.add_argument(
        "--hf-path",
        "--model",
        required=True,
        help="Folder of the checkpoint, or of a converted model, or its Hugging Face Hub id.",
    )
    parser.add_argument(
        "--mlx-path", default="mlx_model", help="Path to save the MLX model (default: mlx_model)."
    )
    parser.add_argument(
        "--attention",
        type=_attention,
        metavar="KIND|JSON",
        help="Attention the checkpoint was trained with, where its config.json does not tell: "
        f"{', '.join(METHODS)}, or settings in JSON: an object with a kind, or a list with one "
        "for each layer (default: softmax). Parameters of the attention that the checkpoint does "
        "not have start afresh.",
    )
    parser.add_argument(
        "--budget", type=int, help="Keys each selective layer keeps, stored in the model."
    )
    parser.add_argument("-q", "--quantize", action="store_true", help="Generate a quantized model.")
    parser.add_argument("--q-bits", type=int, help="Bits per weight for quantization.")
    parser.add_argument("--q-group-size", type=int, help="Group size for quantization.")
    parser.add_argument(
        "--q-mode",
        default="affine",
        choices=["affine", "mxfp4", "nvfp4", "mxfp8"],
        help="The quantization mode (default: affine).",
    )
    parser.add_argument(
        "--dtype",
        choices=MODEL_CONVERSION_DTYPES,
        help="Type to save the non-quantized parameters. Defaults to config.json's torch_dtype.",
    )
    parser.add_argument("--revision", help="Branch, tag or commit on the Hub.")


def _attention(text: str) -> Any:
    """A kind, or what JSON says; whether the settings in it are right, convert looks."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"not readable as JSON: {one_line(error)}") from None
    if text in METHODS:
        return text
    raise argparse.ArgumentTypeError(
        f"invalid choice: {text!r} (choose from {', '.join(METHODS)}, or give settings in JSON)"
    )


def run(args: argparse.Namespace) -> None:
    """Converts, and says where the model is."""
    # Some fresh parameters start at random: the same in every run.
    mx.random.seed(0)
    folder = convert(
        args.hf_path,
        args.mlx_path,
        attention=args.attention,
        budget=args.budget,
        quantize=args.quantize,
        q_bits=args.q_bits,
        q_group_size=args.q_group_size,
        q_mode=args.q_mode,
        dtype=args.dtype,
        revision=args.revision,
    )
    print(f"[INFO] Saved to {folder}. Try: mlx-selective chat --model {folder}")
