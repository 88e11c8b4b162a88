"""Bad settings and files: one message, exit 2, no rank, nothing left. Each is given to scripts/launch.py in this process, since a process
costs an import of torch; those that train.py itself checks, and a few of the rest, to ./scripts/run_train.sh as a user would.
"""

# ruff: noqa: E501 (exact messages stay on one line)

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

from scripts import launch

ROOT = Path(__file__).resolve().parents[2]
GOOD = """\
[training]
seq_len = 64
local_batch_size = 2
steps = 5

[lr_scheduler]
warmup_steps = 2
"""
SPY = """\
import os, sys
with open(os.environ["SPY"], "a") as file:
    print(sys.orig_argv, file=file)
"""
WORDS = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 300)}}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<s>"},
}


LONG = "n" * 300  # longer than file systems allow
SAVED: dict[str, str | bytes] = {"outputs/run/config.toml": GOOD, "outputs/run/checkpoint/step-40/manifest.json": "{}"}


@dataclass(frozen=True)
class Case:
    """User input (`files`, `toml`, `argv`, `nproc`) and the expected `message` on standard error after "pharos: "."""

    name: str
    message: str
    argv: tuple[str, ...] = ()
    toml: str | bytes = GOOD
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    config: str = "run.toml"
    nproc: int = 2  # one rank is checked in train.py itself: a few cases show that it says the same
    needs: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def whole(self) -> bool:
        """True if the case runs through the script, in a separate process."""
        return self.nproc == 1 or self.name in ("config missing", "typo", "ranks do not fit the layout")


