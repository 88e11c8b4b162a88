"""A run is exported while it trains, and lm-evaluation-harness evaluates the export: docs/evaluation.md."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from scripts import hf
from tests.rpc.peer import install
from tests.scripts.conftest import transformers  # noqa: F401 (a fixture)
from tests.scripts.tiny_job import CONFIG, ENV, ROOT, WAIT_S, Started, finished, write_job
from tests.system_packages import Unavailable

pytestmark = pytest.mark.timeout(2 * WAIT_S)
# What lm_eval's extra hf needs besides requirements-dev.lock
PINS = (
    "accelerate==1.15.0",
    "chardet==6.0.0.post1",
    "cloudpickle==3.1.3",
    "colorama==0.4.6",
    "dataproperty==0.37.0",
    "defusedxml==0.7.1",
    "dominate==2.9.1",
    "evaluate==0.4.6",
    "joblib==1.6.0",
    "lm-eval==0.4.13",
    "logbook==1.10.1",
    "lxml==6.1.3",
    "mbstrdecoder==1.1.5",
    "more-itertools==11.2.1",
    "msgfy==0.2.1",
    "narwhals==2.29.0",
    "nltk==3.10.4",
    "pathvalidate==3.3.1",
    "peft==0.21.2",
    "portalocker==4.4.2",
    "psutil==7.2.2",
    "pytablewriter==0.38.0",
    "pytz==2026.6",
    "rouge-score==0.1.2",
    "sacrebleu==2.6.0",
    "scikit-learn==1.9.1",
    "scipy==1.17.1",
    "six==1.17.0",
    "sqlitedict==2.1.0",
    "tabledata==0.0.26",
    "tabulate==0.10.0",
    "threadpoolctl==3.8.0",
    "typepy==0.3.1",
    "word2number==1.1",
)
DOCUMENTS = [json.loads(line)["text"] for line in (ROOT / "examples/lm_eval/programs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the newest checkpoint of a run with a BPE tokenizer, made while the run trains."""
    folder = tmp_path_factory.mktemp("run")
    write_job(folder, CONFIG.replace("seq_len = 32", "seq_len = 128").replace("interval = 10", "interval = 100"))
    (folder / "text" / "b.txt").write_text("\n\n".join(DOCUMENTS) * 20)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(DOCUMENTS, trainer)
    (folder / "bpe").mkdir()
    backend.save(str(folder / "bpe" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "bpe" / "tokenizer_config.json").write_text(json.dumps(config))
    command = [f"{ROOT}/scripts/run_train.sh", "tiny.toml", "--model.tokenizer_path=bpe", "--training.steps=100000"]
    with closing(Started(command, folder / "out.txt", cwd=folder, **ENV)) as run:
        run.until("a second checkpoint", lambda text: len(re.findall("checkpoint: step .* saved", text)) > 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)  # tokenizer_path is relative
            assert hf.main(["export", "outputs/tiny", "export"]) == 0
        assert run.process.poll() is None, "the run has gone on"
    return folder / "export"


def test_an_export_of_a_run_that_goes_on_is_whole(exported: Path, transformers):  # noqa: F811
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in DOCUMENTS] == DOCUMENTS


@torch.no_grad()
@pytest.mark.long
def test_the_harness_gives_the_bits_per_byte_of_the_model(exported: Path, tmp_path: Path, transformers):  # noqa: F811
    try:
        packages = install(ROOT / ".venv-lm-eval", PINS, built=("rouge-score", "sqlitedict", "word2number"))
    except Unavailable as error:
        pytest.skip(f"no lm_eval: {error}")
    [command] = re.findall(r"^lm_eval (--model hf .*)$", (ROOT / "docs" / "evaluation.md").read_text(), re.MULTILINE)
    words = command.replace("published/newest", str(exported)).split()
    env = {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    lm_eval = [sys.executable, "-m", "lm_eval", *words, "--output_path", tmp_path / "results"]
    finished(lm_eval, cwd=ROOT, **env)
    [results] = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["programs"]["bits_per_byte,none"]

    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    nats, size_bytes = 0.0, 0
    for text in DOCUMENTS:
        ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids])
        assert len(ids) <= 128
        log_probabilities = model(ids[None, :-1]).logits[0].log_softmax(-1)
        nats -= log_probabilities.gather(1, ids[1:, None]).sum().item()
        size_bytes += len(text.encode())
    assert found == pytest.approx(nats / size_bytes / math.log(2), rel=1e-4)
