"""The commands as people type them: what they print, and one line for whatever is wrong."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
import typing
from dataclasses import replace

import pytest
from rich.console import Console
from tiny_models import (
    EXPERIMENTS,
    bundled,
    corpus,
    model_of,
    plain_bert,
    plain_roberta,
    run_of,
    toy_sentences,
    trained,
    trained_run,
)

import diffusionbert
from diffusionbert import model as model_module
from diffusionbert.cli import common
from diffusionbert.cli.common import coloured, line_of, show_generation
from diffusionbert.cli.evaluate import Evaluate
from diffusionbert.cli.fill import Fill
from diffusionbert.cli.generate import Generate
from diffusionbert.cli.main import Command, main, parse_arguments
from diffusionbert.cli.rewrite import Rewrite
from diffusionbert.cli.score import Score
from diffusionbert.inference.tasks import StreamState
from diffusionbert.model import Model

COMMANDS = [command.__name__.lower() for command in typing.get_args(Command)]
OTHER_METHODS = {"refinement": "unrolled", "left-to-right": "decoder", "gaussian-ancestral": "vectors"}
"""Ways of writing that a masked model has not, and the kind of model that has."""
SAMPLERS = [
    *("exact", "ancestral", "confidence", "margin", "entropy", "mask-predict", "remasking", "remasking-rescale"),
    *("renoising", "gibbs", "gibbs-left-to-right", "confidence:threshold=0.3", "remasking:eta=0.4", *OTHER_METHODS),
]
SENTENCE = "the old king saw the city of paris today ."


@pytest.fixture(autouse=True)
def _models_are_opened_once(monkeypatch):
    monkeypatch.setattr(model_module, "load", functools.cache(model_module.load))


@pytest.fixture
def tiny() -> list[str]:
    """Options that name a small model which knows the toy English."""
    return ["--model", str(trained_run())]


@pytest.fixture
def run(capsys):
    """Runs a command that must succeed, and gives what it prints."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        main(list(arguments))
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


@pytest.fixture
def objects(run):
    """The same with --json: one object a line."""
    return lambda *arguments: [json.loads(line) for line in run(*arguments, "--json").removesuffix("\n").split("\n")]


