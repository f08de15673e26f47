"""A minute with DiffusionBERT: train a tiny one on Python's own documentation, then watch it write.

Everything is the package's core: no corpus to download, no GPU, no checkpoint. The texts of
`pydoc_data.topics` come with every Python. A model this small, trained for a minute, learns which words follow
each other in that text, and no more.

    python examples/pydoc_demo.py            # about a minute on two cores
    python examples/pydoc_demo.py --seconds 300 --sentences 8
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import time
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertForMaskedLM

from diffusionbert.categorical import Shaping
from diffusionbert.conditioning import TimeAgnostic
from diffusionbert.method import Method, State
from diffusionbert.methods.discrete import DiscreteTime
from diffusionbert.networks import Denoiser
from diffusionbert.noise import Noise
from diffusionbert.processes import Absorbing
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.schedules import Mean, Spindle, TokenInformation, uniform_grid
from diffusionbert.shapes import Batch

PAD, CLS, SEP, MASK, UNK = SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
MAX_WORDS = 20


def read_sentences() -> list[str]:
    """The prose of Python's help topics, one sentence each."""
    paragraphs = re.split(r"\n\s*\n", "\n\n".join(topics.values()))
    sentences = (
        sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(paragraph.split()))
    )
    prose = re.compile(r"[A-Z][A-Za-z ,;'-]+\.")
    return [s for s in dict.fromkeys(sentences) if prose.fullmatch(s) and 5 <= len(s.split()) <= MAX_WORDS]


def train_tokenizer(sentences: list[str]) -> Tokenizer:
    """A vocabulary of the text's own words, in lower case."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNK))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(sentences, trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False))
    tokenizer.enable_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, sentences: list[str]) -> Batch:
    """Rows `[CLS] … [SEP]`, padded; all but these are editable."""
    rows = tokenizer.encode_batch([f"{CLS} {sentence} {SEP}" for sentence in sentences])
    tokens = torch.tensor([row.ids for row in rows])
    frame = torch.tensor([tokenizer.token_to_id(token) for token in (PAD, CLS, SEP)])
    return Batch.of(tokens, editable=~torch.isin(tokens, frame), attend=tokens != frame[0])


def build(tokenizer: Tokenizer, corpus: Batch, num_steps: int) -> Method:
    """A tiny BERT from scratch, time-agnostic, under the spindle schedule with its strict bound."""
    size, mask_id = tokenizer.get_vocab_size(), tokenizer.token_to_id(MASK)
    writable = torch.arange(size) >= len(SPECIAL)
    counts = torch.bincount(corpus.tokens[corpus.editable], minlength=size)
    information = TokenInformation.from_counts(counts, writable=writable)
    config = BertConfig(
        vocab_size=size,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=corpus.tokens.shape[1],
        attention_probs_dropout_prob=0.0,
    )
    process = Absorbing(Spindle(strength=0.3, mean=Mean.CORPUS), mask_id, information)
    network = Denoiser(BertForMaskedLM(config), TimeAgnostic(), writable)
    sampler = Ancestral(process, uniform_grid(64), Shaping(temperature=0.6))
    return Method(network, DiscreteTime(process, uniform_grid(num_steps)), sampler)


def select(batch: Batch, rows: torch.Tensor) -> Batch:
    """Some rows, cut to the longest of them; each keeps its own name and so its own noise."""
    length = int(batch.attend[rows].sum(dim=1).max())
    return Batch(
        batch.tokens[rows, :length],
        batch.attend[rows, :length],
        batch.editable[rows, :length],
        rows,
        batch.strata[rows],
    ).stratified()


def perplexity(method: Method, batch: Batch, draws: int = 16) -> float:
    """The strict bound as perplexity per token, averaged over a few draws of noise."""
    method.eval()
    with torch.no_grad():
        nats = [method.nats(batch.stratified(), Noise(seed=1, step=draw)).sum() for draw in range(draws)]
    method.train()
    return math.exp(float(torch.stack(nats).mean() / batch.num_tokens))


def train(method: Method, corpus: Batch, held_out: Batch, seconds: float, console: Console) -> None:
    """AdamW on batches of 64 sentences until the time is up, the learning rate falling with it."""
    optimiser = torch.optim.AdamW(method.parameters(), lr=4e-3, weight_decay=0.01)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=seconds)
        for step in itertools.count():
            elapsed = time.monotonic() - started
            if elapsed >= seconds:
                break
            optimiser.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 100, 1.05 - elapsed / seconds)
            rows = torch.randperm(len(corpus.tokens))[:64]
            batch = select(corpus, rows)
            loss = method(batch, Noise(seed=0, step=step), batch.num_tokens)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(method.parameters(), 1.0)
            optimiser.step()
            progress.update(task, completed=elapsed, description=f"training, step {step}")
    console.print(
        f"{step} steps in {seconds:.0f} s; strict bound on held-out sentences: "
        f"perplexity per token {perplexity(method, held_out):.0f}"
    )


def show(tokenizer: Tokenizer, state: State, row: int = 0) -> Text:
    """One line: hidden words as dim bars, written ones plain."""
    line = Text(f"t = {state.time:4.2f}  ", style="dim")
    for token in state.tokens[row].tolist()[1:-1]:
        word = tokenizer.id_to_token(token)
        if word == MASK:
            line.append(" ▁▁▁", style="dim")
        else:
            line.append(f" {word}")
    return line


def write(method: Method, tokenizer: Tokenizer, length: int, seed: int, console: Console) -> None:
    """One sentence denoised: in place on a terminal, else every eighth state on a line of its own."""
    row = [tokenizer.token_to_id(token) for token in (CLS, *[MASK] * length, SEP)]
    tokens = torch.tensor([row])
    editable = torch.zeros_like(tokens, dtype=torch.bool)
    editable[:, 1:-1] = True
    states = method.sample(Batch.of(tokens, editable), seed)
    if not console.is_terminal:
        for index, state in enumerate(states):
            if index % 8 == 0:
                console.print(show(tokenizer, state), soft_wrap=True)
        return
    with Live(console=console, refresh_per_second=30) as live:
        for state in states:
            live.update(show(tokenizer, state))
            time.sleep(0.04)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train")
    parser.add_argument("--sentences", type=int, default=3, help="how many sentences to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    torch.set_num_threads(1)  # for matrices this small a second thread gains little, and suffers on a busy machine
    torch.manual_seed(options.seed)

    sentences = read_sentences()
    tokenizer = train_tokenizer(sentences)
    everything = encode(tokenizer, sentences)
    order = torch.randperm(len(sentences))
    held_out, corpus = select(everything, order[:100]), select(everything, order[100:])
    method = build(tokenizer, corpus, num_steps=128)
    weights = sum(parameter.numel() for parameter in method.parameters())
    console.print(
        f"{len(sentences)} sentences of Python's documentation, {tokenizer.get_vocab_size()} different words, "
        f"a BERT of {weights / 1e6:.1f}M weights from scratch; perplexity untrained {perplexity(method, held_out):.0f}"
    )
    train(method, corpus, held_out, options.seconds, console)
    method.eval()
    lengths = corpus.editable.sum(dim=1)
    for seed in range(options.seed, options.seed + options.sentences):
        console.print()
        write(method, tokenizer, int(lengths[seed % len(lengths)]), seed, console)


if __name__ == "__main__":
    main()
