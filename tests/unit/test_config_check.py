"""Rules across sections and over files, before anything is started. Each message names the place and the legal values."""

# ruff: noqa: E501 (exact messages stay on one line)

from __future__ import annotations

import ipaddress
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.check import check, check_offloaded_gradients
from configs.errors import ConfigError, explained
from configs.load import load
from configs.schema import RunConfig
from parallelisms.float8 import Float8Config
from tests.unit.fakes import add_models, set_device_module, set_package

TOML = """\
[training]
seq_len = 64
steps = 20
local_batch_size = 4

[lr_scheduler]
warmup_steps = 2

[metrics]
enable_tensorboard = false
"""

SINCE_2_13 = pytest.mark.skipif(torch.__version__ < (2, 13), reason="replica groups with CPU offload need torch 2.13")


def configured(folder: Path, *argv: str) -> RunConfig:
    (folder / "run.toml").write_text(TOML, encoding="utf-8")
    given = argv if "--job.dump_folder" in argv else ("--job.dump_folder", "outputs", *argv)
    return load(["run.toml", *given])


def complaints(folder: Path, *argv: str, world_size: int = 1, device_type: str | None = None) -> list[str]:
    """Returns the lines of the error that `check` raises, or []; the config file is named run.toml."""
    try:
        check(configured(folder, *argv), world_size=world_size, device_type=device_type)
    except ConfigError as error:
        return str(error).split("\n")
    return []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_good_config_has_no_complaints_and_leaves_nothing(folder: Path) -> None:
    assert complaints(folder) == []
    assert complaints(folder, world_size=8) == []
    assert [file.name for file in folder.iterdir()] == ["run.toml"]


