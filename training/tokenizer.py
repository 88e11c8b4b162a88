"""Text to token ids and back: the built-in byte tokenizer, or any tokenizer.json by path (`model.tokenizer_path`)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.config import need, os_errors_of

BOS_NAMES = (
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "<|startoftext|>",
    "<\uff5cbegin▁of▁sentence\uff5c>",
    "[BOS]",
    "<|endoftext|>",
)
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "<\uff5cend▁of▁sentence\uff5c>", "[EOS]")


class ByteTokenizer:
    """Vocabulary of 256 bytes, BOS, EOS and PAD: a token is one byte (BOS and EOS: none), so nats per token are almost nats per byte."""

    bos_id, eos_id, pad_id = 256, 257, 258
    vocab_size = 259

    def encode(self, text: str | bytes, bos: bool = False) -> np.ndarray:
        """Returns ids [N] int64, with BOS in front if `bos`."""
        body = text.encode() if isinstance(text, str) else text
        return np.array([self.bos_id] * bos + list(body), dtype=np.int64)

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Returns concatenated ids of documents (UTF-8, not empty), each between BOS and EOS, and their lengths [len(documents)] int64."""
        lengths = np.array([len(document) + 2 for document in documents], dtype=np.int64)
        ends = np.cumsum(lengths)
        ids = np.empty(int(lengths.sum()), dtype=np.uint16)
        body = np.ones(len(ids), dtype=bool)
        body[ends - lengths] = body[ends - 1] = False
        ids[body] = np.frombuffer(b"".join(documents), dtype=np.uint8)
        ids[ends - lengths], ids[ends - 1] = self.bos_id, self.eos_id
        return ids, lengths

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids` without BOS, EOS and PAD; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Returns the number of UTF-8 bytes of each id's text, [vocab_size] int64; 0 for special tokens. For bits per byte."""
        return np.array([1] * 256 + [0] * 3, dtype=np.int64)

    def fingerprint(self) -> str:
        """Returns a string that differs if the same text could give different ids."""
        return "bytes+bos+eos+pad"


class FileTokenizer:
    """A Hugging Face tokenizer.json. Text that looks like a special token is encoded as text, so that no document can contain a forged EOS.
    If `bos_id == eos_id`, as in some files, that token separates documents once."""

    def __init__(self, path: str) -> None:
        self._setting = f'model.tokenizer_path = "{path}"'
        self._file = Path(path).expanduser()
        with os_errors_of(self._setting):
            if self._file.is_dir():
                self._file /= "tokenizer.json"
            is_file = self._file.is_file()
        if not is_file:
            missing = f"{self._setting}: there is no file {self._file}"
            raise ValueError(f'{missing}; give a tokenizer.json or its folder, or "" for bytes')
        need("tokenizers", extra="hf", setting=self._setting)
        from tokenizers import Tokenizer as Backend

        try:
            self._json = self._file.read_bytes()
            self._backend = Backend.from_str(self._json.decode("utf-8"))
        except Exception as error:  # the package raises a bare Exception for unreadable files
            raise ValueError(f"{self._setting}: {self._file} is not a tokenizer.json: {error}") from error
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self._ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(self._ids.values()) + 1
        self.bos_id, self.eos_id = self._find_bos_and_eos()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the copy in a loader's worker process. The package pickles tokenizer.json, which lacks this setting."""
        self.__dict__.update(state)
        self._backend.encode_special_tokens = True

    def encode(self, text: str | bytes, bos: bool = False) -> np.ndarray:
        string = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        body = self._backend.encode(string, add_special_tokens=False).ids
        return np.array([self.bos_id] * bos + body, dtype=np.int64)

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        end = [self.eos_id] if self.eos_id != self.bos_id else []
        texts = [document.decode("utf-8") for document in documents]
        bodies = [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        pieces = [np.array([self.bos_id, *body, *end], dtype=np.uint32) for body in bodies]
        return np.concatenate(pieces), np.array([len(piece) for piece in pieces], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        return str(self._backend.decode(known, skip_special_tokens=True))

    def token(self, index: int) -> str:
        """Returns the name of an id in tokenizer.json."""
        return str(self._backend.id_to_token(index))

    def token_bytes(self) -> np.ndarray:
        added = self._backend.get_added_tokens_decoder()
        parts = [json.loads(self._json).get(part) for part in ("decoder", "pre_tokenizer")]
        byte_level = '"ByteLevel"' in json.dumps(parts)
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._ids.items():
            if index in added:
                sizes[index] = 0 if added[index].special else len(token.encode())
            else:
                sizes[index] = len(token) if byte_level else text_bytes(token)
        sizes[[self.bos_id, self.eos_id]] = 0
        return sizes

    def fingerprint(self) -> str:
        return hashlib.sha256(self._json + f"{self.bos_id},{self.eos_id}".encode()).hexdigest()

    def _find_bos_and_eos(self) -> tuple[int, int]:
        """Returns both ids by tokenizer_config.json beside the file, else by the names in published models; one token may be both."""
        config = self._file.with_name("tokenizer_config.json")
        with os_errors_of(self._setting):
            content = config.read_bytes() if config.is_file() else b"{}"
        try:
            named = json.loads(content)
        except ValueError as error:
            raise ValueError(f"{self._setting}: {config} is not JSON: {error}") from error
        if not isinstance(named, dict):
            raise ValueError(f"{self._setting}: {config} must be a JSON object, {{...}}")
        bos = self._special(named.get("bos_token"), config) or next(filter(self._ids.__contains__, BOS_NAMES), None)
        eos = self._special(named.get("eos_token"), config) or next(filter(self._ids.__contains__, EOS_NAMES), None)
        first, last = bos or eos, eos or bos
        if first is None or last is None:
            raise ValueError(
                f"{self._setting}: {self._file} has neither a BOS nor an EOS token by a known name; "
                'put a tokenizer_config.json beside it with "bos_token" and "eos_token"'
            )
        return self._ids[first], self._ids[last]

    def _special(self, token: Any, config: Path) -> str | None:
        """Returns the string of `token`, which tokenizer_config.json gives as null, a string, or an object with "content"."""
        text = token.get("content") if isinstance(token, dict) else token
        if text and not (isinstance(text, str) and text in self._ids):
            raise ValueError(f'{self._setting}: {config} names "{text}", which is not a token of {self._file}')
        return text or None


Tokenizer = ByteTokenizer | FileTokenizer


def build_tokenizer(path: str) -> Tokenizer:
    """Returns a ByteTokenizer for "", else the tokenizer.json at `path` (file or folder). Raises ValueError, beginning with the setting."""
    return FileTokenizer(path) if path else ByteTokenizer()


def text_bytes(token: str) -> int:
    """Counts the bytes of a token of a vocabulary that is not byte-level: <0xNN> is one byte, U+2581 a space, ## continues a word."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return 1
    return len(token.removeprefix("##").replace("▁", " ").encode())