@pytest.fixture
def wrong(capsys):
    """Runs a command that must be refused: exit code 2, one line on stderr, nothing on stdout."""

    def wrong(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        printed = capsys.readouterr()
        assert caught.value.code == 2, printed.err
        assert printed.out == ""
        [line] = printed.err.splitlines()
        assert line.startswith("diffusionbert: ")
        return line

    return wrong


def has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


# ---- generate -------------------------------------------------------------------------------------------------------


def test_512_steps_cost_24_calls_at_most(objects):
    written = objects("generate", "-n", "4", "--steps", "512", "--length", "24", "--seed", "0")
    assert len(written) == 4
    for each in written:
        assert list(each) == ["prompt", "text", "length", "steps", "calls", "seed"]
        assert (each["length"], each["steps"], each["seed"]) == (24, 512, 0)
        assert 1 <= each["calls"] <= 24
        assert len(each["text"].split()) > 8
    assert len({each["text"] for each in written}) == 4


def test_texts_are_printed_one_a_line(run, tiny):
    lines = run("generate", "-n", "5", "--length", "6", "--seed", "3", *tiny).splitlines()
    assert lines == trained().generate(num_return_sequences=5, length=6, seed=3)


@pytest.mark.parametrize(("given", "allowed"), [("7", {7}), ("4-6", {4, 5, 6}), ("corpus", set(range(5, 18)))])
def test_lengths_are_a_number_a_range_or_the_corpus(objects, tiny, given, allowed):
    drawn = {each["length"] for each in objects("generate", "-n", "30", "--steps", "1", "--length", given, *tiny)}
    assert drawn <= allowed
    assert len(drawn) >= min(3, len(allowed))


def test_a_prompt_stands_first_as_it_was_typed(run, tiny):
    for line in run("generate", "-n", "3", "The OLD king 🙂,", "--length", "12", *tiny).splitlines():
        assert line.startswith("The OLD king 🙂,")


def test_words_are_included_and_forbidden(objects, tiny):
    options = ["-n", "12", "--length", "12", "--include", "river", "Sister", "--forbid", "the", "king"]
    for each in objects("generate", *options, *tiny):
        assert has_word(each["text"], "river")
        assert has_word(each["text"], "sister")
        assert not has_word(each["text"], "the")
        assert not has_word(each["text"], "king")
        assert each["length"] == 12


def test_rewriting_keeps_the_rest(run, tiny):
    words = SENTENCE.removesuffix(" .").split()
    for line in run("rewrite", SENTENCE, "-n", "6", "--strength", "0.3", *tiny).splitlines():
        assert sum(map(has_word, [line] * len(words), words)) >= 6  # three of ten were hidden


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_writes_and_repeats_itself_by_its_seed(objects, tiny, sampler):
    model = ["--model", str(run_of(OTHER_METHODS[sampler]))] if sampler in OTHER_METHODS else tiny
    command = ["generate", "--sampler", sampler, "-n", "3", "--length", "9", "--steps", "6", *model]
    first, again, other = (objects(*command, "--seed", seed) for seed in ("5", "5", "6"))
    assert first == again
    assert [each["text"] for each in first] != [each["text"] for each in other]
    assert {each["seed"] for each in other} == {6}
    for each in first:
        assert each["calls"] <= (9 if sampler == "left-to-right" else 6)  # a decoder takes one a word
        assert not re.search(r"\[(MASK|UNK|PAD|CLS|SEP)\]", each["text"])


def test_blocks_write_long_texts(objects, tiny):
    [written] = objects("generate", "--block", "5", "--length", "60", "--steps", "4", *tiny)
    assert written["length"] == 60


def test_knobs_of_the_distribution(run, tiny):
    common = ["generate", "-n", "4", "--length", "9", "--seed", "0", *tiny]
    usual = run(*common)
    assert run(*common, "--top-k", "30") == usual
    assert run(*common, "--top-k", "0", "--temperature", "2") != usual
    assert run(*common, "--top-p", "0.3") != usual
    assert run(*common, "--top-k", "1") == run(*common, "--temperature", "1e-9")


def test_watching_without_a_terminal_prints_states(run, tiny):
    lines = run("generate", "--watch", "--length", "6", "--seed", "2", *tiny).splitlines()
    assert lines[0].split() == ["t", "=", "1.00"] + ["▁▁▁"] * 6
    masked = [line.count("▁▁▁") for line in lines]
    assert masked == [6, 5, 4, 3, 2, 1, 0]
    [text] = trained().generate(length=6, seed=2)
    assert lines[-1].removeprefix("t = 0.00").split() == text.replace(".", " .").split()


def test_a_source_is_answered_by_the_candidate_that_agrees_most(objects):
    command = [
        "generate",
        "--model",
        str(run_of("pairs")),
        "--source",
        "the king saw a river today .",
        "--length",
        "4",
        "--seed",
        "0",
    ]
    candidates = [each["text"] for each in objects(*command, "-n", "6")]
    answers = [each["text"] for each in objects(*command, "-n", "2", "--num-candidates", "3")]
    assert answers[0] in candidates[:3]
    assert answers[1] in candidates[3:]


def test_a_plain_masked_model_writes_without_training(objects):
    for path in (plain_bert(), plain_roberta()):
        written = objects("generate", "--model", str(path), "-n", "2", "--length", "7")
        assert [each["length"] for each in written] == [7, 7]
        assert all(each["calls"] <= 7 for each in written)


def test_several_prompts_get_their_texts_one_after_another(objects, tiny):
    options = ["-n", "2", "--length", "7", "--seed", "1", *tiny]
    both = objects("generate", "the king", "nobody", *options)
    assert [each["prompt"] for each in both] == ["the king"] * 2 + ["nobody"] * 2
    assert both == objects("generate", "the king", *options) + objects("generate", "nobody", *options)


def test_max_new_tokens_do_not_count_the_prompt(objects, tiny):
    [generated] = objects("generate", "the old king", "--max-new-tokens", "5", *tiny)
    assert generated["length"] == 8


def test_without_a_seed_texts_differ_and_state_their_seed(objects, tiny):
    one, other = (objects("generate", "--length", "12", *tiny)[0] for _ in range(2))
    assert one["seed"] != other["seed"]
    assert objects("generate", "--length", "12", "--seed", str(one["seed"]), *tiny) == [one]


def test_rewrite_reads_texts_from_arguments_and_files(objects, tiny, tmp_path):
    (tmp_path / "texts.txt").write_text(f"{SENTENCE}\nnobody met the sea again .\n")
    options = ["-n", "2", "--seed", "0", "--strength", "0.5", *tiny]
    found = objects("rewrite", "--file", str(tmp_path / "texts.txt"), *options)
    assert [each["input"] for each in found] == [SENTENCE] * 2 + ["nobody met the sea again ."] * 2
    assert found[:2] == objects("rewrite", SENTENCE, *options)
    assert [each["text"] for each in found[:2]] == trained().rewrite(SENTENCE, 0.5, num_return_sequences=2, seed=0)


# ---- fill -----------------------------------------------------------------------------------------------------------


def test_blanks_have_ranked_alternatives(objects):
    found = objects("fill", "the [MASK] of the company said on [MASK] .", "--num-alternatives", "3")
    assert len(found) == 3
    for each in found:
        assert list(each) == ["input", "text", "fillings", "nats"]
        first, second = each["fillings"]
        assert each["text"] == f"the {first} of the company said on {second} ."
    assert [each["nats"] for each in found] == sorted(each["nats"] for each in found)
    assert len({each["text"] for each in found}) == 3


def test_alternatives_are_printed_with_their_nats(run, tiny):
    lines = run("fill", "the king saw [MASK] .", "--num-alternatives", "3", *tiny).splitlines()
    nats = [float(line.split()[0]) for line in lines]
    assert nats == sorted(nats)
    assert all(re.fullmatch(r" *\d+\.\d\d  the king saw .+ \.", line) for line in lines)
    assert run("fill", "the king saw [MASK] .", *tiny) == lines[0].split("  ")[-1] + "\n"


@pytest.mark.parametrize("mark", ["[MASK]", "<mask>"])
def test_a_plain_masked_model_fills_without_training(objects, mark):
    path = plain_bert() if mark == "[MASK]" else plain_roberta()
    for text in (f"the {mark} saw a {mark} .", "the [MASK] saw a [BLANK] ."):
        found = objects("fill", text, "--num-alternatives", "2", "--model", str(path))
        assert [len(each["fillings"]) for each in found] == [2, 2]


def test_many_texts_come_from_arguments_a_file_or_stdin(run, tiny, tmp_path, monkeypatch):
    texts = ["the [MASK] saw a river .", "nobody met the [MASK] .", "[BLANK] again ."]
    expected = run("fill", *texts, *tiny)
    assert len(expected.splitlines()) == 3
    content = "\ufeff" + texts[0] + "\r\n\n  " + texts[1] + "\n" + texts[2]  # as some editors leave it
    (tmp_path / "texts.txt").write_bytes(content.encode())
    assert run("fill", "--file", str(tmp_path / "texts.txt"), *tiny) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode()), encoding="ascii"))
    assert run("fill", "--file", "-", *tiny) == expected