def may_not_write(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Root may write everything."""
    monkeypatch.setattr("configs.check.os.access", lambda path, mode: path != folder)


def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "outputs").mkdir()
    may_not_write(monkeypatch, Path("outputs"))
    assert complaints(folder) == [
        '--job.dump_folder = "outputs": this user may not write outputs; nearest: a folder that it may write'
    ]


def test_a_folder_of_checkpoints_that_is_a_file_or_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
    (folder / "a" / "file").touch()
    file = folder / "a" / "file"
    expected = f'--checkpoint.folder = "{file}": {file} is a file, not a folder'
    assert complaints(folder, f"--checkpoint.folder={file}") == [expected]
    may_not_write(monkeypatch, folder / "b")
    assert complaints(folder, f"--checkpoint.folder={folder}/b/c") == [
        f'--checkpoint.folder = "{folder}/b/c": this user may not write {folder}/b; nearest: a folder that it may write'
    ]
    assert complaints(folder, f"--checkpoint.folder={folder}/b/c", "--checkpoint.enable=false") == []


MODEL = """
from torch import empty, nn
from models import llama

class Config(llama.Config): ...

class Fork(llama.Llama):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        {change}

    {method}

def build(config, *, vocab_size, max_seq_len):
    return Fork(config, vocab_size, max_seq_len)
"""
OTHER_MODELS = {  # a line of __init__ or a method of the class -> what is said of it
    "self.layers = nn.ModuleList(self.layers.values())": "layers is ModuleList, not nn.ModuleDict (models/contract.py)",
    "self.layers = nn.ModuleDict({'block0': self.layers['0']})": 'layers is named block0, not "0", "1", ... (models/contract.py)',
    "self.output = nn.Linear(256, 259)": "output is Linear, not Head (models/contract.py)",
    "self.output = llama.Head(256, 259)": "output has a bias, which the loss leaves out (models/contract.py)",
    "self.embedding = self.tok_embeddings; del self.tok_embeddings": "it has no module tok_embeddings (models/contract.py)",
    "self.dim = None": "it has no dim, the width of the hidden state (models/contract.py)",
    "self.gain = nn.Parameter(empty(()))": "gain has no dim to shard; make it [1] (models/contract.py)",
    "self.own_updates = {'layers.*.bias': None}": "own_updates: no parameter is layers.*.bias (models/contract.py)",
    "self.requires_grad_(False)": "no parameter requires a gradient (models/contract.py)",
    "self.output.weight = self.tok_embeddings.weight": "output.weight is tok_embeddings.weight, which FSDP gathers apart; only modules of a block may share (models/contract.py)",
    "self.layers['1'] = self.layers['0']": "layers.1.attention_norm.weight is layers.0.attention_norm.weight, which FSDP gathers apart; only modules of a block may share (models/contract.py)",
    "each = self.layers['0'].attention; each.wv.weight = each.wk.weight": "",
    "self.tied = True; self.tie_weights()": "",
    "def __new__(cls, *sizes): ...": "build returns NoneType, which does not extend Model (models/contract.py)",
    "def forward(self, x): ...": "its forward takes no labels (models/contract.py)",
    "def forward(self, x, *, labels=None): ...": "",
    "flops_per_token = llama.Model.flops_per_token": "it has no flops_per_token (models/contract.py)",
    "a, b = (1, 2, 3)": "build raised ValueError: too many values to unpack (expected 2) (models/fork.py, line 10)",
    "": "",
}


@pytest.mark.parametrize("change", OTHER_MODELS)
def test_a_model_without_a_part_of_the_contract(folder: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_method = change.startswith(("def ", "flops"))
    text = MODEL.format(change="" if is_method else change, method=change if is_method else "")
    (folder / "models").mkdir()
    (folder / "models" / "fork.py").write_text(text)
    add_models(monkeypatch, folder / "models")
    expected = [f'--model.name = "fork": {OTHER_MODELS[change]}'] if OTHER_MODELS[change] else []
    assert complaints(folder, "--model.name=fork") == expected
    if expected:  # the checks of other settings build the model, too, and may use what it lacks
        pipeline = ["--model.name=fork", "--parallelism.pipeline_parallel_degree=2"]
        assert expected[0] in complaints(folder, *pipeline, world_size=2)
    if "labels=None" in change:  # only context parallelism gives positions
        assert complaints(folder, "--model.name=fork", "--parallelism.context_parallel_degree=2", world_size=2) == [
            '--parallelism.context_parallel_degree = 2: the forward of model.name = "fork" takes no positions (models/contract.py); nearest: 1'
        ]


def test_a_pipeline_divides_no_other_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "models").mkdir()
    (folder / "models" / "fork.py").write_text(MODEL.format(change="self.gain = nn.Parameter(empty(3))", method=""))
    add_models(monkeypatch, folder / "models")
    assert complaints(folder, "--model.name=fork") == []
    assert complaints(folder, "--model.name=fork", "--parallelism.pipeline_parallel_degree=2", world_size=2) == [
        "--parallelism.pipeline_parallel_degree = 2: gain would be in every stage, and trained in one: a pipeline divides layers, tok_embeddings, norm and output (models/contract.py); nearest: 1"
    ]


@pytest.mark.parametrize("global_batch_size", ["-1", "8", "80"])
def test_whole_local_batches(folder: Path, global_batch_size: str) -> None:
    assert complaints(folder, f"--training.global_batch_size={global_batch_size}", world_size=2) == []


BETWEEN_SECTIONS = {  # ranks and overrides -> the one message
    "2 --parallelism.tensor_parallel_degree=2 --training.seq_len=63": "--training.seq_len = 63: the ranks of parallelism.tensor_parallel_degree = 2 share it between blocks: must be a multiple of 2; nearest: 62 or 64",
    "6 --parallelism.tensor_parallel_degree=2": "--parallelism.tensor_parallel_degree = 2: tok_embeddings.weight [259, 256] has neither rows divisible by 2 ranks nor columns divisible by 3 shards; nearest: rows in multiples of 2, or parallelism.data_parallel_replicate_degree = 3 in place of shards",
    "1 --parallelism.enable_async_tensor_parallel": "--parallelism.enable_async_tensor_parallel = true: parallelism.tensor_parallel_degree = 1 leaves nothing to overlap; set it to false",
    "2 --parallelism.tensor_parallel_degree=2 --parallelism.enable_async_tensor_parallel": "--parallelism.enable_async_tensor_parallel = true: it needs compile.enable = true, model in compile.components and compile.backend = inductor; set it to false",
    "1 --training.global_batch_size=2": "--training.global_batch_size = 2: must be a multiple of 4: training.local_batch_size = 4 on 1 data-parallel rank; nearest: 4",
    "1 --lr_scheduler.decay_ratio=0.95": "--lr_scheduler.decay_ratio = 0.95: 19 steps of decay and lr_scheduler.warmup_steps = 2 must not exceed training.steps = 20; nearest: 0.9",
    "1 --lr_scheduler.decay_ratio=1 --lr_scheduler.total_steps=30000 --lr_scheduler.warmup_steps=1": "--lr_scheduler.decay_ratio = 1.0: 30000 steps of decay and lr_scheduler.warmup_steps = 1 must not exceed lr_scheduler.total_steps = 30000; nearest: 0.9999",
    "1 --lr_scheduler.total_steps=10": "--lr_scheduler.total_steps = 10: training.steps = 20 would continue with a learning rate of 0; nearest: 20, or 0, or set lr_scheduler.min_lr_factor",
    "1 --checkpoint.enable=false --checkpoint.load_step=5": "--checkpoint.load_step = 5: needs checkpoint.enable = true; nearest: -1",
    "1 --checkpoint.folder=s4://bucket/x": '--checkpoint.folder = "s4://bucket/x": no such store; legal: a folder, s3://, gs://; nearest: "s3://bucket/x"',
    "1 --profiling.save_traces_folder=s3://bucket/x": '--profiling.save_traces_folder = "s3://bucket/x": a URL; must be a folder of a mounted file system, local or shared: of a run, only checkpoint.folder may be an object store; nearest: "profile_traces"',
    "1 --checkpoint.initial_load_path=file:///mnt/runs/step-9": '--checkpoint.initial_load_path = "file:///mnt/runs/step-9": a URL; must be a folder of a mounted file system, local or shared: of a run, only checkpoint.folder may be an object store; nearest: "/mnt/runs/step-9"',
    "1 --job.dump_folder run.toml": '--job.dump_folder = "run.toml": run.toml is a file, not a folder',
    "4 --parallelism.context_parallel_degree=4 --training.seq_len=62 --parallelism.context_parallel_load_balancer=none": "--training.seq_len = 62: the ranks of parallelism.context_parallel_degree = 4 share it: must be a multiple of 4; nearest: 60 or 64",
    "4 --parallelism.context_parallel_degree=2 --training.seq_len=60 --parallelism.tensor_parallel_degree=2": "--training.seq_len = 60: the ranks of parallelism.context_parallel_degree = 2 and parallelism.tensor_parallel_degree = 2 share it, in a piece from its head and one from its tail: must be a multiple of 8; nearest: 56 or 64",
    "4 --parallelism.context_parallel_degree=4 --training.seq_len=3": "--training.seq_len = 3: the ranks of parallelism.context_parallel_degree = 4 share it, in a piece from its head and one from its tail: must be a multiple of 8; nearest: 8",
    "2 --parallelism.context_parallel_degree=2 --parallelism.context_parallel_rotate_method=ring": '--parallelism.context_parallel_rotate_method = "ring": torch supports it only with CUDA\'s attention kernels, and there is no CUDA device here; nearest: "allgather"',
    "1 --training.enable_cpu_offload": "--training.enable_cpu_offload = true: there is no CUDA device here, so parameters are in host memory already; set it to false",
    "1 --activation_checkpoint.mode=memory_budget --compile.enable --compile.backend=eager": '--activation_checkpoint.mode = "memory_budget": requires compile.enable = true, "model" in compile.components and compile.backend = "inductor"; nearest: "selective"',
    "1 --activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=8": '--activation_checkpoint.selective_ac_option = "8": of the model\'s 6 blocks none would be recomputed; nearest: "6", or activation_checkpoint.mode = "none"',
    "2 --activation_checkpoint.mode=full --parallelism.pipeline_parallel_degree=2 --parallelism.pipeline_parallel_schedule=ZBVZeroBubble": '--activation_checkpoint.mode = "full": ZBVZeroBubble computes the backward in two halves, and for the second a block would be computed again for each of its weights; nearest: "none", or parallelism.pipeline_parallel_schedule = "Interleaved1F1B"',
    '1 --optimizer.groups=[{pattern="*norm*",weight_decay=-0.5}]': "--optimizer.groups[0].weight_decay = -0.5: must be >= 0, or -1 for optimizer.weight_decay; nearest: 0.0",
    '1 --training.dataset=store --training.sources=[{path=""}]': '--training.sources[0].path = "": must be the folder of a token store',
    '1 --training.dataset=store --training.sources=[{path="a",epochs=2,tokens=5}]': "--training.sources[0].tokens = 5: training.sources[0].epochs = 2 is a budget, too; set one of them to 0",
    '1 --training.sources=[{path="a"}]': 'run.toml: training.dataset = "stdlib": training.sources are token stores, in place of training.dataset_path; set training.dataset = "store" and training.dataset_path = ""',
    '1 --training.dataset=store --training.sources=[{path="a/c4"},{path="b/c4"}]': '--training.sources: two have the name "c4"; set their name',
    "1 --training.skip=[{first=8,end=8}]": "--training.skip[0].end = 8: must exceed training.skip[0].first = 8; nearest: 9",
    "1 --training.dataset=huggingface --training.dataset_path=a/b --training.skip=[{first=8,end=9}]": '--training.skip: training.dataset = "huggingface" is a stream, which has no positions; prepare it with scripts/prepare_data.py, or remove training.skip',
    '1 --validation.sources=[{path="a"}]': "--validation.sources: validation.enable = false; set it to true, or remove the sources",
    '1 --validation.enable --validation.sources=[{path=""}]': '--validation.sources[0].path = "": must be the folder of a token store',
    '1 --validation.enable --validation.sources=[{path="/"}]': '--validation.sources[0].name = "": validation.sources[0].path = "/" has no name to take; nearest: "store"',
    "1 --compile.enable --compile.backend=indcutor": '--compile.backend = "indcutor": torch has cudagraphs, inductor, openxla, tvm; nearest: "inductor"',
    "1 --model.name=moe --model.experts_per_token=1": "--model.experts_per_token = 1: with model.normalize_weights = true every weight is 1, and the router has no gradient; nearest: 2, or model.normalize_weights = false",
    "1 --model.name=moe --model.experts_per_token=1 --model.n_experts=1": "--model.experts_per_token = 1: with model.normalize_weights = true every weight is 1, and the router has no gradient; nearest: model.normalize_weights = false",
    "2 --model.name=moe --parallelism.tensor_parallel_degree=2 --model.shared_hidden_dim=33": "--parallelism.tensor_parallel_degree = 2: must divide model.shared_hidden_dim = 33; nearest: 1",
    "2 --model.name=moe --parallelism.tensor_parallel_degree=2 --model.hidden_dim=101 --model.dense_layers=1": "--parallelism.tensor_parallel_degree = 2: must divide model.hidden_dim = 101; nearest: 1",
    "4 --model.name=moe --parallelism.expert_parallel_degree=4 --model.n_experts=6": "--parallelism.expert_parallel_degree = 4: must divide the 6 experts of layers.0.feed_forward.experts; nearest: 2",
    "4 --model.name=moe --parallelism.expert_parallel_degree=2 --model.n_experts=2 --model.expert_hidden_dim=33 --model.experts_per_token=1 --model.normalize_weights=false": "--parallelism.expert_parallel_degree = 2: layers.0.feed_forward.experts.w1 [2, 33, 256] has neither 2 x 2 experts nor rows divisible by 2 shards; nearest: 2, with widths of model and experts in multiples of 2",
    "3 --model.name=moe --model.dim=128 --model.n_experts=8": "run.toml: parallelism.expert_parallel_degree = 1: layers.0.feed_forward.experts.w2 [8, 128, 192] has neither 1 x 3 experts nor rows divisible by 3 shards; nearest: 1, with widths of model and experts in multiples of 3",
    "3 --model.name=moe --model.dim=128 --parallelism.expert_parallel_degree=3": "--parallelism.expert_parallel_degree = 3: must divide the 8 experts of layers.0.feed_forward.experts; nearest: 1, with widths of model and experts in multiples of 3",
    "4 --model.name=moe --parallelism.expert_parallel_degree=3 --model.n_experts=6": "--parallelism.expert_parallel_degree = 3: must divide the 4 ranks of dp_shard x cp x tp; nearest: 2",
    "8 --model.name=moe --parallelism.expert_parallel_degree=2 --model.n_experts=4 --model.expert_hidden_dim=34": "--parallelism.expert_parallel_degree = 2: layers.0.feed_forward.experts.w1 [4, 34, 256] has neither 2 x 4 experts nor rows divisible by 4 shards; nearest: 4",
    "1 --float8.recipe_name=rowwise --float8.enable_fsdp_float8_all_gather": '--float8.enable_fsdp_float8_all_gather = true: float8.recipe_name = "rowwise" is not supported; nearest: false, or float8.recipe_name = "tensorwise"',
    "1 --fault_tolerance.enable --comm.init_method=tcp://localhost:29500": '--comm.init_method = "tcp://localhost:29500": with fault_tolerance.enable = true all groups would use one rendezvous; nearest: "env://", with a rendezvous per group from its launcher',
    "1 --fault_tolerance.enable --training.dataset=huggingface --training.dataset_path=a/b": '--training.dataset = "huggingface": a stream cannot be assigned to replica groups, each sequence once; nearest: "store", made of the same data set by scripts/prepare_data.py, or fault_tolerance.enable = false',
    '1 --training.dataset=store --training.sources=[{path="stores/a"}] --validation.enable --validation.sources=[{path="other/a"}]': '--validation.sources[0].name = "a": a source of training has this name; give another one',
    '1 --training.dataset=store --training.sources=[{path="stores/a"}] --validation.enable --validation.sources=[{path="held_out"}]': '--validation.sources[0].name = "held_out": the documents that training holds out have this name; give another one',
    "1 --float8.precompute_float8_dynamic_scale_for_fsdp": "--float8.precompute_float8_dynamic_scale_for_fsdp = true: needs float8.enable_fsdp_float8_all_gather; set it to false",
}


@pytest.mark.parametrize("case", BETWEEN_SECTIONS)
def test_what_contradicts_itself(folder: Path, case: str) -> None:
    world_size, *argv = case.split()
    found = complaints(folder, *argv, world_size=int(world_size), device_type="cpu")
    assert found == [BETWEEN_SECTIONS[case]]


@pytest.mark.parametrize(
    ("capability", "has"), [((0, 0), "there is none here"), ((8, 0), "its compute capability is 8.0"), ((9, 0), "")]
)
def test_float8_needs_its_hardware(capability: tuple[int, int], has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: capability > (0, 0), get_device_capability=lambda *_: capability)
    set_device_module(monkeypatch, cuda)

    def found(config: Float8Config, is_installed: bool = True) -> str:
        set_package(monkeypatch, "torchao", {} if is_installed else None)
        try:
            config.check()
        except ValueError as error:
            return str(error)
        return ""

    cause = "float8.enable = true: needs a CUDA device of compute capability 8.9 or more,"
    assert found(Float8Config(enable=True)) == (f"{cause} {has}; set it to false" if has else "")
    assert found(Float8Config(enable=True, emulate=True)) == ""
    cause = "float8.enable = true: needs the package torchao, which is not installed: "
    assert found(Float8Config(enable=True, emulate=True), is_installed=False).startswith(cause)


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments that turn float8 on, and what it needs."""
    set_device_module(monkeypatch, SimpleNamespace(is_available=lambda: True, get_device_capability=lambda *_: (9, 0)))
    set_package(monkeypatch, "torchao", {})
    return ["--float8.enable"]


CP = ("--parallelism.context_parallel_degree=2", "--training.seq_len=136")
PIPELINE = ("--parallelism.pipeline_parallel_degree=2", "--training.seq_len=8")


@pytest.mark.parametrize(
    ("ranks", "argv", "tokens", "near"),
    [
        (1, ["--training.local_batch_size=1", "--training.seq_len=1000"], "training.local_batch_size = 1 x 1000", "992 or 1008"),
        (1, ["--training.local_batch_size=6", "--training.seq_len=20"], "training.local_batch_size = 6 x 20", "16 or 24"),
        (2, ["--training.local_batch_size=1", *CP], "training.local_batch_size = 1 x 136 / parallelism.context_parallel_degree = 2", "128 or 160"),
        (2, ["--training.local_batch_size=2", *PIPELINE], "parallelism.pipeline_parallel_microbatch_size = 1 x 8", "16"),
        (1, ["--training.local_batch_size=1", "--training.seq_len=1000", "--float8.emulate"], "", ""),
        (1, ["--training.local_batch_size=1", "--training.seq_len=1000", "--float8.recipe_name=rowwise_with_gw_hp"], "", ""),
        (1, ["--training.local_batch_size=2", "--training.seq_len=1000"], "", ""),
        (1, ["--training.local_batch_size=16", "--training.seq_len=63"], "", ""),
    ],
)  # fmt: skip
def test_float8_needs_a_multiple_of_tokens(
    folder: Path, float8: list[str], ranks: int, argv: list[str], tokens: str, near: str
) -> None:
    found = complaints(folder, *float8, *argv, world_size=ranks, device_type="cuda")
    [given] = [each.replace("=", " = ") for each in argv if "seq_len" in each]
    assert found == [
        f'{given}: with float8.enable = true the tokens of a pass, {tokens}, must be a multiple of 16; nearest: {near}, or float8.recipe_name = "rowwise_with_gw_hp"'
    ] * bool(tokens)


NAMES = ", ".join(f"layers.*.attention.w{x}" for x in "koqv") + "".join(f", layers.*.feed_forward.w{x}" for x in "123")
FILTERS = {  # arguments -> what is said of them
    '--float8.filter_fqns=["attnetion"]': f'--float8.filter_fqns[0] = "attnetion": no name contains it; the names are {NAMES}; nearest: "attention"',
    '--float8.filter_fqns=["output","layers.*.wq"]': f'--float8.filter_fqns[1] = "layers.*.wq": no name contains it; the names are {NAMES}; nearest: "layers"',
    '--float8.filter_fqns=["layers."]': "--float8.filter_fqns: no layer is left to convert; remove some, or nearest: float8.enable = false",
    "--model.dim=200 --model.hidden_dim=100 --model.n_heads=5 --model.n_kv_heads=5": "--float8.enable = true: Llama has no linear layer whose sizes are multiples of 16; set it to false",
    '--float8.filter_fqns=["output","layers.0.","wo"]': "",  # the head, which is not converted, and layers that are
}


@pytest.mark.parametrize("argv", FILTERS)
def test_float8_that_converts_nothing_is_refused(folder: Path, float8: list[str], argv: str) -> None:
    found = complaints(folder, *float8, *argv.split(), device_type="cuda")
    assert found == [FILTERS[argv]] * bool(FILTERS[argv])


def test_what_cuda_has_is_not_refused_on_it(folder: Path) -> None:
    cp = "--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_rotate_method=ring"
    assert complaints(folder, *cp, "--training.enable_cpu_offload", world_size=2, device_type="cuda") == []
    assert complaints(folder, cp[1], device_type="cpu") == []  # without context parallelism nothing reads it


@pytest.mark.parametrize(
    ("device_type", "argv", "width"),
    [
        ("cuda", ["--model.dim=64"], 8),
        ("cuda", ["--model.name=qwen3", "--model.head_dim=14"], 14),
        ("cuda", ["--model.dim=128"], 0),
        ("cpu", ["--model.dim=64"], 0),
    ],
)
def test_documents_need_heads_of_a_width_on_cuda(folder: Path, device_type: str, argv: list[str], width: int) -> None:
    expected = f"--training.document_mask = true: FlexAttention needs heads of at least 16 features on CUDA, and these have {width}; set it to false, or make them wider"
    found = complaints(folder, "--training.document_mask", *argv, device_type=device_type)
    assert found == [expected] * bool(width)
    assert complaints(folder, *argv, device_type=device_type) == []


def test_scales_of_weights_in_host_memory_are_not_reduced_by_nccl(folder: Path) -> None:
    scales = "--float8.enable_fsdp_float8_all_gather", "--float8.precompute_float8_dynamic_scale_for_fsdp"
    assert complaints(folder, *scales, device_type="cuda") == []
    assert complaints(folder, *scales, "--training.enable_cpu_offload", device_type="cuda") == [
        f"{scales[1]} = true: training.enable_cpu_offload = true keeps the weights in host memory, and NCCL cannot all-reduce their scales there; set it to false"
    ]


@pytest.mark.parametrize(
    ("process_group", "device_type", "more", "legal"),
    [
        ("gloo", "cuda", [], False),
        ("baby_gloo", "cuda", [], False),
        ("nccl", "cuda", [], True),
        ("auto", "cuda", [], True),
        # gradients lie in host memory
        pytest.param("gloo", "cuda", ["--training.enable_cpu_offload"], True, marks=SINCE_2_13),
        pytest.param("nccl", "cuda", ["--training.enable_cpu_offload"], False, marks=SINCE_2_13),
        ("gloo", "cpu", [], True),
        ("nccl", "cpu", [], False),
    ],
)
def test_a_process_group_of_another_device_is_refused(
    folder: Path, process_group: str, device_type: str, more: list[str], legal: bool
) -> None:
    given = f"--fault_tolerance.process_group={process_group}"
    assert complaints(folder, given, *more, device_type=device_type) == []  # groups that are alone sum nothing
    found = complaints(folder, "--fault_tolerance.enable", given, *more, device_type=device_type)
    assert len(found) == (not legal) and all(f'process_group = "{process_group}": ' in line for line in found)


def test_replica_groups_need_a_torch_that_waits_for_offloaded_gradients(folder: Path) -> None:
    given = ["--fault_tolerance.enable", "--training.enable_cpu_offload"]
    check_offloaded_gradients(configured(folder, *given), "2.13.0+cu130")
    check_offloaded_gradients(configured(folder), "2.12.1+cu130")
    with pytest.raises(ValueError) as error:
        check_offloaded_gradients(configured(folder, *given), "2.12.1+cu130")
    assert str(error.value) == (
        "training.enable_cpu_offload = true: with replica groups it needs torch 2.13, and this is 2.12.1+cu130: before, their sums begin while gradients are still being copied; set it to false"
    )


def test_the_nearest_offers_are_legal(folder: Path) -> None:
    every_sixth = "--activation_checkpoint.selective_ac_option=6"
    assert complaints(folder, "--activation_checkpoint.mode=selective", every_sixth) == []
    assert complaints(folder, "--lr_scheduler.decay_ratio=0.9") == []
    long = ["--lr_scheduler.total_steps=30000", "--lr_scheduler.warmup_steps=1"]
    assert complaints(folder, *long, "--lr_scheduler.decay_ratio=0.9999") == []
    assert complaints(folder, "--lr_scheduler.total_steps=10", "--lr_scheduler.min_lr_factor=0.1") == []
    assert complaints(folder, "--lr_scheduler.total_steps=10", "--lr_scheduler.decay_ratio=0") == []
    assert complaints(folder, "--model.vocab_size=259") == []


def test_each_section_is_asked_and_all_answers_are_given(folder: Path) -> None:
    assert complaints(folder, "--model.n_kv_heads=3", "--training.dataset=files") == [
        "--model.n_kv_heads = 3: must divide model.n_heads = 8; nearest: 2 or 4",
        'run.toml: training.dataset_path = "": training.dataset = "files" needs a file or a glob',
    ]


def test_what_sections_say_of_each_other_comes_after_what_they_say_of_themselves(folder: Path) -> None:
    found = complaints(folder, "--model.n_kv_heads=3", "--training.global_batch_size=3")
    assert len(found) == 1
    assert found[0].startswith("--model.n_kv_heads")


def test_a_small_corpus_is_split_before_anything_starts(folder: Path) -> None:
    (folder / "a.txt").write_text("a short document\n" * 20, encoding="utf-8")
    files = ["--training.dataset=files", "--training.dataset_path=a.txt"]
    assert complaints(folder, *files) == []
    assert complaints(folder, *files, "--training.seq_len=400")[0].startswith("--training.seq_len = 400: ")
    assert complaints(folder, *files, "--validation.enable")[0].startswith(
        "run.toml:2: training.seq_len = 64: the validation split has 10 tokens"
    )
    assert complaints(folder, *files, "--validation.enable", "--training.seq_len=8") == []
    assert sorted(file.name for file in folder.iterdir()) == ["a.txt", "run.toml"]


SEMI = ("--fault_tolerance.enable", "--fault_tolerance.semi_sync_method=diloco", "--fault_tolerance.sync_steps=8")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--training.steps=20", "--checkpoint.interval=8"], "--training.steps = 20: must be a multiple of 8, the steps between two synchronisations of groups (fault_tolerance.sync_steps / num_fragments); nearest: 16 or 24"),
        (["--fault_tolerance.num_fragments=2", "--checkpoint.interval=10"], "--checkpoint.interval = 10: must be a multiple of 4, the steps between two synchronisations of groups (fault_tolerance.sync_steps / num_fragments); nearest: 8 or 12"),
        (["--training.steps=16", "--checkpoint.interval=8", "--validation.enable", "--validation.freq=4"], "--validation.freq = 4: must be a multiple of 8, the steps between two synchronisations of groups (fault_tolerance.sync_steps / num_fragments); nearest: 8"),
        (["--training.steps=16", "--checkpoint.interval=8", "--checkpoint.enable_first_step_checkpoint"], "--checkpoint.enable_first_step_checkpoint = true: the first synchronisation of groups is after 8 steps (fault_tolerance.sync_steps / num_fragments); set it to false"),
        (["--fault_tolerance.num_fragments=8", "--model.n_layers=2", "--checkpoint.enable=false"], "--fault_tolerance.num_fragments = 8: must be at most 5, the blocks of the model; nearest: 5"),
        (["--fault_tolerance.num_fragments=4", "--parallelism.pipeline_parallel_degree=4", "--model.n_layers=6", "--checkpoint.enable=false"], "--fault_tolerance.num_fragments = 4: must be at most 2, the blocks of rank 0 of the pipeline; nearest: 2"),
        (["--training.steps=16", "--checkpoint.interval=8", "--training.on_spike=skip"], '--training.on_spike = "skip": between two synchronisations each group makes other steps, so no step is a spike in all of them; nearest: "stop", or fault_tolerance.semi_sync_method = "none"'),
        (["--training.steps=16", "--checkpoint.interval=8", "--training.on_spike=rewind"], '--training.on_spike = "rewind": between two synchronisations each group makes other steps, so no step is a spike in all of them; nearest: "stop", or fault_tolerance.semi_sync_method = "none"'),
        (["--training.steps=16", "--checkpoint.interval=8", "--training.spike_window=9"], '--training.spike_window = 9: between two synchronisations each group makes other steps, so no step is a spike in all of them; nearest: 0, or fault_tolerance.semi_sync_method = "none"'),
    ],
)  # fmt: skip
def test_groups_that_step_by_themselves_show_nothing_between(folder: Path, argv: list[str], expected: str) -> None:
    assert complaints(folder, *SEMI, *argv, world_size=4) == [expected]