FILES = ("--training.dataset=files", "--training.dataset_path=corpus/*")
TOKENS = ("--training.dataset=tokens", "--training.dataset_path=ids.bin")
CASES = [
    # the file
    Case("config missing", "rum.toml: no such file; did you mean run.toml?", config="rum.toml"),
    Case("config a folder", ".: a folder, not a TOML file; there are run.toml", config="."),
    Case("config not TOML", "run.toml:2: not TOML: Invalid value; strings need quotes: name = llama", toml="[model]\nname = llama\n"),
    Case("config not UTF-8", "run.toml:2: not UTF-8: byte 0xe9; save the file as UTF-8", toml=b"[job]\n# caf\xe9\n"),
    Case("key twice in the file", "run.toml:3: not TOML: Cannot overwrite a value: seed = 2", toml="[training]\nseed = 1\nseed = 2\n"),
    # the command line
    Case("override without a value", "--training.steps: no value, as in --training.steps=10000; it takes an integer >= 1", ("--training.steps",)),
    Case("override twice", "--training.steps: given twice, 5 and 6; keep one", ("--training.steps=5", "--training.steps", "6")),
    Case("two config files", "other.toml: not an override; wanted CONFIG.toml, then overrides: --section.key value", ("other.toml",)),
    Case("override without a section", "--steps: overrides are --section.key; did you mean --training.steps?", ("--steps=3",)),
    # keys
    Case("typo", "run.toml:2: training.sequence_len: no such key; did you mean training.seq_len?", toml="[training]\nsequence_len = 64\n"),
    Case("typo of another section's key", "run.toml:3: training.lerning_rate: no such key; did you mean optimizer.lr?", toml="\n[training]\nlerning_rate = 3e-4\n"),
    Case("wrong section", "--training.lr: no such key here; it is optimizer.lr", ("--training.lr=3e-4",)),
    Case("no such section", "run.toml:1: optimiser: no such section; did you mean [optimizer]?", toml="[optimiser]\nlr = 1e-3\n"),
    # values
    Case("wrong type", 'run.toml:2: training.steps = "100": must be an integer >= 1; did you mean 100?', toml='[training]\nsteps = "100"\n'),
    Case("not a boolean", '--checkpoint.enable = "yes": must be true or false; did you mean true?', ("--checkpoint.enable=yes",)),
    Case("not a choice", '--optimizer.name = "adamw": must be "AdamW", "Adam" or "Muon"; did you mean "AdamW"?', ("--optimizer.name=adamw",)),
    Case("not an optimizer", '--optimizer.name = "Moun": must be "AdamW", "Adam" or "Muon"; did you mean "Muon"?', ("--optimizer.name=Moun",)),
    Case("negative size", "--model.dim = -256: must be an integer >= 1", ("--model.dim", "-256")),
    Case("learning rate not a number", "--optimizer.lr = nan: must be a finite number > 0", ("--optimizer.lr=nan",)),
    Case("keep one checkpoint", "--checkpoint.keep_latest_k = 1: must be an integer >= 0 and != 1 (newest checkpoints to keep; 0: all; 1 would leave none to fall back to)", ("--checkpoint.keep_latest_k=1",)),
    Case(
        "two mistakes",
        "run.toml:2: training.seq_len = 0: must be an integer >= 1\nrun.toml:3: training.step: no such key; did you mean training.steps?",
        toml="[training]\nseq_len = 0\nstep = 3\n",
    ),
    # what sections say of themselves and of each other
    Case("heads do not divide", "--model.n_heads = 7: must divide model.dim = 256 into heads of an even width (rotary positions rotate pairs); nearest: 4 or 8", ("--model.n_heads=7",), nproc=1),
    Case("no checkpoint to go back to", '--training.on_spike = "rewind": checkpoint.enable = false, so there is no checkpoint to go back to; set it to true, or nearest: "skip"', ("--training.on_spike=rewind", "--checkpoint.enable=false")),
    Case("no checkpoint of this run to go back to", '--training.on_spike = "rewind": checkpoint.load_only = true, so there is no checkpoint to go back to; set it to false, or nearest: "skip"', ("--training.on_spike=rewind", "--checkpoint.load_only")),
    Case("a stream that cannot go on behind its data", '--training.on_spike = "rewind": training.dataset = "huggingface" is a stream, which cannot pass over the data since a checkpoint; prepare it with scripts/prepare_data.py, or nearest: "skip"', ("--training.on_spike=rewind", "--training.dataset=huggingface", "--training.dataset_path=a/b")),
    Case("documents of no store", '--training.skip[0].source = "c4": no store has that name; it needs training.dataset = "store"', ("--training.skip=[{source='c4', first=1, end=2}]",), nproc=1),
    Case("documents of another store", '--training.skip[0].source = "bouks": no store has that name; legal: web, books; nearest: books', ("--training.skip=[{source='bouks', first=1, end=2}]", "--training.dataset=store", "--training.sources=[{path='web'}, {path='books'}]"), nproc=1),
    Case("more steps than a branch has", "--training.steps = 1073741824: must be below 2^30; nearest: 1073741823", ("--training.steps=1073741824",)),
    Case("no such model", '--model.name = "lama": there is no models/lama.py; there are: llama, moe, qwen3', ("--model.name=lama",)),
    Case("run name with a slash", '--job.name = "a/b": must be the name of one folder, which is created in job.dump_folder', ("--job.name=a/b",)),
    Case("run folder a URL", '--job.dump_folder = "s3://bucket/runs": a URL; must be a folder of a mounted file system, local or shared: of a run, only checkpoint.folder may be an object store; nearest: "./outputs"', ("--job.dump_folder=s3://bucket/runs",)),
    Case(
        "other ranks make another step",
        "--training.global_batch_size: saved 8 sequences of a step, now -1, which is 4: training.local_batch_size = 2 on 2 data-parallel ranks; nearest: --training.global_batch_size=8 keeps the batch size on these ranks\n"
        "to continue this run with the new training.global_batch_size from the next step on: --resume.allow=training.global_batch_size\n"
        "outputs/run has a run with the saved settings: restore them, or start a new run with --job.name NAME",
        ("--training.global_batch_size=-1",),
        files={"outputs/run/config.toml": GOOD.replace("steps = 5", "steps = 5\nglobal_batch_size = 8")},
    ),
    Case("warm-up longer than the run", "run.toml:7: lr_scheduler.warmup_steps = 2: must not exceed training.steps = 1; nearest: 1", ("--training.steps=1",)),
    Case(
        "batch that ranks cannot share",
        "--training.global_batch_size = 6: must be a multiple of 4: training.local_batch_size = 2 on 2 data-parallel ranks; nearest: 4 or 8",
        ("--training.global_batch_size=6",),
    ),
    Case(
        "ranks do not fit the layout",
        "--parallelism.data_parallel_shard_degree = 4: the degrees must multiply to the number of ranks, 2; nearest: 2, or -1 for all that are left; or start 4 ranks (NPROC=4)",
        ("--parallelism.data_parallel_shard_degree=4",),
    ),
    Case(
        "degree that ranks do not fit",
        "--parallelism.data_parallel_replicate_degree = 3: the degrees multiply to 3, which must divide the number of ranks, 2; nearest: 2; or start a multiple of 3 ranks (NPROC=3)",
        ("--parallelism.data_parallel_replicate_degree=3",),
    ),
    Case(
        "sequence that ranks cannot share",
        "--training.seq_len = 63: the ranks of parallelism.context_parallel_degree = 2 share it, in a piece from its head and one from its tail: must be a multiple of 4; nearest: 60 or 64",
        ("--training.seq_len=63", "--parallelism.context_parallel_degree=2"),
    ),
    Case("heads that ranks cannot share", "--parallelism.tensor_parallel_degree = 2: must divide model.n_kv_heads = 1; nearest: 1", ("--parallelism.tensor_parallel_degree=2", "--model.n_kv_heads=1")),
    Case("ring without CUDA", '--parallelism.context_parallel_rotate_method = "ring": torch supports it only with CUDA\'s attention kernels, and there is no CUDA device here; nearest: "allgather"', ("--parallelism.context_parallel_rotate_method=ring", "--parallelism.context_parallel_degree=2")),
    Case(
        "NCCL without CUDA",
        '--fault_tolerance.process_group = "nccl": reduces only gradients in GPU memory, and here they are in host memory; legal here: "auto", "gloo", "baby_gloo"; nearest: "gloo"',
        ("--fault_tolerance.enable", "--fault_tolerance.process_group=nccl"),
    ),
    Case("more slots than a tail has", "--fault_tolerance.slots_per_step = 16382: must be an integer >= 0 and <= 8192", ("--fault_tolerance.slots_per_step=16382",)),
    Case("longer than a thread can wait", "--fault_tolerance.collective_s = 10000000000.0: must be a number > 0 and <= 2592000", ("--fault_tolerance.collective_s=1e10",)),
    Case("longer than a lighthouse waits", "--fault_tolerance.stall_s = 1000000000.0: must be a number > 0 and <= 86400", ("--fault_tolerance.stall_s=1e9",)),
    Case("offloading without CUDA", "--training.enable_cpu_offload = true: there is no CUDA device here, so parameters are in host memory already; set it to false", ("--training.enable_cpu_offload",)),
    Case("budget without a compiler", '--activation_checkpoint.mode = "memory_budget": requires compile.enable = true, "model" in compile.components and compile.backend = "inductor"; nearest: "selective"', ("--activation_checkpoint.mode=memory_budget",)),
    Case("blocks that are not counted", '--activation_checkpoint.selective_ac_option = "two": must be "op" or a number >= 1 as a string; nearest: "1"', ("--activation_checkpoint.selective_ac_option=two",)),
    Case("another trainer's name", "run.toml:2: training.enable_loss_parallel: no such key; did you mean parallelism.disable_loss_parallel?", toml="[training]\nenable_loss_parallel = true\n"),
    Case("validation of nothing", "--training.dataset_held_out = 0.0: validation.enable = true needs documents that are held out; nearest: 0.03", ("--validation.enable", "--training.dataset_held_out=0")),
    Case(
        "average of groups that differ",
        '--optimizer.ema_decay = 0.999: between two synchronisations the groups\' weights differ, and so would their averages; nearest: 0.0, or fault_tolerance.semi_sync_method = "none"',
        ("--fault_tolerance.enable", "--fault_tolerance.semi_sync_method=diloco", "--fault_tolerance.sync_steps=5", "--optimizer.ema_decay=0.999"),
    ),
    Case(
        "balance of groups that differ",
        '--model.balance_rate = 0.001: between two synchronisations each group has only the load of its own tokens, and an outer step would move the bias further; nearest: 0.0, or fault_tolerance.semi_sync_method = "none"',
        ("--fault_tolerance.enable", "--fault_tolerance.semi_sync_method=local_sgd", "--fault_tolerance.sync_steps=5", "--model.name=moe", "--model.balance_rate=1e-3"),
    ),
    Case("unknown scheme", '--comm.init_method = "mpi://": unknown scheme; it takes "env://", "file:///path/on/a/shared/disk" or "tcp://host:port" of rank 0; nearest: "env://"', ("--comm.init_method=mpi://",)),
    Case("not a backend", '--comm.backend = "glo": must be "auto", "gloo", "nccl" or "mpi"; did you mean "gloo"?', ("--comm.backend=glo",)),
    # files
    Case("data missing", '--training.dataset_path = "corpus/*": no file matches corpus/*; there is no folder corpus', FILES, nproc=1),
    Case("data empty", '--training.dataset_path = "corpus/*": the corpus is empty: no text in 1 file; name files with text', FILES, files={"corpus/a.txt": ""}),
    Case("data not UTF-8", '--training.dataset_path = "corpus/*": file corpus/a.txt is not UTF-8 at byte 3; convert it, for instance: iconv -f latin1 -t utf-8 corpus/a.txt', FILES, files={"corpus/a.txt": b"caf\xe9\n"}),
    Case("data without the text key", '--training.dataset_path = "corpus/*": file corpus/a.jsonl line 1 has no "text", only \'body\'; nearest: training.dataset_text_key = "body"', FILES, files={"corpus/a.jsonl": '{"body": "x"}\n'}),
    Case("documents without marks", "--training.document_mask = true: neither BOS, 256, nor EOS, 257, marks documents in ids.bin; set it to false, or prepare the text with scripts/prepare_data.py", (*TOKENS, "--training.document_mask"), files={"ids.bin": b"\1\0\2\0" * 200}),
    Case("token ids beyond the vocabulary", '--training.dataset_path = "ids.bin": file ids.bin has id 65535 at token 1, but the vocabulary has 259 ids; set model.tokenizer_path to the tokenizer that made the file, or model.vocab_size to its size', TOKENS, files={"ids.bin": b"\1\0\xff\xff" * 200}),
    Case("tokenizer missing", '--model.tokenizer_path = "nope.json": there is no file nope.json; give a tokenizer.json or its folder, or "" for bytes', ("--model.tokenizer_path=nope.json",)),
    Case("vocabulary too small", "--model.vocab_size = 100: must be at least the tokenizer's 259; nearest: 259, or 0 for the tokenizer's", ("--model.vocab_size=100",)),
    Case(
        "tokenizer larger than the vocabulary",
        "--model.vocab_size = 259: must be at least the tokenizer's 300; nearest: 300, or 0 for the tokenizer's",
        ("--model.vocab_size=259", "--model.tokenizer_path=tokenizer.json"),
        files={"tokenizer.json": json.dumps(TOKENIZER)},
        needs="tokenizers",
    ),
    Case("too little held out", 'run.toml:2: training.seq_len = 64: the validation split has 56 tokens (1 documents and 1883 tokens in all), too few for one sequence; legal: 1 to 55, or add text', (*FILES, "--validation.enable"), files={"corpus/a.txt": "one short document\n" * 99}, nproc=1),
    Case(
        "another run of the same name",
        "run.toml: training.seed: saved 7, now 0\nto continue this run with the new training.seed from the next step on: --resume.allow=training.seed\noutputs/run has a run with the saved settings: restore them, or start a new run with --job.name NAME",
        files={"outputs/run/config.toml": f"{GOOD}\n[training.dataloader]\n".replace("steps = 5", "seed = 7")},
    ),
    Case(
        "saved settings cut off",
        "outputs/run/config.toml:2: not TOML: Expected '=' after a key in a key/value pair: seq_len; an earlier launch of this run wrote it: restore it, or remove it",
        files={"outputs/run/config.toml": "[training]\nseq_len"},
    ),
    Case("a run whose checkpoints are left out", '--checkpoint.enable = false: outputs/run/checkpoint has checkpoints up to step 40, and this launch would begin anew at step 0 and erase the run\'s record; nearest: true, or another --job.name', ("--checkpoint.enable=false",), files=SAVED),
    Case("a run whose checkpoints are elsewhere", '--checkpoint.folder = "other": outputs/run/checkpoint has checkpoints up to step 40, and this launch would begin anew at step 0 and erase the run\'s record; nearest: "checkpoint", or another --job.name', ("--checkpoint.folder=other",), files=SAVED),
    Case("a run's name too long", f'run.toml: job.dump_folder = "./outputs": cannot be read: File name too long (outputs/{LONG})', (f"--job.name={LONG}",), files={"outputs/other/config.toml": GOOD}, nproc=1),
    Case("a folder's name too long, the first run", f'--checkpoint.folder = "{LONG}": cannot be read: File name too long (outputs/run/{LONG})', (f"--checkpoint.folder={LONG}",), nproc=1),
    *(  # from Python 3.14 on pathlib takes a path that cannot be looked up for a missing one
        Case(f"{what} that cannot be looked up", f'--{key} = "{LONG}": cannot be read: File name too long ({file})', (*argv, f"--{key}={LONG}"))
        for what, key, file, argv in (
            ("data", "training.dataset_path", LONG, FILES[:1]),
            ("store", "training.dataset_path", f"{LONG}/manifest.json", ("--training.dataset=store",)),
            ("tokenizer", "model.tokenizer_path", LONG, ()),
            ("weights", "checkpoint.initial_load_path", LONG, ()),
        )
        if sys.version_info < (3, 14)
    ),
    Case("weights missing", '--checkpoint.initial_load_path = "nope": no such folder; there are no checkpoints in it', ("--checkpoint.initial_load_path=nope",)),
    Case("pattern without a parameter", '--optimizer.groups[0].pattern = "*.nrom.*": matches no parameter that the optimizer steps; the names are layers.*.attention.wk.weight, layers.*.attention.wo.weight, layers.*.attention.wq.weight, layers.*.attention.wv.weight, layers.*.attention_norm.weight, layers.*.feed_forward.w1.weight, layers.*.feed_forward.w2.weight, layers.*.feed_forward.w3.weight, layers.*.ffn_norm.weight, norm.weight, output.weight, tok_embeddings.weight', ('--optimizer.groups=[{pattern = "*.nrom.*"}]',)),
]  # fmt: skip


