# SPDX-License-Identifier: Apache-2.0
"""Make training data from text: PREFIX.bin and PREFIX.idx, which pretrain_gpt.py and Megatron-LM read.

    python preprocess_data.py --output-prefix data/stdlib --tokenizer-model data/stdlib.model
    python preprocess_data.py --input a.txt b.jsonl --output-prefix data/mine --tokenizer-model mine.model

Without --input the text is what every Python installation has: the sources of the standard library. A
.jsonl file has a document in each line, under the key "text"; any other file is one document. If there is
no tokenizer model yet, a sentencepiece model is trained on the text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Iterator

from gpt.data import load_tokenizer, write_tokens
from gpt.errors import InputError


def standard_library() -> list[Path]:
    """The sources of the standard library, in a fixed order, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    return sorted(path for path in root.rglob("*.py") if not out & set(path.relative_to(root).parts))


def documents(files: list[Path]) -> Iterator[str]:
    """The documents in `files`, one after the other."""
    for path in files:
        try:
            if path.suffix != ".jsonl":
                yield path.read_text(encoding="utf-8", errors="replace")
                continue
            with open(path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    try:
                        text = json.loads(line)["text"]
                        text.encode()  # numbers cannot be, nor can half a surrogate pair
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        raise InputError(
                            f"--input {path}, line {number}: no JSON object with a text"
                        ) from error
                    yield text
        except OSError as error:
            raise InputError(f"--input {path}: {error.strerror}") from error


def up_to(limit: int, texts: Iterator[str]) -> Iterator[str]:
    """The first texts that have `limit` characters together, the last one cut; empty ones left out."""
    for text in texts:
        if limit <= 0:
            return
        if text.strip():
            yield text[:limit]
            limit -= len(text)


def train_tokenizer(path: Path, texts: Iterator[str], vocab_size: int) -> None:
    """Train a tokenizer of Llama's kind: byte pairs, unknown characters as bytes, white space kept."""
    import sentencepiece

    draft = path.with_name(path.name + ".tmp")
    with open(draft, "wb") as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(line for text in texts for line in text.splitlines()),
                model_writer=file,
                vocab_size=vocab_size,
                model_type="bpe",
                byte_fallback=True,
                split_digits=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                minloglevel=2,
            )
        except RuntimeError as error:
            draft.unlink()
            raise InputError(f"--vocab-size {vocab_size}: {error}") from error
    os.replace(draft, path)


def main() -> None:
    """Tokenize as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", nargs="+", type=Path, metavar="FILE", help="default: Python's standard library"
    )
    parser.add_argument("--output-prefix", required=True, type=Path, metavar="PREFIX")
    parser.add_argument("--tokenizer-type", choices=("Llama2Tokenizer",), default="Llama2Tokenizer")
    parser.add_argument("--tokenizer-model", required=True, type=Path, metavar="FILE")
    parser.add_argument("--vocab-size", type=int, default=1024, help="of a tokenizer that is trained")
    parser.add_argument("--max-characters", type=int, default=sys.maxsize, help="of text; default: all")
    args = parser.parse_args()
    try:
        run(args)
    except (InputError, OSError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


def run(args: argparse.Namespace) -> None:
    """Read, train a tokenizer if there is none, write."""
    files = args.input or standard_library()

    def texts() -> Iterator[str]:
        return up_to(args.max_characters, documents(files))

    # Read once to the end before anything is written or sentencepiece, which hides errors, reads.
    if not sum(map(len, texts())):
        raise InputError("there is no text in the input")
    for flag, path in (
        ("--output-prefix", args.output_prefix),
        ("--tokenizer-model", args.tokenizer_model),
    ):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{flag} {path}: {error.filename}: {error.strerror}") from error
    if not args.tokenizer_model.exists():
        train_tokenizer(args.tokenizer_model, texts(), args.vocab_size)
    tokenizer = load_tokenizer(str(args.tokenizer_model))
    end = tokenizer.eos_id()
    ids = ([*tokenizer.encode(text), end] for text in texts())
    count = write_tokens(str(args.output_prefix), ids, tokenizer.vocab_size())
    print(f"{args.output_prefix}.bin: {count} tokens of a vocabulary of {tokenizer.vocab_size()}")


if __name__ == "__main__":
    main()