def test_groups_that_step_by_themselves_fit(folder: Path) -> None:
    fragments = ("--fault_tolerance.num_fragments=2", "--fault_tolerance.fragment_sync_delay=3")
    assert not complaints(folder, *SEMI, *fragments, "--training.steps=20", "--checkpoint.interval=4")


def test_a_configuration_is_checked_without_what_takes_as_long_to_import_as_torch() -> None:
    """The check, including the model's, imports no slow modules: a launcher runs it before any rank starts."""
    program = """
import sys
from configs.check import check
from configs.load import load
for name in ("llama", "moe"):
    check(load([f"configs/{name}.toml"]), world_size=1)
print(*{"sympy", "torch._dynamo", "torch.distributed.tensor"} & sys.modules.keys())
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_mistake_in_code_is_told_with_its_line() -> None:
    """Python raises ValueError for one, as a check does for a bad setting."""

    def check(values: tuple[int, ...]) -> None:
        _, _ = values

    with pytest.raises(ValueError) as mistake:
        check((1,))
    place = f"tests/unit/test_config_check.py, line {check.__code__.co_firstlineno + 1}"
    assert explained(mistake.value) == f"not enough values to unpack (expected 2, got 1) ({place})"
    with pytest.raises(ValueError) as library:
        ipaddress.ip_address("here")
    assert explained(library.value).startswith("'here' does not appear to be an IPv4 or IPv6 address (tests/unit/")
    with pytest.raises(ValueError) as meant:
        raise ConfigError("training.steps = 0: must be >= 1")
    assert explained(meant.value) == "training.steps = 0: must be >= 1"
