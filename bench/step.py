"""Measures tokens per second and memory of a training step of the same model, here and in other frameworks that are installed.

    python bench/step.py [--model llama|qwen3] [--peer-python PYTHON] [--rounds 7] [--turns 1] [--device cpu|cuda] [--threads 2]

Peers are torchtitan 0.2 and transformers 5: fp32, fp32 weights with bf16 autocast, and bf16 weights without fp32 master weights (faster,
but small updates are lost); pharos has fp32 master weights, except with `bf16 weights`. Each side is one process for all rounds, on the
same CPUs and number of threads; the sides alternate, --turns times in a round, whose seconds are added up: where a machine's speed changes
within seconds, ratios of long rounds are steadier. The last lines compare each setting of pharos with the fastest peer at its best setting,
round by round. gpu.py starts the same sides.

A setting is a list of flags: bf16 (autocast in a peer) or bf16 weights or fp32; compile, or compile=BACKEND; checkpoint (half of the
matmuls and all of attention are saved, in torchtitan by code of this repository that does the same as its own; transformers recomputes
whole blocks); and only for pharos chunked=8192 (logits of that many tokens at once), documents=64 (masked, of that length), float8, and
muon in place of AdamW. Weights of pharos are initialized on the device, as their bits do not matter. Each side has its own interpreter, so
that a peer's process imports only torch and that peer.

On the CPU pharos makes the C library keep freed memory (parallelisms/device.py). For the same in the peers:
--env MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824

On a machine with other load, wall-clock times with several threads are unreliable, as threads wait for each other: use "CPU s/step" with
--threads 1.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.job import ROOT, memory_bytes
from bench.pairs import Failed, Worker, asking, in_turns, parser, ratio, serve, table

SIZES = {"dim": 256, "layers": 6, "heads": 8, "kv_heads": 4, "hidden": 768, "vocab": 2048, "batch": 8, "seq": 512}
MODELS = {"llama": SIZES, "qwen3": {**SIZES, "head_dim": 64}}  # only Qwen3 has a head width of its own
OURS, STEPS = "pharos", 3  # steps of a turn
PEER_SETTINGS = ("bf16 autocast", "bf16 autocast compile", "fp32", "bf16 weights", "bf16 weights compile")
SETTINGS = {
    OURS: ("bf16", "bf16 compile", "fp32", "fp32 muon"),
    "torchtitan": PEER_SETTINGS,
    "transformers": PEER_SETTINGS,
}
Step = Callable[[Tensor, Tensor], Any]  # inputs, labels [B, T]


def start(
    side: str, setting: str, sizes: Mapping[str, int], device: str, *, peer_python: str = sys.executable, threads: int = 0,
    env: Mapping[str, str] | None = None, limit_s: float | None = None,
) -> Worker:  # fmt: skip
    """Starts the process of a side, without waiting until it is ready. `threads`: number of its CPUs and threads; 0: not limited."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)} if threads else {}
    arguments = {"side": side, "setting": setting, "sizes": sizes, "device": device, "cpus": cpus}
    command = [sys.executable if side == OURS else peer_python, __file__, "--side", json.dumps(arguments)]
    return Worker(f"{side} {setting}", command, {**own, **(env or {})}, limit_s=limit_s)


