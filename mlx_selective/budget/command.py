"""``mlx-selective budget``: finds how few keys each layer needs, and stores it."""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..builtin import BUILTIN_MODEL
from ..errors import UserError
from ..files import is_folder, read_json
from ..generation.options import add_model_argument, between, positive
from ..interrupts import InterruptFlag
from ..loading import load, model_folder
from ..writing import whole_file
from .allocation import Step, allocate
from .curve import draw_curve, share_of_keys, write_curve
from .documents import read_documents
from .flags import percentage
from .measure import check_prunable, mean_loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the text, and how far to go."""
    add_model_argument(parser)
    parser.add_argument(
        "--data",
        required=True,
        help="File of lines as for finetune, or a folder with valid.jsonl: half of the documents "
        "choose, the others report.",
    )
    parser.add_argument(
        "--max-loss",
        type=percentage,
        default=0.01,
        help="How much perplexity may rise, such as 0.5%% (default: 1%%).",
    )
    parser.add_argument(
        "--tokens", type=between(int, 8), default=512, help="Tokens of a document (default: 512)."
    )
    parser.add_argument(
        "--documents", type=positive, default=8, help="Documents of each half (default: 8)."
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        default=1,
        help="Tokens that come at a time (default: 1, token by token).",
    )
    parser.add_argument(
        "--mlx-path", help="Store the budgets in a copy of the model (default: in the model)."
    )


def run(args: argparse.Namespace) -> None:
    """Allocates, reports, stores and draws; Ctrl-C goes on with what was found."""
    target = _target(args)
    folder = model_folder(args.model)
    model, tokenizer = load(folder, adapter_path=args.adapter_path)
    check_prunable(model)
    choosing, others = read_documents(
        Path(args.data).expanduser(), tokenizer, args.tokens, args.documents
    )

    def loss_of(budgets: Any, documents: mx.array = choosing) -> float:
        return mean_loss(model, documents, budgets, chunk=args.chunk)

    full = Step([args.tokens] * len(model.layers), loss_of(None))
    print(f"Every key: perplexity {math.exp(full.loss):.2f}", flush=True)
    steps = [full, *_allocation(loss_of, full, args)]
    chosen = steps[-1].budgets
    report = _report(lambda budgets: loss_of(budgets, others), chosen, args.tokens)
    how = "token by token" if args.chunk == 1 else f"{args.chunk} tokens at a time"
    print(f"\n{len(others)} other documents of {args.tokens} tokens, {how}:\n{_table(report)}")
    print(f"Budgets: {' '.join(map(str, chosen))}")
    if target is not None:
        about = {"tokens": args.tokens, "chunk": args.chunk, "max_loss": args.max_loss}
        _store(folder, target, steps, about | {"report": report})
    else:
        print("Not stored: --mlx-path DIR stores them in a copy of this model.")


def _target(args: argparse.Namespace) -> Path | None:
    """The folder that is written to.

    Raises:
        UserError: if --mlx-path is there already.
    """
    if args.mlx_path is not None:
        target = Path(args.mlx_path).expanduser()
        if target.exists():
            raise UserError(f"--mlx-path {target} exists already; give another one.")
        return target
    own = is_folder(args.model) and args.model != str(BUILTIN_MODEL)
    return Path(args.model).expanduser() if own else None


def _allocation(loss_of: Any, full: Step, args: argparse.Namespace) -> list[Step]:
    steps: list[Step] = []
    with InterruptFlag() as interrupt:
        most = full.loss + math.log1p(args.max_loss)
        for step in allocate(loss_of, full, most):
            steps.append(step)
            rise = math.expm1(step.loss - full.loss)
            print(
                f"Step {len(steps)}: {share_of_keys(step.budgets, args.tokens):.1%} of the keys, "
                f"perplexity {math.exp(step.loss):.2f} ({rise:+.2%}), "
                f"budgets {' '.join(map(str, step.budgets))}",
                flush=True,
            )
            if interrupt.raised:
                print("Stopped here; what was found is reported and stored.")
                break
    return steps


def _report(loss_of: Any, chosen: list[int], tokens: int) -> list[dict[str, Any]]:
    """Perplexity with all keys, the chosen budgets, and as many keys spread evenly."""
    even = max(2, round(sum(chosen) / len(chosen)))
    ways = {"every key": None, "budgets of each layer": chosen, "one budget for all": even}
    rows = []
    for name, budgets in ways.items():
        listed = [tokens if budgets is None else budgets] if budgets is not chosen else chosen
        kept = share_of_keys(listed, tokens)
        rows.append({"way": name, "kept": kept, "perplexity": math.exp(loss_of(budgets))})
    return rows


def _table(report: list[dict[str, Any]]) -> str:
    full = report[0]["perplexity"]
    lines = [f"{'':24}{'keys':>7}{'memory':>10}{'perplexity':>13}"]
    for row in report:
        rise = f"{row['perplexity'] / full - 1:+.2%}" if row is not report[0] else ""
        lines.append(
            f"{row['way']:24}{row['kept']:>7.1%}{1 / row['kept']:>9.1f}x{row['perplexity']:>13.2f}"
            f"  {rise}".rstrip()
        )
    return "\n".join(lines)


def _store(folder: Path, target: Path, steps: list[Step], about: dict[str, Any]) -> None:
    """config.json last: a model whose budgets are told has its curve."""
    if target != folder:
        shutil.copytree(folder, target)
    path = write_curve(target, steps, about)
    tokens = about["tokens"]
    lines = {
        "budgets of each layer, while choosing": [
            (share_of_keys(step.budgets, tokens), math.exp(step.loss)) for step in steps
        ]
    }
    full, *others = [(row["kept"], row["perplexity"]) for row in about["report"]]
    for row, point in zip(about["report"][1:], others, strict=True):
        lines[f"{row['way']}, on other documents"] = [full, point]
    picture = draw_curve(target, lines, tokens)
    config = read_json(target / "config.json")
    config["attention"] = config["attention"] | {"budget": steps[-1].budgets}
    with whole_file(target / "config.json") as file:
        file.write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
    print(f"Saved to {target / 'config.json'}; curve: {picture or path}")
