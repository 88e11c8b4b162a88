"""The built-in byte tokenizer as files that Hugging Face's libraries read, so that an exported run brings its tokenizer like any other.

Flow: hf_export.py -> this, for a run whose model.tokenizer_path is "".
"""

from __future__ import annotations

import json

from training.tokenizer import ByteTokenizer

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"


def files() -> dict[str, str]:
    """File name -> content: byte-level BPE without a merge, which gives the ids that ByteTokenizer gives; a BOS comes in front."""
    special = {BOS: ByteTokenizer.bos_id, EOS: ByteTokenizer.eos_id, PAD: ByteTokenizer.pad_id}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **flags} for token, index in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [special[BOS]], "tokens": [BOS]}},
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {_character(byte): byte for byte in range(256)}, "merges": []},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def _character(byte: int) -> str:
    """What stands for a byte in a byte-level vocabulary (as in GPT-2's): itself where Latin-1 prints it, else from U+0100 on."""
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return chr(0x100 + hidden.index(byte)) if byte in hidden else chr(byte)
