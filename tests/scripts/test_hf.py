"""scripts/hf.py: published weights and ours have equal bits and logits; a run starts from them, and is exported as it ended."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.load import load
from models import llama, moe, moe_hf
from scripts import make_seed_checkpoint
from scripts.generate import load_model
from tests.scripts.hf_world import KINDS, V, our_logits, run, same, saved, tensors, their_logits, tokenizers_of
from tests.scripts.tiny_job import ROOT, python
from tests.unit import test_tokenizer as tokenizers
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_files import read_manifest, verify
from training.tokenizer import ByteTokenizer, FileTokenizer

# transformers is imported, and a test starts a process with an import of torch
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("in_the_folder")]


@pytest.mark.parametrize("kind", KINDS)
def test_published_weights_come_back_as_the_same_bits_and_give_the_same_logits(
    kind: str, published: Path, transformers: Any, capsys: pytest.CaptureFixture[str]
):
    source = published / kind
    assert (source / "model.safetensors.index.json").exists() == ("sharded" in kind)
    assert run("import", source, "ours") == 0
    said = capsys.readouterr().out
    assert "[model]\nname" in said and f"enable_weight_tying = {str('tied' in kind).lower()}" in said
    assert sorted(path.name for path in Path("ours").iterdir()) == ["checkpoint", "config.toml", "tokenizer"]
    verify(Path("ours/checkpoint/step-0"), read_manifest(Path("ours/checkpoint/step-0")))
    theirs = their_logits(transformers, source)
    assert theirs.abs().max() > 1
    assert (our_logits(Path("ours")) - theirs).abs().max() <= 1e-5

    shard_gb = "0.0001" if "sharded" in kind else "5"
    assert run("export", "ours", "back", "--shard-gb", shard_gb, "--max-positions", 128) == 0
    assert same(tensors(Path("back")), tensors(source))
    assert (len(list(Path("back").glob("*.safetensors"))) > 2) == ("sharded" in kind)
    assert torch.equal(their_logits(transformers, Path("back")), theirs)
    before, after = (transformers.AutoConfig.from_pretrained(path).to_dict() for path in (source, Path("back")))
    assert {key for key in before if before[key] != after[key]} <= {"transformers_version", "_name_or_path"}


@torch.no_grad()
def test_far_from_the_start_their_rounding_of_angles_is_all_that_differs(published: Path, transformers: Any):
    """transformers computes position * frequency in fp32, this model in fp64. With the fp32 angles the logits match again."""
    assert run("import", published / "sharded", "ours") == 0
    length = 1024
    ids = torch.randint(0, V, (1, length), generator=torch.Generator().manual_seed(7))
    reference = transformers.AutoModelForCausalLM.from_pretrained(published / "sharded")
    config = load(["ours/config.toml"])
    model = load_model(config, Path("ours/checkpoint/step-0"), ByteTokenizer(), length=length, dtype="float32")
    assert (model(ids) - reference(ids).logits).abs().max() <= 2e-4
    angles = torch.outer(torch.arange(length).float(), reference.model.rotary_emb.inv_freq)
    assert isinstance(model, llama.Llama)
    model.freqs_cis.copy_(torch.stack((angles.cos(), angles.sin()), dim=-1))
    assert (model(ids) - reference(ids).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_of_ours_comes_back_as_the_same_bits_and_gives_the_same_logits(name: str, tied: bool, transformers: Any):
    model = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "vocab_size": V}
    model |= {"name": name, "enable_weight_tying": str(tied).lower()}
    stretched = {"rope_scaling": 4, "rope_original_seq_len": 24}
    settings = [f"--model.{name}={value}" for name, value in {**model, **stretched}.items()]
    arguments = ["tiny.toml", *settings, "--training.seq_len=64"]
    assert make_seed_checkpoint.main(arguments) == 0
    ours = Path("outputs/tiny")
    assert run("export", ours, "theirs", "--shard-gb", "0.00001") == 0
    index = json.loads(Path("theirs/model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) == (not tied)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors(Path("theirs")).values())
    theirs = their_logits(transformers, Path("theirs"))
    assert (our_logits(ours) - theirs).abs().max() <= 1e-5

    assert run("import", "theirs", "back", "--config", ours / "config.toml") == 0
    assert same(saved(Path("back/checkpoint/step-0")), saved(ours / "checkpoint/step-0"))
    before, after = load([str(ours / "config.toml")]), load(["back/config.toml"])
    assert before.training == after.training and {**vars(after.model), "tokenizer_path": ""} == vars(before.model)


def test_the_commands_that_an_import_prints_can_be_pasted(published: Path, capsys: pytest.CaptureFixture[str]):
    assert run("import", published / "grouped", "my run") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if ".sh " in line or "generate.py " in line]
    train, text = map(shlex.split, lines)
    assert train[2:4] == ["./scripts/run_train.sh", "my run/config.toml"]
    assert text[2:5] == ["python", "scripts/generate.py", "my run"]


def test_an_import_says_that_its_name_is_that_of_a_run(published: Path, capsys: pytest.CaptureFixture[str]):
    """The settings of other weights may be equal: the run would go on with those that it has."""
    for has_run in (False, True):
        assert run("import", published / "grouped", "ours") == 0
        warning = "outputs/ours has a run, which the command below continues: add --job.name NAME for a new one"
        assert (warning in capsys.readouterr().out) == has_run
        shutil.rmtree("ours")
        Path("outputs/ours/checkpoint/step-4").mkdir(parents=True, exist_ok=True)


def test_an_import_touches_no_folder_of_the_run_whose_settings_it_takes(published: Path):
    for folder in (str(Path("elsewhere").absolute()), "../elsewhere"):
        Path("base.toml").write_text(
            f'[checkpoint]\nfolder = "{folder}"\nload_step = 3\n'
            'initial_load_path = "other/step-3"\ninitial_load_model_only = false\n'
        )
        assert run("import", published / "grouped", "ours", "--config", "base.toml") == 0
        assert load(["ours/config.toml"]).checkpoint == CheckpointConfig(initial_load_path="ours/checkpoint/step-0")
        verify(Path("ours/checkpoint/step-0"), read_manifest(Path("ours/checkpoint/step-0")))
        config = load(["ours/config.toml", "--validation.enable"])
        assert config.training.dataset_held_out == 0.03, "a share that was not set is that of the new run"
        assert not Path("elsewhere").exists()
        shutil.rmtree("ours")


@pytest.mark.parametrize("layers", [1, 3])
def test_the_auxiliary_loss_is_theirs(layers: int, transformers: Any):
    theirs = transformers.models.qwen3_moe.modeling_qwen3_moe
    body = transformers.Qwen3MoeConfig(num_hidden_layers=layers, num_experts=8, num_experts_per_tok=2).to_dict()
    config = moe_hf.Format().read_config(body).config
    logits = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(7))
    scores = logits.softmax(-1)
    ours = layers * moe.TopKRouter(config).auxiliary_loss(scores, scores.topk(2).indices) / 16
    wanted = body["router_aux_loss_coef"] * theirs.load_balancing_loss_func((logits[0],) * layers, 8, 2)
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_sixteen_bits_stay_sixteen_bits_and_a_dtype_that_is_asked_for_is_made(published: Path, transformers: Any):
    model = transformers.AutoModelForCausalLM.from_pretrained(published / "grouped", dtype=torch.bfloat16)
    model.save_pretrained("half")
    assert run("import", "half", "ours", "--tokenizer", "") == 0
    weights = saved(Path("ours/checkpoint/step-0"))
    assert {value.dtype for name, value in weights.items() if "freqs" not in name} == {torch.bfloat16}
    assert run("export", "ours", "back") == 0
    assert same(tensors(Path("back")), tensors(Path("half")))
    assert transformers.AutoModelForCausalLM.from_pretrained("back").dtype == torch.bfloat16
    assert run("import", published / "grouped", "cast", "--dtype", "bfloat16") == 0
    assert same(saved(Path("cast/checkpoint/step-0")), weights)
    assert run("import", published / "grouped", "whole") == 0
    assert run("export", "whole", "rounded", "--dtype", "bfloat16") == 0
    assert same(tensors(Path("rounded")), tensors(Path("half")))


@pytest.mark.parametrize("kind", ["sharded", "tied_sharded"])
def test_training_begins_with_what_was_imported_and_what_it_came_to_goes_out_with_its_tokenizer(
    kind: str, published: Path, transformers: Any, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(published / kind, "published")
    files = tokenizers_of(Path("published"))
    assert run("import", "published", "base", "--config", "tiny.toml") == 0
    assert "hf.py export RUN ... --max-positions 128" in capsys.readouterr().out
    assert {path.name for path in Path("base/tokenizer").iterdir()} == {*files, "generation_config.json"}
    settings = ("--training.steps=4", "--training.seq_len=16", "--optimizer.lr=1e-5")
    said = python(ROOT / "train.py", "base/config.toml", *settings)
    assert "model loaded from base/checkpoint/step-0" in said and "finished" in said
    assert read_manifest(Path("outputs/base/checkpoint/step-4")).kind == "full"
    begun, ended = (
        saved(Path(path, "checkpoint", step)) for path, step in (("base", "step-0"), ("outputs/base", "step-4"))
    )
    assert all((begun[name] - ended[name]).abs().max() < 1e-3 for name in begun if name != "model.freqs_cis")

    assert run("export", "outputs/base", "theirs") == 0
    assert run("export", "outputs/base/checkpoint/step-4", "again") == 0
    assert same(tensors(Path("theirs")), tensors(Path("again")))
    for name, text in files.items():
        assert Path("theirs", name).read_text() == text
    theirs = their_logits(transformers, Path("theirs"))
    assert (our_logits(Path("outputs/base"), Path("outputs/base/checkpoint/step-4")) - theirs).abs().max() <= 1e-5
    config = json.loads(Path("theirs/config.json").read_text())
    assert config["tie_word_embeddings"] == ("lm_head.weight" not in tensors(Path("theirs"))) == ("tied" in kind)
    assert (config["max_position_embeddings"], config["bos_token_id"], config["eos_token_id"]) == (16, 1, 2)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_tokenizer_json_alone_goes_out_with_the_names_of_bos_and_eos(name: str, transformers: Any):
    """Without them transformers takes a Qwen3's tokenizer for Qwen's own, which divides text in another way."""
    Path("bpe").mkdir()
    path = tokenizers.write(Path("bpe"), "<s>", "</s>")
    model = [f"--model.name={name}", "--model.tokenizer_path=bpe"]
    assert make_seed_checkpoint.main(["tiny.toml", *model]) == 0
    assert run("export", "outputs/tiny", "theirs") == 0
    theirs, ours = transformers.AutoTokenizer.from_pretrained("theirs"), FileTokenizer(str(path))
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (ours.bos_id, ours.eos_id, ours.vocab_size)
    assert theirs("hello hello").input_ids == ours.encode("hello hello").tolist()


def test_the_built_in_bytes_go_out_as_a_tokenizer_that_gives_the_same_ids(transformers: Any):
    assert make_seed_checkpoint.main(["tiny.toml"]) == 0
    assert run("export", "outputs/tiny", "theirs") == 0
    text, bytewise = "héllo  wörld\n\t\x00\x7f\xad €", ByteTokenizer()
    tokenizer = transformers.AutoTokenizer.from_pretrained("theirs")
    ids = tokenizer(text).input_ids
    assert ids == bytewise.encode(text, bos=True).tolist()
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    ours = FileTokenizer("theirs")
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (256, 257, bytewise.vocab_size)
    assert (ours.token_bytes() == bytewise.token_bytes()).all()
    generated = transformers.AutoModelForCausalLM.from_pretrained("theirs").generate(
        torch.tensor([ids]), max_new_tokens=2
    )
    assert generated.shape[1] > len(ids)