def test_forbidden_words_are_not_filled_in(objects, tiny):
    text = "the old king saw the city of [MASK] today ."
    assert objects("fill", text, *tiny)[0]["fillings"] == ["paris"]
    assert "paris" not in [each["fillings"][0] for each in objects("fill", text, "--num-alternatives", "9", "--forbid",
                                                                   "paris", *tiny)]  # fmt: skip


def test_a_word_of_the_text_itself_may_be_forbidden_as_a_filling(objects, tiny):
    text = "the king saw [MASK] city of paris today ."
    assert objects("fill", text, *tiny)[0]["fillings"] == ["the"]
    for each in objects("fill", text, "--num-alternatives", "9", "--forbid", "the", "king", *tiny):
        assert each["text"].startswith("the king saw ")
        assert each["fillings"][0] not in ("the", "king")


def test_a_prompt_may_have_what_must_not_be_written(objects, tiny):
    options = ["-n", "12", "--length", "12", "the old king", "--forbid", "the", "king", "king saw"]
    for each in objects("generate", *options, *tiny):
        assert each["text"].startswith("the old king ")
        rest = each["text"].removeprefix("the old king ")
        assert not has_word(rest, "the")
        assert not has_word(rest, "king")
        assert not rest.startswith("saw")


# ---- score ----------------------------------------------------------------------------------------------------------


def test_a_score_says_what_it_is_and_how_sure(objects, tiny):
    sentences = [SENTENCE, "paris king the city old saw of today the ."]
    real, shuffled = objects("score", *sentences, *tiny)
    keys = {"nats", "perplexity_per_token", "perplexity_per_word", "bits_per_byte", "ci95", "likelihood", "protocol"}
    assert real.keys() == {"text", "num_unknown", *keys}
    assert real["num_unknown"] == 0
    assert real["perplexity_per_token"] < shuffled["perplexity_per_token"]
    assert real["ci95"][0] < real["nats"] < real["ci95"][1]
    assert real["likelihood"] == "bound"
    assert {"definition", "special_tokens", "num_draws", "length", "interval"} <= real["protocol"].keys()
    assert [real["text"], shuffled["text"]] == sentences


def test_the_bundled_model_prefers_english(objects):
    real, shuffled = objects(
        "score", "the capital of france is paris .", "paris the is france capital of .", "--precision", "0.5"
    )
    assert real["perplexity_per_token"] < shuffled["perplexity_per_token"] / 3


def test_tokens_have_their_own_costs(objects, run, tiny):
    [score] = objects("score", SENTENCE, "--tokens", *tiny)
    assert [piece for piece, _ in score["tokens"]] == SENTENCE.split()
    assert sum(nats for _, nats in score["tokens"]) == pytest.approx(score["nats"], rel=0.2)
    shown, about = run("score", SENTENCE, "--tokens", *tiny).splitlines()
    assert re.sub(r"\(-?\d+\.\d\)", "", shown) == SENTENCE
    assert "bound" in about


