#!/usr/bin/env python3
"""Converts Hugging Face's weights of Llama, Qwen3 and others (models/*_hf.py) to checkpoints and back, with one tensor in memory at a time.

    python scripts/hf.py import HF_DIR OUT [--config CONFIG] [--tokenizer PATH] [--dtype float32|bfloat16|float16]
    python scripts/hf.py export RUN_OR_CHECKPOINT OUT [--step N] [--shard-gb 5] [--dtype float32|bfloat16] [--ema]
        [--max-positions N]

Import writes OUT/config.toml, with which ./scripts/run_train.sh starts from the weights, and prints its [model]; export writes a folder
for transformers.AutoModelForCausalLM, also while the run goes on. Downloads nothing, reads and writes only safetensors; OUT appears when it
is complete.
Exit code: 0 written; 2 bad input, found before anything is written; 1 other errors: no space on the disk, or interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "scripts"))]

from training.config import need  # noqa: E402 (our packages first)


def main(argv: list[str]) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: removes incomplete output
    try:
        for package in ("safetensors", "tokenizers"):
            need(package, extra="hf", setting=f"hf.py {options.command}")
    except ValueError as error:
        return fail(error, 2)
    from contrib.interchange.hf import export_run, import_folder  # after the check, as it imports torch for seconds
    from training.checkpoint_files import CheckpointFailed, Damaged
    from training.durable_files import cause_of
    from training.log import Log
    from training.object_store import local_run

    try:
        if options.command == "import":
            import_folder(
                options.source,
                options.out,
                config_file=options.config,
                tokenizer=options.tokenizer,
                dtype=options.dtype,
                log=Log(),
            )
        else:
            with local_run(options.source, options.step) as source:
                export_run(
                    source,
                    options.out,
                    step=options.step,
                    shard_bytes=int(options.shard_gb * 1e9),
                    dtype=options.dtype,
                    ema=options.ema,
                    max_positions=options.max_positions or 0,
                    log=Log(),
                )
    except (ValueError, Damaged) as error:
        return fail(error, 2)
    except CheckpointFailed as error:
        return fail(error, 1)
    except OSError as error:
        return fail(cause_of(error, options.out), 1)
    except KeyboardInterrupt:
        return fail(f"interrupted; {options.out} was not written", 1)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="hf.py", description=__doc__, formatter_class=how)
    commands = parser.add_subparsers(dest="command", required=True)

    importing = commands.add_parser("import", help="safetensors and config.json -> a checkpoint to start from")
    importing.add_argument("source", metavar="HF_DIR", type=Path, help="folder with config.json and *.safetensors")
    importing.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    settings = "settings for OUT/config.toml, except [model]; default: configs/llama.toml"
    importing.add_argument("--config", type=Path, default=ROOT / "configs" / "llama.toml", help=settings)
    tokenizer = 'tokenizer.json or its folder; "": bytes; default: that of HF_DIR'
    importing.add_argument("--tokenizer", metavar="PATH", default=None, help=tokenizer)
    dtypes = ("float32", "bfloat16", "float16")
    importing.add_argument("--dtype", choices=dtypes, default="", help="dtype to convert to; default: unchanged")

    exporting = commands.add_parser("export", help="a run's checkpoint -> safetensors and config.json")
    source = "a run's folder, such as outputs/llama, or .../checkpoint/step-N, or the URL of a run, such as s3://BUCKET/runs/llama"
    exporting.add_argument("source", metavar="RUN_OR_CHECKPOINT", help=source)
    exporting.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    exporting.add_argument("--step", type=int, default=-1, help="of a run; default: the newest complete checkpoint")
    exporting.add_argument("--shard-gb", type=float, default=5.0, help="largest file, in 10^9 bytes; default: 5")
    exporting.add_argument("--dtype", choices=dtypes[:2], default="", help="dtype to convert to; default: as saved")
    exporting.add_argument("--ema", action="store_true", help="the average of the weights: optimizer.ema_decay")
    positions = "max_position_embeddings in config.json; default: training.seq_len"
    exporting.add_argument("--max-positions", type=int, default=None, help=positions)
    options = parser.parse_args(argv)
    if options.command == "export":
        if not 0 < options.shard_gb < float("inf"):
            exporting.error(f"argument --shard-gb: {options.shard_gb:g}: must be above 0")
        if options.max_positions is not None and options.max_positions < 1:
            exporting.error(f"argument --max-positions: {options.max_positions}: must be at least 1")
    return options


def fail(message: object, code: int) -> int:
    print(f"hf: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
