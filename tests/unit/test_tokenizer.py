"""Tokenizers: encoding, decoding, byte counts, and errors for unsuitable files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer, text_bytes

WORDS = ["h", "e", "l", "o", "Ġ", "Ã", "©", "he", "ll", "llo", "hello", "Ġhello", "Ã©"]


def tokenizer_json(*specials: str) -> dict[str, Any]:
    """Returns a byte-level BPE that knows "hello", a space and "é", and the requested special tokens."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    added = [
        {
            "id": len(WORDS) + number,
            "content": content,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, content in enumerate(specials)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [["h", "e"], ["l", "l"], ["ll", "o"], ["he", "llo"], ["Ġ", "hello"], ["Ã", "©"]],
        },
    }


def write(folder: Path, *specials: str, config: Any = None) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(*specials)))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_byte_documents_are_what_encode_gives(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    ids, lengths = tokenizer.encode_documents([text.encode() for text in texts])
    expected = [[*tokenizer.encode(text, bos=True), tokenizer.eos_id] for text in texts]
    assert ids.tolist() == np.concatenate(expected).tolist()
    assert lengths.tolist() == [len(one) for one in expected]
    assert tokenizer.decode(ids) == "".join(texts)
    assert int(tokenizer.token_bytes()[ids].sum()) == sum(len(text.encode()) for text in texts)


def test_bytes_that_are_not_utf8_decode_to_the_replacement_character() -> None:
    tokenizer = build_tokenizer("")
    assert tokenizer.decode([tokenizer.bos_id, 0x61, 0xFF, 258, 300, tokenizer.eos_id]) == "a\ufffd"
    assert tokenizer.encode(b"a\xff").tolist() == [0x61, 0xFF]
    assert (tokenizer.vocab_size, len(tokenizer.token_bytes())) == (259, 259)


def test_missing_file_is_told_before_a_missing_package(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^model.tokenizer_path = .*: there is no file {tmp_path}/none.json; give a "):
        build_tokenizer(f"{tmp_path}/none.json")


@pytest.mark.parametrize(
    ("token", "size"), [("<0x0A>", 1), ("\u2581the", 4), ("\u2581", 1), ("##ing", 3), ("\u00e9", 2), ("<0x>", 4)]
)
def test_bytes_of_a_token_that_is_not_byte_level(token: str, size: int) -> None:
    assert text_bytes(token) == size


class TestTokenizerJson:
    @pytest.fixture(autouse=True)
    def _package(self) -> None:
        pytest.importorskip("tokenizers")

    def test_encodes_decodes_and_counts_bytes(self, tmp_path: Path) -> None:
        tokenizer = build_tokenizer(str(write(tmp_path, "<s>", "</s>", "<pad>")))
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (13, 14, 16)
        ids = tokenizer.encode("hello hello\u00e9", bos=True)
        assert ids.tolist() == [13, 10, 11, 12]
        assert tokenizer.decode(ids) == "hello hello\u00e9"
        assert tokenizer.token_bytes()[ids].tolist() == [0, 5, 6, 2]
        assert tokenizer.token_bytes()[14:].tolist() == [0, 0]

    def test_documents_are_wrapped(self, tmp_path: Path) -> None:
        tokenizer = build_tokenizer(str(write(tmp_path, "<s>", "</s>")))
        ids, lengths = tokenizer.encode_documents([b"hello", b"ll"])
        assert (ids.tolist(), lengths.tolist()) == ([13, 10, 14, 13, 8, 14], [3, 3])

    def test_one_token_that_is_both_stands_once(self, tmp_path: Path) -> None:
        tokenizer = build_tokenizer(str(write(tmp_path, "<|endoftext|>")))
        assert tokenizer.bos_id == tokenizer.eos_id == 13
        assert tokenizer.encode_documents([b"hello"])[0].tolist() == [13, 10]

    def test_a_document_cannot_forge_a_special_token(self, tmp_path: Path) -> None:
        tokenizer = build_tokenizer(str(write(tmp_path, "hell", "</s>")))
        for each in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):  # a stream's workers have copies
            assert 13 not in each.encode("hello").tolist()

    def test_config_beside_it_comes_first(self, tmp_path: Path) -> None:
        write(tmp_path, "<s>", "</s>", "<a>", config={"bos_token": {"content": "<a>"}, "eos_token": None})
        tokenizer = build_tokenizer(str(tmp_path))
        assert (tokenizer.bos_id, tokenizer.eos_id) == (15, 14)

    def test_without_a_config_the_names_of_published_models_are_found(self, tmp_path: Path) -> None:
        for names in (
            ("<|begin_of_text|>", "<|end_of_text|>"),
            ("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
        ):
            tokenizer = build_tokenizer(str(write(tmp_path, *names)))
            assert (tokenizer.bos_id, tokenizer.eos_id) == (13, 14)

    def test_fingerprint_tells_tokenizers_apart(self, tmp_path: Path) -> None:
        def of(path: Path) -> Tokenizer:
            return build_tokenizer(str(path))

        first = of(write(tmp_path, "<s>", "</s>")).fingerprint()
        assert first == of(tmp_path).fingerprint()
        assert first != of(write(tmp_path, "<s>", "</s>", config={"bos_token": "</s>"})).fingerprint()
        assert first != of(write(tmp_path, "<s>", "</s>", "<x>", config={})).fingerprint()

    @pytest.mark.parametrize(
        ("specials", "config", "message"),
        [
            ([], None, "has neither a BOS nor an EOS token by a known name; put a tokenizer_config.json beside it"),
            (["<s>"], {"bos_token": "<b>"}, 'tokenizer_config.json names "<b>", which is not a token of'),
            (["<s>"], {"bos_token": ["<s>"]}, "tokenizer_config.json names .*, which is not a token of"),
            (["<s>"], ["<s>"], "tokenizer_config.json must be a JSON object"),
        ],
    )
    def test_no_bos_or_eos(self, tmp_path: Path, specials: list[str], config: Any, message: str) -> None:
        path = write(tmp_path, *specials, config=config)
        with pytest.raises(ValueError, match=f"^model.tokenizer_path = .*{message}"):
            build_tokenizer(str(path))

    def test_not_a_tokenizer(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        path.write_text("[]")
        with pytest.raises(ValueError, match=r"^model.tokenizer_path = .*tokenizer.json is not a tokenizer.json: "):
            build_tokenizer(str(path))
