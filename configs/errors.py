"""ConfigError, which reports all problems of a config at once, and suggestions for unknown keys."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import extract_tb

MAX_SHOWN = 10
ROOT = Path(__file__).resolve().parent.parent


class ConfigError(ValueError):
    """Invalid settings. str() is the whole message, one line per problem; the caller exits with code 2."""


def explained(error: ValueError) -> str:
    """Returns the message of an error and, unless the code here raised it on purpose, the line of this code that it came through last:
    Python and torch raise ValueError for a mistake in code, too."""
    frames = extract_tb(error.__traceback__)
    own = [frame for frame in frames if ROOT in Path(frame.filename).parents and "site-packages" not in frame.filename]
    if not own or (own[-1] is frames[-1] and (frames[-1].line or "").startswith("raise ")):
        return str(error)
    return f"{error} ({Path(own[-1].filename).relative_to(ROOT)}, line {own[-1].lineno})"


def raise_problems(problems: Iterable[str], file: str = "") -> None:
    """Raises ConfigError if there are problems, one per line: first those with "file:line: ", by line, then the others."""

    def line(text: str) -> int:
        place = re.match(rf"{re.escape(file)}:(\d+): ", text)
        return int(place[1]) if place else sys.maxsize

    texts = sorted((text.replace("\n", " ") for text in problems), key=line)
    if len(texts) > MAX_SHOWN:
        texts[MAX_SHOWN:] = [f"... and {len(texts) - MAX_SHOWN} more"]
    if texts:
        raise ConfigError("\n".join(texts))


_OTHER_NAMES = {  # names of our keys in other trainers; with a section: exactly torchtitan's; without: in any section
    "activation_checkpoint.mode": "activation_checkpoint.type",
    "checkpoint.enable": "checkpoint.enable_checkpoint",
    "checkpoint.interval": "save_interval",
    "checkpoint.last_save_model_only": "checkpoint.model_weights_only",
    "compile.enable": "compile training.compile",
    "fault_tolerance.enable": "ft.enable",
    "fault_tolerance.min_replica_size": "ft.min_replica_size",
    "fault_tolerance.process_group": "ft.process_group",
    "float8.enable": "float8.enable_float8_linear model.converters training.enable_float8_linear",
    "job.dump_folder": "output_dir",
    "lr_scheduler.min_lr_factor": "lr_scheduler.lr_min",
    "lr_scheduler.warmup_steps": "warmup",
    "metrics.disable_color_printing": "metrics.enable_color_printing",
    "metrics.log_freq": "log_interval",
    "model.dim": "hidden_size",
    "model.hidden_dim": "intermediate_size",
    "model.n_heads": "num_heads",
    "model.n_kv_heads": "num_kv_heads",
    "model.n_layers": "num_layers",
    "model.tokenizer_path": "model.hf_assets_path tokenizer",
    "optimizer.beta1": "optimizer.betas",
    "optimizer.implementation": "optimizer.fused",
    "optimizer.lr": "learning_rate",
    "parallelism.data_parallel_shard_degree": "training.data_parallel_degree",
    "parallelism.disable_loss_parallel": "experimental.enable_loss_parallel parallelism.enable_loss_parallel training.enable_loss_parallel",
    "parallelism.module_fqns_per_model_part": "experimental.pipeline_parallel_split_points parallelism.pipeline_parallel_split_points",
    "parallelism.pipeline_parallel_microbatch_size": "parallelism.pipeline_parallel_microbatches "
    "experimental.pipeline_parallel_microbatches",
    "training.dataset_path": "data_path",
    "training.global_batch_size": "gradient_accumulation_steps",
    "training.local_batch_size": "batch_size",
    "training.max_norm": "clip_grad grad_clip max_grad_norm",
    "training.seed": "debug.seed random_seed",
    "training.seq_len": "context_length max_seq_len sequence_length",
    "training.steps": "max_iters max_steps",
}
OTHER_NAMES = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}
GONE = {  # keys of torchtitan that have no counterpart by design
    "model.flavor": "sizes are spelled out: model.dim, model.n_layers, ...",
    "job.config_file": "the config file is the first argument",
    "job.custom_config_module": "a model's keys are the Config of models/<model.name>.py",
    "checkpoint.interval_type": "checkpoint.interval counts steps",
    "activation_checkpoint.early_stop": "early stop is always on",
    "activation_checkpoint.preserve_rng_state": "recomputation always uses the same random numbers",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": 'selective_ac_option = "op" keeps every second matmul',
    "fault_tolerance.group_size": "set the environment variable NUM_REPLICA_GROUPS",
    "fault_tolerance.replica_id": "set the environment variable REPLICA_GROUP_ID",
    "ft.group_size": "set the environment variable NUM_REPLICA_GROUPS",
    "ft.replica_id": "set the environment variable REPLICA_GROUP_ID",
    "experimental.enable_compiled_autograd": "backwards are compiled with their forwards",
    "parallelism.enable_compiled_autograd": "backwards are compiled with their forwards",
    "quantize.linear": "float8 is a section of its own: [float8]",
}
_SAME_SECTION = 0.15  # bonus in similarity for candidates of the same section


def unknown_key(wrong: str, legal: Sequence[str]) -> str:
    """Returns the message for an unknown "section.key", with a suggestion: "no such key; did you mean optimizer.lr?"."""
    section, _, name = wrong.rpartition(".")
    if wrong in GONE:
        return f"no such key; {GONE[wrong]}"
    if section in legal:
        return f"no such key; {section} is a value, not a table"
    elsewhere = [key for key in legal if key.rpartition(".")[2] == name]
    if elsewhere and wrong not in OTHER_NAMES:
        elsewhere.sort(key=lambda key: -_likeness(section, key.rpartition(".")[0]))
        return f"no such key here; it is {' or '.join(elsewhere[:3])}"
    found = nearest_key(wrong, legal)
    if found:
        return f"no such key; did you mean {found}?"
    own = [key[len(section) + 1 :] for key in legal if key.startswith(f"{section}.") and "[]" not in key]
    return f"no such key; [{section}] has {', '.join(own)}" if own else "no such key"


def nearest_key(wrong: str, legal: Sequence[str]) -> str | None:
    """Returns the legal key most similar to "section.key", by its name or its names in other trainers; None: none is similar."""
    section, _, name = wrong.rpartition(".")
    keys = {alias: key for alias, key in OTHER_NAMES.items() if key in legal and alias not in legal}

    def score(alias: str) -> float:
        is_near = section in (alias.rpartition(".")[0], keys.get(alias, alias).rpartition(".")[0])
        return _likeness(name, alias.rpartition(".")[2]) + is_near * _SAME_SECTION + (alias == wrong)

    best = max([*legal, *keys], key=score, default="")
    return keys.get(best, best) if score(best) > 0.75 else None


def nearest_section(wrong: str, sections: Iterable[str]) -> str | None:
    """Returns the section most similar to this name; None: none is similar."""
    return next(iter(difflib.get_close_matches(wrong.lower(), sections, n=1, cutoff=0.7)), None)


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a.lower().replace("-", "_"), b.lower()).ratio()
