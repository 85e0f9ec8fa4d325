"""JSON lines to packed rows with `datasets`, the Hugging Face tokenizer and TRL's `pack_dataset`, in one process.

    python trl_packing.py TOKENIZER_JSON SCRATCH_FOLDER FILE…

Prints the seconds it took, the rows and the tokens, as one line of JSON. Long documents are split, so that no token is
lost; nothing that is not needed is computed.
"""

import json
import sys
import time

import datasets
from transformers import PreTrainedTokenizerFast
from trl import pack_dataset


def main(tokenizer_json: str, scratch: str, *files: str) -> None:
    datasets.disable_progress_bars()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_json, eos_token="<|endoftext|>")
    end = [tokenizer.eos_token_id]

    def tokenized(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(batch["text"], return_attention_mask=False, split_special_tokens=True)
        return {"input_ids": [ids + end for ids in encoded["input_ids"]]}

    started = time.perf_counter()
    documents = datasets.load_dataset("json", data_files=list(files), split="train", cache_dir=scratch)
    rows = documents.map(tokenized, batched=True, remove_columns=documents.column_names)
    packed = pack_dataset(rows, seq_length=512, strategy="bfd_split")
    seconds = time.perf_counter() - started
    tokens = sum(map(sum, packed["seq_lengths"]))
    print(json.dumps({"seconds": seconds, "rows": len(packed), "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
