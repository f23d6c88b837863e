# SPDX-License-Identifier: Apache-2.0
"""Token files in Megatron-LM's format, and the samples cut from them.

PREFIX.bin holds the token ids of all documents, back to back. PREFIX.idx says where each begins:

    9 bytes          MMIDIDX and two zero bytes
    uint64           version, 1
    uint8            code of the ids' type (see DTYPES)
    uint64, uint64   number of sequences; number of document boundaries
    int32 ...        length of each sequence, in tokens
    int64 ...        where each sequence begins in PREFIX.bin, in bytes
    int64 ...        the first sequence of each document, and the number of sequences

All little-endian. A sequence is a document here; Megatron-LM can cut documents into several.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Iterable

import numpy as np
import torch

from gpt.errors import InputError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")  # version, type code, sequences, document boundaries
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class Tokens:
    """The token ids of PREFIX.bin, memory-mapped.

    Attributes:
        ids: all token ids, one dimension.
        boundaries: where each document begins in `ids`, and the end of the last.
    """

    def __init__(self, prefix: str) -> None:
        """Open PREFIX.bin and PREFIX.idx.

        Raises:
            InputError: one of them is missing, damaged, or not of the other's length.
        """
        self.bin, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        for path in (self.bin, index):
            if not path.is_file():
                raise InputError(f"--data-path {prefix}: there is no file {path}")
        dtype, lengths, pointers, documents = read_index(index)
        ends = np.cumsum(lengths, dtype=np.int64)
        if not np.array_equal(pointers, (ends - lengths) * dtype.itemsize):
            raise InputError(f"{index}: its sequences do not lie back to back in {self.bin}")
        expected, actual = int(ends[-1]) * dtype.itemsize, self.bin.stat().st_size
        if actual != expected:
            raise InputError(f"{self.bin} has {actual} bytes, but {index} describes {expected}")
        self.ids = np.memmap(self.bin, dtype=dtype, mode="r")
        self.boundaries = np.concatenate([[0], ends])[documents]

    def portions(self, weights: tuple[float, ...]) -> list[tuple[int, int]]:
        """Share the documents out by `weights`; returns where each portion begins and ends in `ids`."""
        shares = np.cumsum([0, *weights]) / sum(weights)
        cuts = self.boundaries[np.round(shares * (len(self.boundaries) - 1)).astype(int)]
        return list(zip(cuts[:-1].tolist(), cuts[1:].tolist()))


def read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Read an .idx file: the ids' type, and the lengths, byte pointers and document boundaries."""
    content = path.read_bytes()
    start = len(MAGIC) + HEADER.size
    if content[: len(MAGIC)] != MAGIC or len(content) < start:
        raise InputError(
            f"{path} is not an index of token files: it does not begin with MMIDIDX and a header"
        )
    version, code, sequences, documents = HEADER.unpack_from(content, len(MAGIC))
    if version != 1 or code not in DTYPES:
        raise InputError(
            f"{path} has version {version} and type code {code}; known are version 1 and codes 1 to 8"
        )
    expected = start + 12 * sequences + 8 * documents
    if len(content) != expected or not sequences:
        raise InputError(
            f"{path} has {len(content)} bytes, but its header describes {sequences} sequences, {expected}"
        )
    lengths = np.frombuffer(content, "<i4", sequences, start)
    pointers = np.frombuffer(content, "<i8", sequences, start + 4 * sequences)
    boundaries = np.frombuffer(content, "<i8", documents, start + 12 * sequences)
    if documents < 2 or boundaries.min() < 0 or boundaries.max() > sequences:
        raise InputError(f"{path}: its documents do not lie within its {sequences} sequences")
    return np.dtype(DTYPES[code]), lengths, pointers, boundaries


def write_tokens(prefix: str, documents: Iterable[list[int]], vocab_size: int) -> int:
    """Write PREFIX.bin and PREFIX.idx; returns the number of tokens.

    Both get their names when they are complete, so what is interrupted leaves none of them.
    """
    code = 8 if vocab_size <= 1 << 16 else 4
    dtype = np.dtype(DTYPES[code])
    lengths = []
    drafts = [Path(f"{prefix}.bin.tmp"), Path(f"{prefix}.idx.tmp")]
    try:
        with open(drafts[0], "wb") as file:
            for ids in documents:
                file.write(np.asarray(ids, dtype).tobytes())
                lengths.append(len(ids))
        ends = np.cumsum(lengths, dtype=np.int64)
        with open(drafts[1], "wb") as file:
            file.write(MAGIC + HEADER.pack(1, code, len(lengths), len(lengths) + 1))
            file.write(np.asarray(lengths, "<i4").tobytes())
            file.write(((ends - lengths) * dtype.itemsize).astype("<i8").tobytes())
            file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        for draft in drafts:
            os.replace(draft, draft.with_suffix(""))
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return int(ends[-1])


class Samples:
    """Training samples: windows of `seq_length` tokens, in a new random order each epoch.

    The order is a function of the seed alone, so a resumed run goes on with the sample that was next,
    and every layout of ranks reads the same samples.
    """

    def __init__(
        self,
        tokens: Tokens,
        portion: tuple[int, int],
        seq_length: int,
        vocab_size: int,
        seed: int,
        use: str = "training",
    ) -> None:
        """Cut the ids of `portion` into windows that overlap in one token: the last label, the next input.

        Raises:
            InputError: there is not even one window; the message says for which `use`.
        """
        self.tokens, self.start, self.seq_length = tokens, portion[0], seq_length
        self.vocab_size, self.seed = vocab_size, seed
        self.windows = (portion[1] - portion[0] - 1) // seq_length
        if self.windows < 1:
            count = portion[1] - portion[0]
            raise InputError(
                f"{tokens.bin}: --split leaves {count} tokens for {use}, "
                f"too few for --seq-length {seq_length}"
            )
        self.epoch, self.order = -1, np.empty(0, int)

    def __getitem__(self, number: int) -> np.ndarray:
        """Sample `number`, counted over all epochs: seq_length + 1 ids."""
        epoch, position = divmod(number, self.windows)
        if epoch != self.epoch:
            self.epoch, self.order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(self.windows),
            )
        start = self.start + int(self.order[position]) * self.seq_length
        ids = self.tokens.ids[start : start + self.seq_length + 1].astype(np.int64)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise InputError(
                f"{self.tokens.bin} has the id {ids.max()}; --tokenizer-model has {self.vocab_size} ids"
            )
        return ids

    def batch(self, first: int, micro_batches: int, size: int, replica: int, replicas: int) -> torch.Tensor:
        """The samples of one replica in the iteration that begins with sample `first`.

        Returns:
            ids of shape (micro_batches * size, seq_length + 1), micro-batch after micro-batch.
        """
        numbers = first + np.arange(micro_batches * replicas * size).reshape(micro_batches, replicas, size)
        return torch.from_numpy(np.stack([self[int(number)] for number in numbers[:, replica].ravel()]))


def load_tokenizer(path: str):
    """Open a sentencepiece model.

    Raises:
        InputError: there is no such file, or it is something else.
    """
    from sentencepiece import SentencePieceProcessor

    if not os.path.isfile(path):
        raise InputError(f"--tokenizer-model {path}: there is no such file")
    try:
        return SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        raise InputError(f"--tokenizer-model {path} is not a sentencepiece model") from error


def padded(vocab_size: int, multiple: int) -> int:
    """The size of the embedding table: `vocab_size` rounded up, since GPUs like round numbers."""
    return -(-vocab_size // multiple) * multiple