def main() -> None:
    flags = parser(
        __doc__,
        peer_python=(sys.executable, "interpreter that has the peers"),
        model=("llama", "or qwen3"),
        rounds=(7, "measurements of each side"),
        turns=(1, f"turns of {STEPS} steps of each side in a round"),
        only=("", "a regular expression over sides with their settings"),
        device="cpu",
        threads=(len(os.sched_getaffinity(0)), "number of CPUs and threads per side"),
    )
    flags.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="environment variables for all sides")
    options = flags.parse_args()
    env = dict(pair.split("=", 1) for pair in options.env)
    how: Any = {"peer_python": options.peer_python, "threads": options.threads, "env": env}
    workers, first_steps = list[Worker](), dict[str, float]()
    with ExitStack() as stack:
        # one after the other, so that compilations do not overlap
        for side, setting in ((side, setting) for side, settings in SETTINGS.items() for setting in settings):
            if not re.search(options.only, f"{side} {setting}"):
                continue
            worker = stack.enter_context(closing(start(side, setting, MODELS[options.model], options.device, **how)))
            try:
                first_steps[worker.name] = worker.answer()["seconds"]
                workers.append(worker)
            except Failed as failure:
                print(f"{worker.name}: left out: {failure}", file=sys.stderr)
        in_turns(asking(workers, do="run", steps=2), 1)  # warm-up
        answers = in_turns(asking(workers, do="run", steps=STEPS), options.rounds * options.turns)
    print(_report(answers, first_steps, options.turns))


def _report(answers: dict[str, list[Any]], first_steps: dict[str, float], turns: int) -> str:
    """Returns the table, fastest first, and a line for each setting of pharos."""
    tokens, speeds = turns * STEPS * SIZES["batch"] * SIZES["seq"], dict[str, list[float]]()
    for name, given in answers.items():
        seconds = [answer["seconds"] for answer in given]
        speeds[name] = [tokens / sum(seconds[at : at + turns]) for at in range(0, len(seconds), turns)]
    memory = {name: given[-1]["memory_mib"] for name, given in answers.items()}
    fastest, rows = sorted(speeds, key=lambda name: statistics.median(speeds[name]), reverse=True), []
    for name in fastest:
        cpu_s = statistics.median(answer["cpu_seconds"] for answer in answers[name]) / STEPS
        median, low, high = (f"{of(speeds[name]):,.0f}" for of in (statistics.median, min, max))
        peak, first_s = f"{memory[name]:,.0f}", f"{first_steps[name]:.1f}"
        rows.append((name, median, f"{low}-{high}", f"{cpu_s:.2f}", peak, first_s))
    lines = [table(("side and setting", "tokens/s", "range", "CPU s/step", "peak MiB", "first step s"), rows)]
    if peers := [name for name in fastest if not name.startswith(OURS)]:
        for name in [name for name in speeds if name.startswith(OURS)]:
            less = f"{memory[name] / memory[peers[0]]:.2f}x peak memory"
            lines.append(f"{name} : {peers[0]} = {ratio(speeds[name], speeds[peers[0]])} tokens/s, {less}")
    pairs = [(name, f"{name} muon") for name in speeds if f"{name} muon" in speeds]
    lines += [f"{name} : {muon} = {ratio(speeds[name], speeds[muon])} tokens/s" for name, muon in pairs]
    return "\n".join(lines)


def our_config(sizes: dict[str, int]) -> Any:
    """Returns the settings of the model of this repository."""
    named = _named(sizes, "dim n_layers n_heads n_kv_heads hidden_dim vocab_size max_seq_len")
    del named["vocab_size"], named["max_seq_len"]
    return import_module("models.qwen3" if "head_dim" in sizes else "models.llama").Config(**named)


def our_model(sizes: dict[str, int]) -> Any:
    """Returns the model of this repository, on the meta device."""
    config = our_config(sizes)
    with torch.device("meta"):
        return import_module(type(config).__module__).build(config, vocab_size=sizes["vocab"], max_seq_len=sizes["seq"])


