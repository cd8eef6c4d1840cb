"""The command line: ``superoffload COMMAND``, the same data flow as the notebook.

Every command takes ``--json``: one JSON object on stdout and everything else on stderr. Exit code 0 is success, 1 a
failure, 2 bad input. Commands import what they need when they run, so that ``simulate`` answers without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from superoffload import __version__
from superoffload.errors import DoesNotFit, InputError, SuperOffloadError, did_you_mean
from superoffload.memory import Ledger
from superoffload.record import finite

Result = dict[str, Any]
"""What a command returns: the JSON object. Its text for people was printed by the command itself."""


class _Parser(argparse.ArgumentParser):
    """argparse with this project's messages: the nearest known word, and errors as exceptions."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message, remedy=f"See: {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(c) for c in action.choices]
            what = "command" if action.dest == "command" else "/".join(action.option_strings) or action.dest
            raise InputError(
                f'unknown {what} "{value}"{did_you_mean(str(value), names)}', expected=f"one of {', '.join(names)}"
            )


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar; `superoffload --help` and the README are checked against it."""
    from superoffload import cli_planning as planning
    from superoffload import cli_running as running
    from superoffload import cli_search as searching
    from superoffload.search_result import OBJECTIVES

    parser = _Parser(
        prog="superoffload",
        description="Profile, tune and train a model with its optimizer state split between a GPU and its CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"superoffload {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, run: Callable[[argparse.Namespace], Result], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="one JSON object on stdout, everything else on stderr")
        sub.set_defaults(run=run)
        return sub

    command("doctor", running.doctor, "say what this machine has, what is missing and what to do about it")

    sub = command("probe", planning.probe, "measure this machine (about 30 s) and write a hardware file")
    sub.add_argument("--out", metavar="FILE", help="write the hardware record here")
    sub.add_argument("--refresh", action="store_true", help="measure again although a cached measurement exists")

    sub = command("profile", planning.profile, "seconds and bytes per block: presets are estimated, models measured")
    _model_arguments(sub, required=True)
    sub.add_argument("--measure", action="store_true", help="build a preset with random weights and measure it here")
    sub.add_argument("--compile-blocks", action="store_true", help="measure the layers compiled with torch.compile too")
    sub.add_argument("--gguf-file", metavar="NAME", help="name of the GGUF file inside the model's folder")
    sub.add_argument("--out", metavar="FILE", help="write the profile here")

    for name, run, text in (
        ("plan", planning.plan, "choose a plan with the cost model and say why"),
        ("simulate", planning.simulate, "simulate training steps under a plan"),
    ):
        sub = command(name, run, text)
        _model_arguments(sub, required=False)
        sub.add_argument("--profile", metavar="FILE", help="plan for this profile instead of --model")
        sub.add_argument("--gpu-budget-gb", type=_positive_float, metavar="GB", help="plan as if the GPU had this much")
        _chip_arguments(sub)
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="fix a plan field (repeatable): bucket_mb=32, flow_blocks=3,5,7; also counts: flow=8, buckets=16",
        )
        sub.add_argument("--out", metavar="FILE", help=f"write the {'plan' if name == 'plan' else 'trace'} here")
        if name == "plan":
            sub.add_argument("--config", metavar="FILE", help="write a tuned config for superoffload train here")
            sub.add_argument("--source", metavar="MODEL", help="where the config's weights come from")

    sub = command("search", searching.search, "try many plans, show the best ones and why, and measure some of them")
    _model_arguments(sub, required=False)
    sub.add_argument("--profile", metavar="FILE", help="search for this profile instead of --model")
    _chip_arguments(sub)
    sub.add_argument(
        "--tokens", type=searching.tokens, metavar="N", help="tokens per optimizer step, or free: of any size"
    )
    sub.add_argument(
        "--objective", choices=OBJECTIVES, default="throughput", help="what the best plan has most, or least, of"
    )
    sub.add_argument("--gpu-gb", "--gpu-budget-gb", type=_positive_float, metavar="GB", help="use no more GPU memory")
    sub.add_argument(
        "--host-gb", "--host-budget-gb", type=_positive_float, metavar="GB", help="use no more host memory"
    )
    sub.add_argument(
        "--tokens-per-s", type=_positive_float, metavar="N", help="the least throughput (memory objectives)"
    )
    sub.add_argument("--trials", type=_positive_int, default=1000, metavar="N", help="plans that are tried at most")
    sub.add_argument("--seed", type=int, default=0, help="the same seed finds the same plans")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="fix a plan field (repeatable)")
    sub.add_argument(
        "--measure", type=_positive_int, metavar="K", help="run the best K plans here and keep the fastest"
    )
    sub.add_argument("--out", metavar="FILE", help="write every plan that was tried, with its verdict, here")
    sub.add_argument("--config", metavar="FILE", help="write a tuned config of the best plan here")
    sub.add_argument("--source", metavar="MODEL", help="where the config's weights come from")
    sub.set_defaults(gpu_budget_gb=None, gguf_file=None)

    sub = command("calibrate", planning.calibrate, "correct a profile by a measured step, and say where it was off")
    sub.add_argument("--profile", required=True, metavar="FILE", help="the profile of the model that was measured")
    sub.add_argument("--trace", required=True, metavar="FILE", help="the measured step: opt.trace().save(FILE)")
    sub.add_argument("--out", metavar="FILE", help="write the corrected profile here")
    sub.add_argument("--history", metavar="FILE", help="append the corrections here, and show how they went over time")

    sub = command("train", running.train, "train with a tuned config; writes logs and checkpoints into a folder")
    sub.add_argument("--config", required=True, metavar="FILE", help="a tuned config")
    sub.add_argument("--data", required=True, metavar="FILE_OR_DATASET", help="text, JSON lines, or a Hugging Face id")
    sub.add_argument("--steps", type=_positive_int, help="optimizer steps, instead of the config's")
    sub.add_argument("--out", metavar="FOLDER", help="folder of the run (default: run)")
    sub.add_argument("--resume", metavar="FOLDER", help="continue the run in this folder")

    sub = command("export", planning.export, "turn a tuned config into another tool's format")
    sub.add_argument("--config", metavar="FILE", help="a tuned config (deepspeed; chrome-trace and html of a preset)")
    sub.add_argument("--trace", metavar="FILE", help="a trace to draw, simulated or measured")
    sub.add_argument("--format", required=True, choices=("deepspeed", "chrome-trace", "html"))
    sub.add_argument("--out", metavar="FILE", help="write here instead of printing")

    sub = command("bench", running.bench, "time CPU Adam here beside torch's, on the same arrays")
    sub.add_argument("what", choices=("adam",), help="what is timed")
    sub.add_argument("--params", type=_positive_int, default=64_000_000, metavar="N", help="elements of each array")
    sub.add_argument("--threads", type=_positive_int, action="append", metavar="N", help="thread count (repeatable)")
    sub.add_argument("--rounds", type=_positive_int, default=7, metavar="N", help="interleaved rounds")

    sub = command("lab", running.lab, "open JupyterLab on the notebooks")
    sub.add_argument("--folder", default=".", metavar="FOLDER", help="where the notebooks are, or are copied to")
    sub.add_argument("--no-browser", action="store_true", help="print the address instead of opening a browser")
    sub.add_argument("--port", type=_positive_int, help="port of the server")
    sub.add_argument("--dry-run", action="store_true", help="copy the notebooks, say what would be started, and stop")

    text = "test a laptop the evening before: packages, notebooks, JupyterLab"
    sub = command("workshop-check", running.workshop_check, text)
    sub.add_argument("--folder", default=".", metavar="FOLDER", help="where the notebooks are, or are copied to")
    sub.add_argument("--wheels", metavar="FOLDER", help="also whether this folder of wheels installs without internet")

    sub = command("demo", running.demo, "the main job without a browser: profile, plan, export, train")
    sub.add_argument("--out", default="demo-out", metavar="FOLDER", help="where the results go (default: demo-out)")
    sub.add_argument("--steps", type=_positive_int, help="training steps")
    return parser


def _chip_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--chips", type=_positive_int, metavar="N", help="plan for N such Superchips (modelled only)")
    sub.add_argument("--sequence-parallel", type=_positive_int, metavar="N", help="chips that share each sequence")
    sub.add_argument("--data-parallel", type=_positive_int, metavar="N", help="groups with sequences of their own")


def _model_arguments(sub: argparse.ArgumentParser, *, required: bool) -> None:
    sub.add_argument("--model", required=required, metavar="PRESET_OR_MODEL", help="a preset, a folder or an id")
    sub.add_argument("--hardware", metavar="PRESET_OR_FILE", help="a preset or a file of superoffload probe")
    sub.add_argument("--micro-batch", type=_positive_int, default=None, help="sequences per micro-batch (default 1)")
    sub.add_argument("--seq-len", type=_positive_int, default=None, help="tokens per sequence (default 2048)")
    sub.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="dtype of the weights (bfloat16)")


@contextlib.contextmanager
def _stdout_to_stderr(active: bool) -> Iterator[None]:
    """Send everything that a command or a library prints to stderr, C code and child processes included."""
    if not active:
        yield
        return
    sys.stdout.flush()
    saved = None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no real file behind it, in a notebook or a test
        fd = sys.stdout.fileno()
        saved = os.dup(fd)
        os.dup2(sys.stderr.fileno(), fd)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, sys.__stdout__.fileno() if sys.__stdout__ else 1)
            os.close(saved)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 success, 1 failed, 2 bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    code = 0
    body: Result | None = None
    try:
        args = build_parser().parse_args(arguments)
        with _stdout_to_stderr(as_json):
            body = args.run(args)
        code = int(body.pop("exit_code", 0))
    except SuperOffloadError as e:
        code = e.exit_code
        body = {"error": {"type": type(e).__name__, "what": e.what, "expected": e.expected, "remedy": e.remedy}}
        if isinstance(e, DoesNotFit) and isinstance(e.ledger, Ledger):
            body["error"]["memory"] = e.ledger.summary()
        print(f"superoffload: error: {e}", file=sys.stderr)
    except KeyboardInterrupt:
        code, body = 1, {"error": {"type": "KeyboardInterrupt", "what": "stopped by Ctrl-C"}}
        print("superoffload: stopped", file=sys.stderr)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        return _closed_pipe()
    except OSError as e:
        code, body = 1, {"error": {"type": type(e).__name__, "what": str(e)}}
        print(f"superoffload: error: {e}", file=sys.stderr)
    except Exception as e:  # a bug: the traceback is for the report, the JSON for the caller
        if not as_json:
            raise
        traceback.print_exc()
        code, body = 1, {"error": {"type": type(e).__name__, "what": str(e)}}
    try:
        if as_json and body is not None:
            sys.stdout.write(json.dumps(finite(body), ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed_pipe()
    return code


def _closed_pipe() -> int:
    """Keep the interpreter from failing once more when it flushes stdout at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