def test_the_seed_and_the_precision_reach_the_estimate(objects, tiny):
    rough, other, fine = (
        objects("score", SENTENCE, *options, *tiny)[0]
        for options in (["--precision", "1"], ["--precision", "1", "--seed", "7"], ["--precision", "0.01"])
    )
    assert rough["nats"] != other["nats"]
    assert (rough["protocol"]["seed"], other["protocol"]["seed"]) == (0, 7)
    assert rough["protocol"]["num_draws"] < fine["protocol"]["num_draws"]


def test_a_gap_is_as_long_as_allowed(objects, tiny):
    text = "the old king saw [BLANK] today ."
    short, long = (
        objects("fill", text, "--max-blank-tokens", longest, *tiny)[0]["fillings"][0] for longest in ("1", "3")
    )
    assert len(short.split()) == 1
    assert len(long.split()) > 1


def test_scores_come_from_a_file_with_whatever_is_in_it(objects, tiny, tmp_path):
    sentences = ["nobody", "🙂🙂", "Ünïcödé „x“", "[bold]the king[/bold]", "a\u2028b", "x" * 3000]
    (tmp_path / "lines.txt").write_text("\n\n".join(sentences), encoding="utf-8")
    scores = objects("score", "--file", str(tmp_path / "lines.txt"), "--precision", "1", *tiny)
    assert [score["text"] for score in scores] == sentences


def test_markup_is_shown_and_not_obeyed(run, tiny):
    text = "[bold]the[/bold] [/red] :sea: ."
    assert run("score", text, "--precision", "1", *tiny).splitlines()[0] == text


def test_an_infinite_number_is_still_json(objects, tiny, monkeypatch):
    """A long web address is one word of more than 709 nats, whose perplexity no float64 holds."""
    [known] = trained().score(["nobody"])
    monkeypatch.setattr(Model, "score", lambda *_, **__: [replace(known, perplexity_per_word=math.inf)])
    [score] = objects("score", "nobody", *tiny)
    assert score["perplexity_per_word"] is None


# ---- info and help --------------------------------------------------------------------------------------------------


def test_info_says_what_a_model_is(run, objects):
    [facts] = objects("info")
    assert facts["model"] == "bundled"
    assert facts["parameters"] == sum(parameter.numel() for parameter in bundled().engine.network.parameters())
    assert (facts["vocabulary"], facts["max_length"], facts["length_histogram"]) == (16_000, 126, True)
    printed = run("info", "--model", str(run_of("spindle-layers")))
    assert "spindle" in printed
    assert re.search(r"^time +layers$", printed, re.MULTILINE)
    assert re.search(r"^max length +22$", printed, re.MULTILINE)


@pytest.fixture
def help_of(capsys, monkeypatch):
    """The `--help` of a command, on a wide terminal."""

    def help_of(*command: str) -> str:
        monkeypatch.setenv("COLUMNS", "300")
        with pytest.raises(SystemExit) as caught:
            main([*command, "--help"])
        assert not caught.value.code
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return help_of


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_is_understood(help_of, command):
    shown = help_of(command)
    [example] = re.findall(rf"^ *Example: diffusionbert ({command} .*)$", shown, re.MULTILINE)
    assert type(parse_arguments(shlex.split(example))).__name__.lower() == command


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_text_for_every_option(help_of, command):
    shown = help_of(command)
    lines = [re.sub(r"^[│ ]+|[│ ]+$", "", line) for line in shown[shown.index("-h, --help ") :].splitlines()]
    entries = re.split(r"\n(?=-[a-z-])", "\n".join(lines))
    assert len(entries) > 1
    for entry in entries:
        assert "None" not in entry
        assert "(default: )" not in entry
        text = re.sub(r"\s*\((default: \S+|required)\)\s*$", "", entry)
        words = re.sub(r"\s*\n\s*", "  ", text).partition("  ")[2]
        assert len(words.split()) >= 2, entry


def test_the_commands_have_the_defaults_of_the_library():
    for command, function in (
        (Generate, Model.generate),
        (Rewrite, Model.rewrite),
        (Fill, Model.fill),
        (Score, Model.score),
        (Evaluate, diffusionbert.evaluate),
    ):
        defaults = {name: given.default for name, given in inspect.signature(function).parameters.items()}
        options = {field.name: field.default for field in dataclasses.fields(command)}
        spelled = {"length": {"corpus": None}, "num_alternatives": {1: None}, "precision": {"0.5%": 0.005}}
        if command is Rewrite:
            spelled["num_return_sequences"] = {1: None}
        shared = (defaults.keys() & options.keys()) - {"texts", "data"}
        assert len(shared) >= 2
        for name in shared:
            assert spelled.get(name, {}).get(options[name], options[name]) == defaults[name], (command, name)


def test_top_level_help_names_commands_and_common_options(help_of):
    shown = help_of()
    for name in (*COMMANDS, "--plugin", "--verbosity", "--version"):
        assert name in shown


def test_the_version_is_told(run):
    assert run("--version") == f"diffusionbert {diffusionbert.__version__}\n"