def pharos(sizes: dict[str, int], setting: str, device: torch.device, cleanup: ExitStack) -> tuple[Step, Any]:
    """Returns the step of train.py, including FSDP2 with one rank, and its model. `cleanup` destroys the process group."""
    from parallelisms.activation_checkpoint import ActivationCheckpointConfig
    from parallelisms.distributed import CommConfig, process_group
    from parallelisms.execution import CompileConfig, ExecutionConfig, Precision
    from parallelisms.float8 import Float8Config
    from parallelisms.mesh import ParallelismConfig, build_mesh, degrees
    from parallelisms.parallelize import parallelize
    from training.config import TrainingConfig
    from training.loss import cross_entropy_sum
    from training.optimizer import LRSchedulerConfig, OptimizerConfig, OptimizerStep, build_optimizer
    from training.progress import Progress

    cleanup.enter_context(process_group(CommConfig()))
    flags, backend = _flags(setting), _backend(setting)
    execution = ExecutionConfig(
        ParallelismConfig(),
        ActivationCheckpointConfig("selective" if "checkpoint" in flags else "none", "op"),
        CompileConfig(enable=bool(backend), backend=backend or "inductor"),
        Float8Config(enable="float8" in flags),
        precision=Precision(*(torch.bfloat16 if flag in flags else torch.float32 for flag in ("weights", "bf16"))),
        loss_chunk_tokens=int(flags.get("chunked", 0)),
    )
    mesh = build_mesh(degrees(execution.parallelism, 1), device.type)
    batch = {"local_batch_size": sizes["batch"], "seq_len": sizes["seq"]}
    with patch("models.llama.normal_", draw_on_device):
        parallel = parallelize(our_model(sizes), mesh, cross_entropy_sum, execution, **batch, device=device, seed=0)
    settings = OptimizerConfig("Muon" if "muon" in flags else "AdamW", lr=3e-4)
    optimizer = build_optimizer(settings, parallel.parts, compute=execution.precision.compute)
    parameters = list(parallel.parts[0].parameters())
    schedule = LRSchedulerConfig(warmup_steps=0, decay_ratio=0.0)
    optimizer_step = OptimizerStep(optimizer, parameters, settings, schedule, TrainingConfig(), Progress())

    length = int(flags.get("documents", sizes["seq"]))
    starts = (torch.arange(sizes["seq"], device=device) // length * length).expand(sizes["batch"], -1)
    more = [starts] if "documents" in flags else []

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss_sum = parallel.forward_backward(inputs, labels, *more)
        optimizer_step.step(0, labels.numel())
        return loss_sum / labels.numel()

    return step, parallel.parts[0]


def _flags(setting: str) -> dict[str, str]:
    """Returns flag -> value, or "" for a flag without one."""
    return dict(flag.partition("=")[::2] for flag in setting.split())


def _backend(setting: str) -> str:
    """Returns the backend of torch.compile, or "" if the setting does not compile."""
    flags = _flags(setting)
    return flags["compile"] or "inductor" if "compile" in flags else ""


def draw_on_device(parameter: Tensor, name: str, seed: int, *, std: float, truncation: float = 0.0) -> None:
    """Replaces models.llama.normal_, which draws on the CPU for the same bits in every layout, and takes a minute for 8B."""
    torch.nn.init.normal_(parameter, std=std)


def torchtitan(sizes: dict[str, int], setting: str, device: torch.device, _: ExitStack) -> tuple[Step, Any]:
    """Returns a step of torchtitan 0.2's llama3 or qwen3, and its model; blocks and loss are compiled, as by its trainer."""
    more: dict[str, Any] = {}
    package, arguments_name, name, hidden = "qwen3", "Qwen3ModelArgs", "Qwen3Model", "hidden_dim"
    if "head_dim" not in sizes:  # multiple_of rounds two thirds of 4 * dim up to the requested width
        package, arguments_name, name, hidden = "llama3", "TransformerModelArgs", "Transformer", "multiple_of"
        more["ffn_dim_multiplier"] = None
    named = _named(sizes, f"dim n_layers n_heads n_kv_heads {hidden} vocab_size max_seq_len")
    arguments = getattr(import_module(f"torchtitan.models.{package}.model.args"), arguments_name)(**named, **more)
    with torch.device(device), torch.no_grad():
        model = getattr(import_module(f"torchtitan.models.{package}.model.model"), name)(arguments)
        model.init_weights()
    width = model.layers["0"].feed_forward.w1.out_features
    assert width == sizes["hidden"], "torchtitan does not support these sizes"
    if "checkpoint" in setting:
        from parallelisms.activation_checkpoint import ActivationCheckpointConfig, apply_activation_checkpoint

        apply_activation_checkpoint(model, ActivationCheckpointConfig("selective", "op"))
    if backend := _backend(setting):
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True, backend=backend))
    return _peer_step(model, model, setting, device, backend), model


