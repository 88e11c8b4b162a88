"""Generates text from a run's newest checkpoint: python scripts/generate.py outputs/llama --prompt "def main("

One process, on a GPU if there is one; the run may have had any layout. Prints the text to standard output as it is generated, the speed to
standard error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import TypeVar

if __name__ == "__main__":  # run by path, from any folder: not scripts/, whose files could shadow a package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from configs.keys import keys_of
from configs.load import load
from configs.schema import RunConfig
from models.contract import Model, set_dtype
from parallelisms.device import pick_device
from parallelisms.execution import choose_precision
from training import checkpoint_dcp
from training.checkpoint_files import (
    EMA_STATE,
    CheckpointFailed,
    Damaged,
    Manifest,
    Removed,
    by_recency,
    is_same,
    list_steps,
    read_verified,
    step_folder,
)
from training.object_store import local_run
from training.sampling import SampleConfig, decode_after, generate, why_no_text
from training.tokenizer import Tokenizer, build_tokenizer

ATTEMPTS = 5  # to read a checkpoint of a run that goes on, and removes old ones
T = TypeVar("T")


def main(argv: list[str]) -> int:
    options = parse(argv)
    given = [f"--sample.{name}={value}" for name in keys_of(SampleConfig) if (value := vars(options)[name]) is not None]
    try:
        with local_run(options.run, options.step) as run:
            config = load([str(run / "config.toml"), *given])
            tokenizer, sample = build_tokenizer(config.model.tokenizer_path), config.sample
            prompt = tokenizer.encode(sample.prompt, bos=True)

            def read() -> tuple[Path, Model]:
                path, manifest = checkpoint_of(run / config.checkpoint.local_folder, options.step)
                try:
                    state, length = state_of(path, manifest, ema=options.ema), len(prompt) + sample.tokens
                    return path, load_model(config, path, tokenizer, length=length, dtype=options.dtype, state=state)
                finally:
                    if not is_same(path, manifest):  # the read failed, or has parts of two checkpoints
                        raise Removed(path)

            cure = "without --step the newest is read" if options.step >= 0 else ""
            path, model = read_surviving(read, cure, lambda text: print(f"generate: {text}", file=sys.stderr))
    except (ValueError, Damaged, CheckpointFailed, OSError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1 if isinstance(error, CheckpointFailed | OSError) else 2
    if reason := why_no_text(model):
        print(f"generate: {reason}", file=sys.stderr)
        return 2
    print(sample.prompt, end="", flush=True)
    began, count = time.perf_counter(), 0
    ids, printed = list[int](), ""
    tokens = torch.from_numpy(prompt).long().to(next(model.parameters()).device)
    for count, token in enumerate(generate(model, tokens, sample, length=sample.tokens), 1):  # noqa: B007 (used below)
        if token == tokenizer.eos_id:
            break
        ids.append(token)
        text = decode_after(tokenizer, prompt.tolist(), ids)
        if not text.endswith("\ufffd"):  # not while the bytes of a character are incomplete
            print(text[len(printed) :], end="", flush=True)
            printed = text
    seconds = time.perf_counter() - began
    print(flush=True)
    print(f"{path}: {count} tokens in {seconds:.2f} s, {count / seconds:,.0f} tokens/s", file=sys.stderr)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "run", help="folder of the run, such as outputs/llama, or its URL, such as s3://BUCKET/runs/llama"
    )
    parser.add_argument("--step", type=int, default=-1, help="checkpoint to read; default: the newest complete one")
    parser.add_argument("--ema", action="store_true", help="the average of the weights: optimizer.ema_decay")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "auto"), default="float32", help="weights and activations"
    )
    for name, key in keys_of(SampleConfig).items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=f"{key.help}; default: the run's own")
    return parser.parse_args(argv)


def read_surviving(read: Callable[[], T], only: str, warn: Callable[[str], object], attempt: int = 1) -> T:
    """Returns `read()`, which finds and reads the newest checkpoint; begins again, after a warning, when a run that goes on has removed it.
    `only`: advice for the error, if one certain checkpoint is read, which is not tried again; else "". Raises CheckpointFailed."""
    try:
        return read()
    except Removed as removed:
        if only:
            raise CheckpointFailed(f"{removed}; {only}") from None
        if attempt == ATTEMPTS:
            cure = "a larger checkpoint.keep_latest_k or interval keeps checkpoints for longer"
            raise CheckpointFailed(f"{removed}, {attempt} times in a row; {cure}") from None
        warn(f"{removed}; beginning again with the newest")
    return read_surviving(read, only, warn, attempt + 1)


def checkpoint_of(folder: Path, step: int, *, who: str = "generate", full: bool = False) -> tuple[Path, Manifest]:
    """Returns the newest complete checkpoint, or that of `step` if >= 0, and its manifest. Raises ValueError if there is none, Damaged, and
    Removed if a run removes it meanwhile; warns as `who`. `full`: not one with only the weights."""
    steps = list_steps(folder)
    if step >= 0 and step not in steps:
        raise ValueError(f"--step {step}: {folder} has {', '.join(map(str, steps)) or 'no checkpoint'}")
    for candidate in [step] if step >= 0 else by_recency(folder):
        path = step_folder(folder, candidate)
        try:
            manifest = read_verified(path)
            if manifest.kind == "full" or not full:
                return path, manifest
        except Damaged as damage:
            if step >= 0 or isinstance(damage, Removed):
                raise
            print(f"{who}: {path} is damaged ({damage}); trying the previous one", file=sys.stderr)
    raise ValueError(f"{folder}: no complete checkpoint")


def state_of(path: Path, manifest: Manifest, *, ema: bool) -> str:
    """Returns the name of the checkpoint's state that has the weights, or their average. Raises ValueError if there is no average."""
    if ema and EMA_STATE not in manifest.states:
        raise ValueError(f"--ema: {path} has no average of the weights, as it was saved with optimizer.ema_decay = 0.0")
    return EMA_STATE if ema else "model"


@torch.no_grad()
def load_model(
    config: RunConfig, path: Path, tokenizer: Tokenizer, *, length: int, dtype: str, state: str = "model"
) -> Model:
    """Loads the unsharded model onto one device, with rotary embeddings for `length` tokens. `state`: from state_of."""
    device = pick_device(0)
    model = config.meta_model(config.model.vocab_size or tokenizer.vocab_size, length)
    model.to_empty(device=device.torch_device)
    model.init_weights(config.training.seed)  # computes COMPUTED_BUFFERS, whose length differs from the run's
    parameters, own = dict(model.named_parameters()), model.state_dict()
    buffers = {name: own[name] for name in own.keys() - parameters.keys() - {*model.COMPUTED_BUFFERS}}
    # there is no average of buffers
    wanted = {"model": parameters | buffers} if state == "model" else {state: parameters, "model": buffers}
    if problem := checkpoint_dcp.load_into(wanted, path, group=None):
        raise OSError(f"{path}: {problem}")
    precision = choose_precision("float32", dtype, "float32", device)
    set_dtype(model, precision.compute)
    return model.eval()


if __name__ == "__main__":
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # `| head`. SIGPIPE stays ignored: an object store may close a connection, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes at its end
        code = 128 + signal.SIGPIPE
    sys.exit(code)
