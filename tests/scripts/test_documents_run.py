"""Every command in an sh block of the pages is run: here, in a copy of the repository with a smaller main configuration, or in a
different form by the test named in ELSEWHERE. For blocks without a language, whose commands need hours, GPUs or a cluster,
tests/unit/test_documents.py checks the files and settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.tiny_job import ENV, ROOT, copy_repository

pytestmark = pytest.mark.timeout(900)  # a dozen starts in one test, each with an import of torch
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
SMALL = """
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
hidden_dim = 64

[training]
dataset = "files"
dataset_path = "pages/*.txt"
local_batch_size = 2
seq_len = 32
steps = 30

[lr_scheduler]
warmup_steps = 2

[checkpoint]
interval = 250
"""
# The beginning of a command -> the test that runs it in its own way, and a word that finds it there: no more is compared. Those
# that measure for hours on an idle machine are not run by a test; their parts are.
ELSEWHERE = {
    "./scripts/run_tests.sh": ("tests/scripts/test_install.py", "run_tests.sh"),
    "./scripts/run_lighthouse.sh": ("tests/scripts/test_run_lighthouse.py", "run_lighthouse.sh"),
    "(umask 077; head -c 24 /dev/urandom": ("tests/scripts/test_run_lighthouse.py", "token_file"),
    "lm_eval ": ("tests/e2e/test_evaluation.py", "lm_eval"),
    "curl ": ("tests/rpc/test_lighthouse_main.py", "status.json"),
    "tensorboard ": ("tests/unit/test_metrics_sinks.py", "event_accumulator"),
    "export TORCHFT_LIGHTHOUSE": ("tests/scripts/test_bad_groups.py", "TORCHFT_LIGHTHOUSE"),
    "REPLICA_GROUP_ID=0": ("tests/scripts/test_bad_groups.py", "REPLICA_GROUP_ID"),
    "./scripts/run_train.sh configs/tiny_qwen3.toml": ("tests/scripts/test_add_a_model.py", "configs/tiny_qwen3.toml"),
    ".venv/bin/python scripts/hf.py export outputs/tiny_qwen3": ("tests/scripts/test_add_a_model.py", "python) .*$"),
    ".venv/bin/python scripts/hf.py import published base --config configs/tiny": (
        "tests/scripts/test_add_a_model.py",
        "python) .*$",
    ),
    ".venv/bin/python bench/parity.py configs/tiny_qwen3.toml": ("tests/scripts/test_add_a_model.py", "python) .*$"),
    "./scripts/run_train.sh configs/llama.toml --checkpoint.folder s3": (
        "tests/e2e/test_object_store.py",
        "--checkpoint.folder=s3",
    ),
    "./scripts/run_replicas.sh configs/llama.toml --groups 2 --checkpoint.folder s3": (
        "tests/e2e/test_object_store.py",
        "run_replicas.sh",
    ),
    "sbatch ": ("tests/scripts/test_slurm.py", "train.sbatch"),
    "kubectl create": ("tests/scripts/test_kubernetes.py", "pharos-token"),
    "kubectl apply": ("tests/scripts/test_kubernetes.py", "jobset.yaml"),
    "torchx run --scheduler local_cwd contrib/torchx_component.py:lighthouse": (
        "tests/scripts/test_torchx.py",
        "lighthouse",
    ),
    "torchx run --scheduler local_cwd contrib/torchx_component.py:groups": ("tests/scripts/test_torchx.py", "groups"),
    "NPROC=4 python scripts/check_cluster.py": ("tests/scripts/test_check_cluster.py", '"NPROC"'),
    "NNODES=2 NODE_RANK=0 RDZV_ENDPOINT=host:port NPROC=8 python": (
        "tests/scripts/test_check_cluster.py",
        '"NODE_RANK"',
    ),
    "torchrun --nnodes 2": ("tests/scripts/test_check_cluster.py", "torch.distributed.run"),
    "srun python scripts/check_cluster.py": ("tests/scripts/test_slurm.py", "srun"),
    "./scripts/run_train.sh configs/llama3_70b.toml --explain": ("tests/scripts/test_explain.py", '"--explain"'),
    "make drill": ("tests/e2e/test_drill.py", "drill.py"),
    "make e2e": ("tests/e2e/test_drill.py", "PHAROS_E2E"),
    "python bench/drill.py": ("tests/e2e/test_drill.py", "drill.py"),
    "NPROC=4 python bench/drill.py": ("tests/e2e/test_drill.py", "NPROC"),
    "make goodput": ("tests/unit/test_goodput.py", "goodput"),
    "python bench/goodput.py": ("tests/unit/test_goodput.py", "goodput"),
    "make recovery": ("tests/unit/test_recovery.py", "recovery"),
}


def commands(page: str) -> list[str]:
    """Returns the commands of a page without comments; continued lines are joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(command.split()) for line in lines if (command := re.sub(r"\s{2,}#.*", "", line).strip())]


def test_the_commands_of_the_pages_work(tmp_path: Path):
    copy_repository(tmp_path)
    for name in ("llama", "mine"):
        (tmp_path / "configs" / f"{name}.toml").write_text(SMALL)
    (tmp_path / "pages").mkdir()  # several documents: whether one alone is held out hangs on its words
    for page in PAGES:
        shutil.copy2(ROOT / page, tmp_path / "pages" / f"{Path(page).stem}.txt")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # "python" is that of the environment
    env = {**os.environ, **ENV, "PATH": path}
    done = set[str]()
    for page in PAGES:
        for command in commands(page):
            if command in done or command.startswith(tuple(ELSEWHERE)):
                continue
            done.add(command)
            line = command.replace("CONFIG", "configs/mine.toml").replace("steps 2000", "steps 40")
            ran = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
            )
            assert ran.returncode == 0, f"{page}: {command}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    assert any("run_replicas" in command for command in done)


def test_no_page_has_commands_that_are_not_looked_at():
    """Blocks of other languages are covered neither by this module nor by test_documents.py."""
    names = {name for page in PAGES for name in re.findall(r"^```(\w+)", (ROOT / page).read_text(), re.MULTILINE)}
    assert names == {"sh", "python", "toml"}


@pytest.mark.parametrize("command", ELSEWHERE)
def test_what_is_run_elsewhere_is_on_a_page_and_in_that_test(command: str):
    assert any(each.startswith(command) for page in PAGES for each in commands(page)), "no page says it any more"
    test, word = ELSEWHERE[command]
    assert word in (ROOT / test).read_text()