def transformers(sizes: dict[str, int], setting: str, device: torch.device, _: ExitStack) -> tuple[Step, Any]:
    """Returns a step of LlamaForCausalLM or Qwen3ForCausalLM with torch's scaled_dot_product_attention, compiled whole, and its model."""
    peer = import_module("transformers")
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size max_position_embeddings"
    family = "Qwen3" if "head_dim" in sizes else "Llama"
    config = getattr(peer, f"{family}Config")(
        **_named(sizes, names), tie_word_embeddings=False, attn_implementation="sdpa"
    )
    with torch.device(device):
        model = getattr(peer, f"{family}ForCausalLM")(config)
    if "checkpoint" in setting:
        model.gradient_checkpointing_enable()
        model.train()
    forward = torch.compile(model, backend=backend) if (backend := _backend(setting)) else model
    return _peer_step(model, lambda inputs: forward(inputs, use_cache=False).logits, setting, device, ""), model


def _named(sizes: dict[str, int], names: str) -> dict[str, int]:
    """Returns the sizes under a peer's names, which are in the order of `ours`, and a width of heads, which has one name everywhere."""
    ours = ("dim", "layers", "heads", "kv_heads", "hidden", "vocab", "seq")
    own = {"head_dim": sizes["head_dim"]} if "head_dim" in sizes else {}
    return dict(zip(names.split(), (sizes[size] for size in ours), strict=True)) | own


def move(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Moves a peer's model, and casts its parameters. Its buffers keep their types: the rotations of torchtitan's Llama are complex."""
    model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _peer_step(
    model: torch.nn.Module, logits_of: Callable[[Tensor], Tensor], setting: str, device: torch.device, loss_backend: str
) -> Step:
    """Returns a step of a peer's model. `loss_backend`: of torch.compile; "": the loss is not compiled separately."""
    move(model, device, torch.bfloat16 if "bf16 weights" in setting else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    loss_of = torch.compile(plain_loss, backend=loss_backend) if loss_backend else plain_loss

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled="autocast" in setting):
            loss = loss_of(logits_of(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # torchtitan reads the norm only when it logs
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class StepSide:
    """Runs steps; answers with their seconds, CPU seconds, the peak so far of resident (GPU: allocated) memory, and compiled graphs."""

    def __init__(self, step: Step, sizes: dict[str, int], device: torch.device) -> None:
        self.step, self.sizes, self.device = step, sizes, device

    def run(self, steps: int) -> dict[str, float]:
        shape = (self.sizes["batch"], self.sizes["seq"] + 1)
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            tokens = torch.randint(0, self.sizes["vocab"], shape, device=self.device)
            self.step(tokens[:, :-1], tokens[:, 1:])
        cuda, dynamo = self.device.type == "cuda", sys.modules.get("torch._dynamo.utils")
        if cuda:
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        peak_mib = (torch.cuda.max_memory_allocated() if cuda else memory_bytes("VmHWM")) / 2**20
        if cuda:
            torch.cuda.empty_cache()  # the sides share the device
        graphs = dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "memory_mib": peak_mib, "graphs": graphs}


def serve_side(side: str, setting: str, sizes: dict[str, int], device: str, cpus: Sequence[int]) -> None:
    if cpus:
        os.sched_setaffinity(0, cpus)
    torch.manual_seed(0)
    make: Any = {OURS: pharos, "torchtitan": torchtitan, "transformers": transformers}[side]
    where = torch.device(device)
    with ExitStack() as cleanup:
        member = StepSide(make(sizes, setting, where, cleanup)[0], sizes, where)
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # weights were initialized in fp32
        serve(member, member.run(1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        serve_side(**json.loads(sys.argv[2]))
    else:
        main()
