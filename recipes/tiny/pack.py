"""Answers of responses.py as a data folder of ``mlx-spec train``: ``python pack.py ANSWERS OUT --target FOLDER``.

Runs in mlx-spec's own environment. ``--target`` is the folder that the drafter will be trained for.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from mlx_spec.convert.train import shards
from mlx_spec.convert.train.provenance import versions
from mlx_spec.convert.train.shards import Sample
from mlx_spec.convert.train.storage import fingerprint, hash_file

END = 0
SHARD = 1024  # sequences


def samples(answers: Path, record: dict) -> list[Sample]:
    found = []
    for entry in record["files"]:
        for row in np.load(answers / entry["file"]).astype(np.int32):
            ends = np.flatnonzero(row[entry["prompt"] :] == END)
            last = entry["prompt"] + int(ends[0]) + 1 if len(ends) else len(row)
            if last - entry["prompt"] >= 2:
                found.append(Sample(row[:last], entry["prompt"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=10**9, help="sequences, at most")
    args = parser.parse_args()
    record = json.loads((args.answers / "manifest.json").read_text(encoding="utf-8"))
    config = json.loads((args.target / "config.json").read_text(encoding="utf-8"))
    order = np.random.default_rng(0)
    kept = samples(args.answers, record)
    kept = [kept[i] for i in order.permutation(len(kept))][: args.limit]
    args.out.mkdir(parents=True)
    manifest = {
        "format": shards.FORMAT,
        "target": args.target.name,
        "target_fingerprint": fingerprint(args.target),
        "vocab_size": config["vocab_size"],
        "eos_token_ids": [END],
        "template_sha256": None,
        "template_kwargs": {},
        "thinking": "",
        "settings": {"raw": True, "split": record["split"], "max_tokens": record["new"]},
        "sources": [{"path": "recipes/tiny/files.txt", "sha256": hash_file(Path(__file__).with_name("files.txt")),
                     "prompts": len(kept)}],
        "command": "recipes/tiny/responses.py, recipes/tiny/pack.py",
        "versions": versions(),
        "prompts": len(kept),
        "left_out": {"long_prompts": 0, "one_token_answers": 0},
        "shards": [],
        "complete": True,
    }  # fmt: skip
    for number in range(-(-len(kept) // SHARD)):
        part = kept[number * SHARD : (number + 1) * SHARD]
        manifest["shards"].append(shards.write_shard(args.out, number, part, config["vocab_size"]))
    shards.write_manifest(args.out, manifest)
    print(f"{len(kept)} sequences, {sum(len(s) - s.prompt for s in kept)} answer tokens")


if __name__ == "__main__":
    main()