QUICK = """
import contextlib, io, resource, sys
import diffusionbert
from diffusionbert.cli.main import main

assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
for command in sys.argv[1:]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([command, "--help"])
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        main([command, "--nonsense"])
assert not {"torch", "transformers"} & sys.modules.keys()
print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
"""


def test_help_does_not_wait_for_torch():
    done = subprocess.run([sys.executable, "-c", QUICK, *COMMANDS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2  # seconds of one core, for all commands together


PLUGIN = """
from dataclasses import dataclass

import diffusionbert
from diffusionbert.samplers.ancestral import Ancestral
from diffusionbert.samplers.base import Sampler

@diffusionbert.register("half-hearted")
@dataclass(frozen=True)
class HalfHearted(Sampler):
    def resolve(self, context):
        return Ancestral().resolve(context)

    def start(self, *_):
        raise NotImplementedError

    query = update = start
"""


def run_module(*arguments: str, cwd=None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diffusionbert", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_a_plugin_registers_parts_of_ones_own(tmp_path, tiny):
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    options = ["generate", "--length", "6", "--seed", "1", "--steps", "4", *tiny]
    own = run_module("--plugin", "my_plugin", *options, "--sampler", "half-hearted", cwd=tmp_path)
    assert (own.returncode, own.stderr) == (0, "")
    assert own.stdout == run_module(*options, "--sampler", "ancestral", "--plugin=my_plugin", cwd=tmp_path).stdout
    without = run_module(*options, "--sampler", "half-hearted", cwd=tmp_path)
    assert without.returncode == 2
    assert "unknown sampler 'half-hearted'" in without.stderr


def test_wrong_plugins_and_verbosities_are_rejected_in_one_line(wrong):
    assert "--plugin no_such_module cannot be imported" in wrong("info", "--plugin", "no_such_module")
    assert "--plugin needs a value" in wrong("info", "--plugin")
    assert "must be one of debug, info, warning, error, got 'loud'" in wrong("info", "--verbosity", "loud")


def test_verbosity_chooses_the_messages_on_stderr(capsys, tmp_path):
    small = ["--width=16", "--layers=1", "--vocabulary=512", "--steps=1", f"--data={corpus()}"]
    for level, expected in (("info", True), ("error", False)):
        capsys.readouterr()
        main(["train", f"--output={tmp_path / level}", f"--cache={tmp_path / 'cache'}", *small, "--verbosity", level])
        printed = capsys.readouterr()
        assert ("training text: " in printed.err) == expected
        assert "model in" in printed.out


def test_python_m_diffusionbert_is_the_command_line(tiny):
    done = run_module("generate", "--length", "5", "--seed", "1", *tiny)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == trained().generate(length=5, seed=1)[0] + "\n"


# ---- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "generate, fill, rewrite, score"),
        (["nonsense"], "nonsense"),
        (["generate", "--nonsense"], "--nonsense"),
        (["info", "stray words"], "stray words"),
        (["generate", "--steps", "many"], "--steps"),
        (["generate", "--seed"], "--seed"),
        (["fill", "--seed", "x", "a [MASK] ."], "--seed"),
        (["score", "--precision", "high", "a ."], "--precision"),
        (["info", "--jsn"], "--jsn"),
    ],
    ids=str,
)
def test_words_that_are_no_option_are_named_in_one_line(wrong, arguments, message):
    line = wrong(*arguments)
    assert message in line
    assert "--help" in line
    assert not re.search(r"[│╭╰─\x1b]", line)


@pytest.mark.parametrize("arguments", [["fill", "--seed", "x", "a"], ["nonsense"], ["generate", "--seed"]], ids=str)
def test_a_terminal_without_boxes_is_told_the_same(arguments):
    command = [sys.executable, "-m", "diffusionbert", *arguments]
    said = [
        subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, timeout=60).stderr
        for encoding in ("ascii", "utf-8")
    ]
    assert said[0] == said[1]
    assert b"---" not in said[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "0"], "`length` must be >= 1 token, got 0"),
        (["--length=-5"], "'-5'"),
        (["--length", "many"], "'many'"),
        (["--length", "9-3"], "9-3"),
        (["--length", "0-3"], "0-3"),
        (["--length", "23"], "23 tokens, but this model reads at most 22"),
        (["--length", "999999"], "--block"),
        (["-n", "0"], "0"),
        (["-n", "-2"], "-2"),
        (["-n", "1000000000"], "1000000000"),
        (["--sampler", "nonsense"], "unknown sampler 'nonsense'; known: ancestral"),
        (["--sampler", "refinement"], "for a model trained by SUNDAE"),
        (["--sampler", "left-to-right"], "for a model that is a decoder"),
        (["--steps", "0"], "steps"),
        (["--steps=-1"], "steps"),
        (["--steps", "100000000000"], "steps"),
        (["--temperature", "0"], "temperature"),
        (["--temperature=-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--top-p", "0"], "top_p"),
        (["--top-k=-1"], "--top-k must be >= 1, or 0 for all tokens, got -1"),
        (["--sampler", "ancestral:threshold=0.5"], "'ancestral' has no knob 'threshold'; it has none"),
        (["--sampler", "confidence:threshold=5"], "threshold must be between 0.0 and 1.0"),
        (["--sampler", "remasking:eat=0.5"], "did you mean 'eta'"),
        (["--sampler", "remasking:eta=5"], "eta must be between 0 and 1, got 5.0"),
        (["--block", "0"], "block"),
        (["--block", "30", "--length", "60"], "block"),
        (["--block", "5", "--length", "60", "--include", "river"], "with words to include"),
        (["the old king saw", "--length", "3"], "`length` must be >= 5 with a prompt of 4 tokens"),
        (["the old king saw", "--length", "2-4"], "2-4"),
        (["caf\udce9", "--length", "6"], "UTF-8"),
        (["--include", "king", "--forbid", "King"], "'king'"),
        (["--include", "old king", "--forbid", "king", "--length", "6"], "'king'"),
        (["--include", "a", "an", "river", "sea", "--length", "3"], "4 words"),
        (["--include", "antidisestablishmentarianism", "--length", "3"], "free positions of sequence 0"),
        (["--include", ""], "words to include or forbid must not be empty, got ''"),
        (["--include", "🙂", "--length", "6"], "🙂"),
        (["--forbid", "🙂", "--length", "6"], "🙂"),
        (["--strength", "0.5"], "--strength"),
        (["--max-new-tokens", "0"], "`max_new_tokens` must be >= 1"),
        (["--max-new-tokens", "5", "--length", "9"], "without `length`"),
        (["--source", "the king"], "pairs"),
        (["--num-candidates", "3"], "1 without a `source`, got 3"),
        (["--num-candidates", "0"], "`num_candidates` must be >= 1"),
        (["--watch", "--json"], "--json"),
        (["--watch", "-n", "3"], "-n"),
        (["--device", "nonsense"], "nonsense"),
        (["--device", "meta"], "meta"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_generate_refuses_in_one_line(wrong, tiny, options, message):
    assert message in wrong("generate", *tiny, *options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--file"),
        ([""], "nothing to rewrite"),
        ([SENTENCE, "--strength", "0"], "strength"),
        ([SENTENCE, "--strength", "1.5"], "strength"),
        ([SENTENCE, "--length", "5"], "--length"),
        ([SENTENCE, "-n", "0"], "0"),
        ([SENTENCE, "--forbid", ""], "words to include or forbid must not be empty"),
        (["king " * 30], "has 30 tokens, but this model reads at most 22; shorten it"),
        ([SENTENCE, "--file", "x"], "give one of the two"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_rewrite_rejects_in_one_line(wrong, tiny, arguments, message):
    assert message in wrong("rewrite", *arguments, *tiny)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no blank here ."], "[MASK] for one token, [BLANK]"),
        ([""], "nothing to fill"),
        ([], "--file"),
        (["the [CLS] [MASK] ."], "special tokens"),
        (["king " * 30 + "[MASK]"], "has 31 tokens, but this model reads at most 22; shorten it"),
        (["the [BLANK] .", "--max-blank-tokens", "0"], "`max_blank_tokens`"),
        (
            ["the [BLANK] .", "--max-blank-tokens", "50"],
            "`max_blank_tokens` must be <= 20 for 'the [BLANK] .', got 50",
        ),
        (["[BLANK] the [BLANK] .", "--max-blank-tokens", "11"], "must be <= 10 for"),
        (["the [MASK] .", "--num-alternatives", "0"], "`num_alternatives`"),
        (["the [MASK] .", "--num-alternatives=-1"], "`num_alternatives`"),
        (["the [MASK] .", "--forbid", ""], "words to include or forbid must not be empty, got ''"),
        (["caf\udce9 [MASK] ."], "UTF-8"),
        (["the [MASK] .", "--device", "cuda:99"], "cuda:99"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_fill_refuses_in_one_line(wrong, tiny, arguments, message):
    assert message in wrong("fill", *arguments, *tiny)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--file"),
        ([""], "text 1 has no tokens"),
        (["the king .", "  "], "text 2 has no tokens"),
        (["the king .", "king " * 30], "text 2"),
        (["the king .", "--precision", "0"], "precision"),
        (["the king .", "--precision", "nan"], "precision"),
        (["caf\udce9 ."], "UTF-8"),
        (["the king .", "--device", "nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_score_refuses_in_one_line(wrong, tiny, arguments, message):
    assert message in wrong("score", *arguments, *tiny)


@pytest.mark.parametrize("command", ["fill", "score"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (bytes(range(256)), "not UTF-8"),
        ("café".encode("latin-1"), "not UTF-8"),
        ("the [MASK]".encode("utf-16"), "not UTF-8"),
        (b"[MASK] " * 20_000, "split it"),
        (b"\x00\x01\x02", "nothing to fill|no tokens"),
    ],
    ids=["missing", "empty", "blank", "binary", "latin-1", "utf-16", "huge line", "control characters"],
)
def test_a_bad_file_is_refused_in_one_line(wrong, tiny, tmp_path, command, content, message):
    file = tmp_path / "file.txt"
    if content is not None:
        file.write_bytes(content)
    assert re.search(message, wrong(command, "--file", str(file), *tiny))


class Endless(io.RawIOBase):
    """As /dev/zero, or a pipe that somebody writes into for ever."""

    def __init__(self, line: bytes):
        self.line, self.num_read = line, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self.num_read += 1
        assert self.num_read < 1000
        buffer[: len(self.line)] = self.line
        return len(self.line)


@pytest.mark.parametrize("line", [b"x" * 1000, b"the king saw a river .\n" * 40], ids=["one line", "many lines"])
def test_no_more_is_read_than_can_be_used(wrong, tiny, monkeypatch, line):
    monkeypatch.setattr(common, "MOST_LINES", 1000)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless(line))))
    assert "split it" in wrong("score", "--file", "-", *tiny)


def test_control_characters_of_a_scored_text_do_not_reach_the_terminal(run, tiny, tmp_path):
    (tmp_path / "file.txt").write_text("the king \x1b[31m saw \x07 a river .\n")
    for options in ([], ["--tokens"]):
        printed = run("score", "--file", str(tmp_path / "file.txt"), *options, *tiny)
        assert "river" in printed
        assert "\x1b" not in printed
        assert "\x07" not in printed


@pytest.mark.parametrize("command", ["fill", "score"])
def test_a_folder_two_sources_and_a_bad_stdin_are_refused(wrong, tiny, tmp_path, monkeypatch, command):
    assert "Is a directory" in wrong(command, "--file", str(tmp_path), *tiny)
    assert "one of the two" in wrong(command, "the [MASK] .", "--file", "x", *tiny)
    for given, message in ((b"", "empty"), (b"caf\xe9 .", "not UTF-8")):
        stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8", errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", stdin)
        assert message in wrong(command, "--file", "-", *tiny)
    monkeypatch.setattr(sys, "stdin", None)  # it was closed
    assert "empty" in wrong(command, "--file", "-", *tiny)


@pytest.mark.parametrize("command", [["generate"], ["fill", "a [MASK] ."], ["score", "a ."], ["info"]], ids=" ".join)
@pytest.mark.parametrize("name", ["nothing-here", "no/such-model", "no such model", "x" * 300])
def test_a_model_that_is_not_there_is_refused_in_one_line(wrong, command, name):
    assert "no model at" in wrong(*command, "--model", name)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_of_a_model_is_refused_in_one_line(wrong, name):
    assert "the name of the model is empty" in wrong("info", "--model", name)


@pytest.mark.parametrize("command", [["generate"], ["fill", "a [MASK] ."], ["score", "a ."], ["info"]], ids=" ".join)
def test_a_folder_without_a_model_is_refused_in_one_line(wrong, tmp_path, command):
    assert str(tmp_path) in wrong(*command, "--model", str(tmp_path))
    (tmp_path / "experiment.json").write_text("{}")
    assert "is a run without a model yet" in wrong(*command, "--model", str(tmp_path))


@pytest.mark.parametrize("kind", [kind for kind in EXPERIMENTS if kind.startswith("uniform")])
def test_a_model_of_other_noise_says_what_it_cannot(wrong, kind):
    model = ["--model", str(run_of(kind))]
    assert "[MASK]" in wrong("fill", "a [MASK] .", *model)
    assert "[MASK]" in wrong("generate", "--sampler", "confidence", "--length", "5", *model)
    assert "[MASK]" in wrong("generate", "--block", "3", "--length", "5", *model)


KINDS = {
    "vectors": "bound",
    "decoder": "exact",
    "unrolled": None,
    "learned": "bound",
    "mouth": "bound",
    "mask-predict": "bound",
}
"""Of models by other methods: the kind of their likelihood, if they have any."""


@pytest.mark.parametrize(("kind", "likelihood"), KINDS.items())
def test_every_command_works_with_every_method_or_says_why_not(objects, wrong, tmp_path, kind, likelihood):
    model = ["--model", str(run_of(kind))]
    [facts] = objects("info", *model)
    assert facts["objective"]["name"]
    written = objects("generate", "-n", "2", "--length", "6", "--steps", "5", "the old king", *model)
    assert all(each["text"].startswith("the old king") and each["length"] == 6 for each in written)
    assert objects("doctor", "-n", "4", "--length", "6", "--steps", "4", *model)
    if likelihood is None:
        assert "no likelihood" in wrong("score", SENTENCE, *model)
    else:
        [score] = objects("score", SENTENCE, "--precision", "1.0", *model)
        assert score["likelihood"] == likelihood
    if kind in ("vectors", "decoder", "unrolled"):
        assert "[MASK]" in wrong("fill", "a [MASK] .", *model)
        assert "rewrite" in wrong("rewrite", SENTENCE, *model)
    else:
        assert objects("fill", "the [MASK] saw a river .", *model)


@pytest.mark.parametrize(("kind", "likelihood"), KINDS.items())
def test_every_method_is_evaluated(capsys, tmp_path, kind, likelihood):
    quick = ["--sentences", "4", "--samples", "4", "--length", "6", "--steps", "4", "--max-draws", "32", "--json"]
    model = ["--model", str(run_of(kind)), "--data", str(corpus()), "--output", str(tmp_path / "evaluation")]
    capsys.readouterr()
    main(["evaluate", *model, *quick])
    report = json.loads(capsys.readouterr().out)
    text = json.dumps(report)
    assert (f'"{likelihood}"' in text) if likelihood else ("no likelihood" in text)
    assert (tmp_path / "evaluation" / "evaluation.json").exists()


def test_a_model_of_pairs_wants_a_source(wrong):
    model = ["--model", str(run_of("pairs"))]
    assert "source" in wrong("generate", "--length", "5", *model)
    assert "source" in wrong("rewrite", SENTENCE, *model)
    assert "source and text together would have 46 tokens" in wrong(
        "generate", "--source", "king " * 40, "--length", "5", *model
    )


def test_a_bad_line_in_a_file_is_found(capsys, tiny, tmp_path):
    (tmp_path / "texts.txt").write_text("the [MASK] .\nno blank .\n")
    capsys.readouterr()  # what the fixture said while it trained
    with pytest.raises(SystemExit) as caught:
        main(["fill", "--file", str(tmp_path / "texts.txt"), *tiny])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "'no blank .'" in printed.err
    assert len(printed.err.splitlines()) == 1


# ---- terminals and pipes --------------------------------------------------------------------------------------------


def moments() -> list[StreamState]:
    return [
        StreamState(1.0, 0, (None, None, None), ""),
        StreamState(0.5, 1, ("the", None, None), "the"),
        StreamState(0.0, 2, ("the", "king", "##dom"), "the kingdom"),
    ]


def test_a_terminal_shows_the_text_in_place():
    console = Console(file=io.StringIO(), force_terminal=True, width=40, highlight=False)
    show_generation(moments(), console)
    shown = console.file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "the kingdom" in plain
    assert "\x1b[2K" in shown  # a line is wiped before it is written again
    assert plain.count("\n") <= 2


def test_hidden_places_are_dim_and_words_are_not():
    line = line_of(moments()[1])
    styles = {line.plain[span.start : span.end].strip(): str(span.style) for span in line.spans}
    assert "dim" in styles["▁▁▁"]
    assert "dim" not in styles["the"]
    assert "dim" not in str(line.style)
    assert line_of(moments()[2]).plain.endswith(" the kingdom")


def test_without_a_terminal_only_as_many_states_as_wanted():
    console = Console(file=io.StringIO(), width=200, highlight=False)
    show_generation(moments(), console, num_lines=2)
    first, last = console.file.getvalue().splitlines()
    assert first.count("▁▁▁") == 3
    assert last.endswith("the kingdom")


def test_dear_tokens_are_red_and_cheap_ones_green():
    line = coloured([("the", 0.1), ("king", 12.0), ("##dom", 5.0)])
    assert line.plain == "the(0.1) king(12.0)dom(5.0)"
    colours = {line.plain[span.start : span.end].strip(): str(span.style) for span in line.spans}
    red, green = ([int(part) for part in re.findall(r"\d+", colours[word])] for word in ("king", "the"))
    assert red[0] > red[1]
    assert green[1] > green[0]


def test_on_a_terminal_errors_are_one_plain_line_too():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "diffusionbert", "fill", "--seed", "x"]
    done = subprocess.run(command, stdout=theirs, stderr=theirs, timeout=60)
    os.close(theirs)
    said = os.read(ours, 10_000).decode()
    os.close(ours)
    assert done.returncode == 2
    assert len(said.strip().splitlines()) == 1
    assert "--seed" in said
    assert "\x1b" not in said
    assert "│" not in said


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_pipe_that_nobody_reads_is_no_error(monkeypatch, tiny):
    monkeypatch.setattr(sys, "stdout", Unread())
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--length", "4", *tiny])
    assert caught.value.code == 0
    assert said.closed  # or the interpreter would complain of the pipe once more


def test_the_toy_english_is_as_the_tests_believe():
    """What the tests above rest on: lengths of 5 to 17 tokens, words that are one piece each."""
    assert {len(sentence.split()) for sentence in toy_sentences(400)} <= set(range(5, 18))
    vocabulary = model_of("linear").engine.vocabulary
    assert all(len(vocabulary.pieces(word)) == 1 for word in SENTENCE.split())
