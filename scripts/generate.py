"""Generates text from a run's newest checkpoint: python scripts/generate.py outputs/llama --prompt "def main("

One process, on a GPU if there is one; the run may have had any layout. Prints the text to standard output as it is generated, the speed to
standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path from any folder

import torch

from configs.keys import keys_of
from configs.load import load
from configs.schema import RunConfig
from models.contract import Model
from parallelisms.device import pick_device
from parallelisms.layout import choose_precision
from training import checkpoint_dcp
from training.checkpoint_files import Damaged, Manifest, Removed, list_steps, read_verified, step_folder
from training.object_store import local_run
from training.sampling import SampleConfig, generate
from training.tokenizer import Tokenizer, build_tokenizer


def main(argv: list[str]) -> int:
    options = parse(argv)
    given = [f"--sample.{name}={value}" for name in keys_of(SampleConfig) if (value := vars(options)[name]) is not None]
    with ExitStack() as cleanup:
        try:
            run = cleanup.enter_context(local_run(options.run, options.step))
            config = load([str(run / "config.toml"), *given])
            path, _ = checkpoint_of(run / config.checkpoint.local_folder, options.step)
            tokenizer = build_tokenizer(config.model.tokenizer_path)
        except (ValueError, Damaged, OSError) as error:
            print(f"generate: {error}", file=sys.stderr)
            return 1 if isinstance(error, OSError) else 2
        write(config, path, tokenizer, dtype=options.dtype)
    return 0


def write(config: RunConfig, path: Path, tokenizer: Tokenizer, *, dtype: str) -> None:
    """Prints the text."""
    sample = config.sample
    prompt = tokenizer.encode(sample.prompt, bos=True)
    model = load_model(config, path, tokenizer, length=len(prompt) + sample.tokens, dtype=dtype)
    print(sample.prompt, end="", flush=True)
    began, count = time.perf_counter(), 0
    ids, printed = list[int](), ""
    tokens = torch.from_numpy(prompt).long().to(next(model.parameters()).device)
    for count, token in enumerate(generate(model, tokens, sample, length=sample.tokens), 1):  # noqa: B007 (used below)
        if token == tokenizer.eos_id:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # not while the bytes of a character are incomplete
            print(text[len(printed) :], end="", flush=True)
            printed = text
    seconds = time.perf_counter() - began
    print(flush=True)
    print(f"{path}: {count} tokens in {seconds:.2f} s, {count / seconds:,.0f} tokens/s", file=sys.stderr)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "run", help="folder of the run, such as outputs/llama, or its URL, such as s3://BUCKET/runs/llama"
    )
    parser.add_argument("--step", type=int, default=-1, help="checkpoint to read; default: the newest complete one")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "auto"), default="float32", help="weights and activations"
    )
    for name, key in keys_of(SampleConfig).items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=f"{key.help}; default: the run's own")
    return parser.parse_args(argv)


def checkpoint_of(folder: Path, step: int, *, who: str = "generate") -> tuple[Path, Manifest]:
    """Returns the newest complete checkpoint, or that of `step` if >= 0, and its manifest. Raises ValueError if there is none, Damaged, and
    Removed if a run removes it meanwhile; warns as `who`."""
    steps = list_steps(folder)
    if step >= 0 and step not in steps:
        raise ValueError(f"--step {step}: {folder} has {', '.join(map(str, steps)) or 'no checkpoint'}")
    for candidate in [step] if step >= 0 else reversed(steps):
        path = step_folder(folder, candidate)
        try:
            return path, read_verified(path)
        except Damaged as damage:
            if step >= 0 or isinstance(damage, Removed):
                raise
            print(f"{who}: {path} is damaged ({damage}); trying the previous one", file=sys.stderr)
    raise ValueError(f"{folder}: no complete checkpoint")


def load_model(config: RunConfig, path: Path, tokenizer: Tokenizer, *, length: int, dtype: str) -> Model:
    """Loads the unsharded model onto one device, with rotary embeddings for `length` tokens."""
    device = pick_device(0)
    model = config.meta_model(config.model.vocab_size or tokenizer.vocab_size, length)
    model.to_empty(device=device.torch_device)
    model.init_weights(config.training.seed)  # computes the buffers, whose length differs from the run's
    if problem := checkpoint_dcp.read({"model": dict(model.named_parameters())}, path, group=None):
        raise RuntimeError(f"{path}: {problem}")
    precision = choose_precision("float32", dtype, "float32", device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.compute)
    return model.eval()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