def written(case: Case, folder: Path) -> set[str]:
    """Writes the user's files. Returns the names of all existing files."""
    for name, content in {"run.toml": case.toml, **case.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return names(folder)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("case", [case for case in CASES if not case.whole], ids=str)
def test_one_message_and_nothing_started(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if case.needs:
        pytest.importorskip(case.needs)
    before = written(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NPROC": "2", "CUDA_VISIBLE_DEVICES": ""}
    with patch.dict(os.environ, environ, clear=True):
        code = launch.main([case.config, *case.argv])
    assert capfd.readouterr() == ("", f"pharos: {case.message}\n")
    assert code == 2
    assert names(tmp_path) == before


@pytest.mark.parametrize("case", [case for case in CASES if case.whole], ids=str)
def test_the_script_says_the_same_and_starts_nothing(case: Case, tmp_path: Path) -> None:
    folder, spy = tmp_path / "user", tmp_path / "spy"
    spy.mkdir()
    (spy / "sitecustomize.py").write_text(SPY)
    before = written(case, folder)
    ran = subprocess.run(
        [ROOT / "scripts" / "run_train.sh", case.config, *case.argv],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(spy),
            "PHAROS_NO_INSTALL": "1",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(spy),
            "SPY": str(spy / "processes"),
            "NPROC": str(case.nproc),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # some messages say that there is none
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("", f"pharos: {case.message}\n")
    assert ran.returncode == 2
    processes = (spy / "processes").read_text().splitlines()
    assert not [process for process in processes if "train.py" in process], "a rank was started"
    assert any("launch.py" in process for process in processes), "the spy saw nothing"
    assert names(folder) == before


def test_there_are_enough_and_all_differ() -> None:
    assert len({case.message for case in CASES}) == len({case.name for case in CASES}) == len(CASES) >= 25
