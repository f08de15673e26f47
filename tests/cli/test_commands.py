"""The commands as people type them: what they print, and one line for whatever is wrong."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import itertools
import json
import math
import os
import pty
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from tiny_models import (
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
from diffusionbert.cli import lines
from diffusionbert.cli.choose import Choose
from diffusionbert.cli.choose import _shown as _shown_choice
from diffusionbert.cli.common import colored, line_of, show_generation
from diffusionbert.cli.evaluate import Evaluate
from diffusionbert.cli.fill import Fill
from diffusionbert.cli.generate import Generate
from diffusionbert.cli.main import COMMANDS, in_flags, main, parse_arguments
from diffusionbert.cli.rewrite import Rewrite
from diffusionbert.cli.score import Score
from diffusionbert.inference import score as inference_score
from diffusionbert.inference.tasks import StreamState, TextScore
from diffusionbert.model import Model
from diffusionbert.samplers.base import Sampler

pytestmark = pytest.mark.slow
SENTENCE = "the old king saw the city of paris today ."


@pytest.fixture(autouse=True)
def _models_are_opened_once(monkeypatch):
    monkeypatch.setattr(model_module, "load", functools.cache(model_module.load))


@pytest.fixture
def tiny() -> list[str]:
    """Options that name a small model trained on the toy English."""
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
    """The same with --json: one object per line."""
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


# ---- generate -------------------------------------------------------------------------------------------------------


def test_512_steps_cost_24_calls_at_most(objects):
    written = objects("generate", "-n", "4", "--steps", "512", "--length", "24", "--seed", "0")
    assert len(written) == 4
    for each in written:
        assert list(each) == ["line", "input", "rank", "text", "length", "steps", "calls", "seed", "kept"]
        assert (each["length"], each["steps"], each["seed"]) == (24, 512, 0)
        assert 1 <= each["calls"] <= 24
        assert len(each["text"].split()) > 8
    assert len({each["text"] for each in written}) == 4


def test_texts_are_printed_one_per_line(run, tiny):
    lines = run("generate", "-n", "5", "--length", "6", "--seed", "3", *tiny).splitlines()
    assert lines == trained().generate(num_return_sequences=5, length=6, seed=3)


@pytest.mark.parametrize(("given", "allowed"), [("7", {7}), ("4-6", {4, 5, 6}), ("corpus", set(range(5, 18)))])
def test_lengths_are_a_number_a_range_or_the_corpus(objects, tiny, given, allowed):
    drawn = {each["length"] for each in objects("generate", "-n", "30", "--steps", "1", "--length", given, *tiny)}
    assert drawn <= allowed
    assert len(drawn) >= min(3, len(allowed))


def test_settings_of_the_distribution(run, tiny):
    common = ["generate", "-n", "4", "--length", "9", "--seed", "0", *tiny]
    usual = run(*common)
    assert run(*common, "--top-p", "0.5") == usual
    assert run(*common, "--top-p", "1", "--temperature", "2") != usual
    assert run(*common, "--top-p", "0.3") != usual
    assert run(*common, "--top-k", "1") == run(*common, "--temperature", "1e-9")


def test_watching_without_a_terminal_prints_states(run, tiny):
    lines = run("generate", "--watch", "--length", "6", "--seed", "2", *tiny).splitlines()
    assert lines[0].split() == ["t", "=", "1.00"] + ["▁▁▁"] * 6
    masked = [line.count("▁▁▁") for line in lines]
    assert masked == [6, 5, 4, 3, 2, 1, 0]
    [text] = trained().generate(length=6, seed=2, capitalize=False)
    assert lines[-1].removeprefix("t = 0.00").split() == text.replace(".", " .").split()


def test_several_prompts_get_their_texts_one_after_another(objects, tiny):
    options = ["-n", "2", "--length", "7", "--seed", "1", *tiny]
    both = objects("generate", "the king", "nobody", *options)
    assert [each["input"] for each in both] == ["the king"] * 2 + ["nobody"] * 2
    assert [(each["line"], each["rank"]) for each in both] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    alone = objects("generate", "the king", *options) + objects("generate", "nobody", *options)
    assert [each["text"] for each in both] == [each["text"] for each in alone]


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
        assert list(each) == ["line", "input", "rank", "text", "fillings", "nats", "conditional_on"]
        first, second = each["fillings"]
        assert each["text"].lower() == f"the {first} of the company said on {second} ."
    assert [each["nats"] for each in found] == sorted(each["nats"] for each in found)
    assert len({each["text"] for each in found}) == 3


def test_alternatives_are_printed_with_their_nats(run, tiny):
    lines = run("fill", "the king saw [MASK] .", "--num-alternatives", "3", *tiny).splitlines()
    nats = [float(line.split()[0]) for line in lines]
    assert nats == sorted(nats)
    assert all(re.fullmatch(r" *\d+\.\d\d nats  the king saw .+ \.", line) for line in lines)
    assert run("fill", "the king saw [MASK] .", *tiny) == lines[0].split("  ")[-1] + "\n"


@pytest.mark.parametrize("mark", ["[MASK]", "<mask>"])
def test_a_plain_masked_model_fills_and_generates_without_training(objects, mark):
    path = plain_bert() if mark == "[MASK]" else plain_roberta()
    for text in (f"the {mark} saw a {mark} .", "the [MASK] saw a [BLANK] ."):
        found = objects("fill", text, "--num-alternatives", "2", "--model", str(path))
        assert [len(each["fillings"]) for each in found] == [2, 2]
    texts = objects("generate", "--model", str(path), "-n", "2", "--length", "7")
    assert [each["length"] for each in texts] == [7, 7]
    assert all(each["calls"] <= 7 for each in texts)


def test_many_texts_come_from_arguments_a_file_or_stdin(run, tiny, tmp_path, monkeypatch):
    texts = ["the [MASK] saw a river .", "nobody met the [MASK] .", "[BLANK] again ."]
    expected = run("fill", *texts, *tiny)
    assert len(expected.splitlines()) == 3
    content = "\ufeff" + texts[0] + "\r\n\n" + texts[1] + "\n" + texts[2]  # as some editors leave it
    (tmp_path / "texts.txt").write_bytes(content.encode())
    first, rest = expected.split("\n", maxsplit=1)
    expected = f"{first}\n\n{rest}"  # an empty result for the empty line
    assert run("fill", "--file", str(tmp_path / "texts.txt"), *tiny) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode()), encoding="ascii"))
    assert run("fill", "--file", "-", *tiny) == expected


def test_forbidden_words_are_not_filled_in(objects, tiny):
    """The text itself may contain them."""
    text = "the king saw [MASK] city of paris today ."
    assert objects("fill", text, *tiny)[0]["fillings"] == ["the"]
    for each in objects("fill", text, "--num-alternatives", "9", "--forbid", "the", "king", *tiny):
        assert each["text"].startswith("the king saw ")
        assert each["fillings"][0] not in ("the", "king")


# ---- score ----------------------------------------------------------------------------------------------------------


def test_a_score_has_its_kind_interval_and_protocol(objects, tiny):
    sentences = [SENTENCE, "paris king the city old saw of today the ."]
    real, shuffled, total = objects("score", *sentences, *tiny)
    assert real.keys() == {"line", "input", "rank", *(field.name for field in dataclasses.fields(TextScore))}
    assert total["total"]["nats"] == pytest.approx(real["nats"] + shuffled["nats"])
    assert real["num_unknown"] == 0
    assert real["perplexity_per_token"] < shuffled["perplexity_per_token"]
    assert real["ci95"][0] < real["nats"] < real["ci95"][1]
    assert (real["kind"], real["quantity"], real["conditional_on"]) == ("bound", "continuous-time bound", "length")
    assert {"definition", "special_tokens", "num_draws", "length", "interval"} <= real["protocol"].keys()
    assert [real["text"], shuffled["text"]] == sentences


def test_the_nats_of_tokens_sum_to_the_score(objects, run, tiny):
    [score] = objects("score", SENTENCE, "--tokens", *tiny)
    assert [piece for piece, _ in score["tokens"]] == SENTENCE.split()
    assert sum(nats for _, nats in score["tokens"]) == pytest.approx(score["nats"])
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


def test_scores_come_from_a_file_with_whatever_is_in_it(objects, tiny, tmp_path):
    sentences = ["nobody", "🙂🙂", "Ünïcödé „x“", "[bold]the king[/bold]", "a\u2028b", "x" * 3000]
    (tmp_path / "lines.txt").write_text("\n\n".join(sentences), encoding="utf-8")
    *scores, total = objects("score", "--file", str(tmp_path / "lines.txt"), "--precision", "1", *tiny)
    assert [score["input"] for score in scores] == "\n\n".join(sentences).split("\n")
    assert [score.get("text") for score in scores[::2]] == sentences
    assert total["total"]["num_texts"] == 6


def test_an_exact_score_is_shown_without_interval_and_draws(run, capsys, tiny, tmp_path):
    _, about = run("score", SENTENCE, "--order", "entropy", *tiny).splitlines()
    assert re.search(r"^    \d+\.\d nats, .* \(exact likelihood, entropy, given length\)$", about)
    (tmp_path / "lines.txt").write_text(f"{SENTENCE}\n")
    main(["score", "--file", str(tmp_path / "lines.txt"), "--order", "entropy", *tiny])
    printed = capsys.readouterr()
    assert re.fullmatch(rf"\d+\.\d\d nats, perplexity [\d.]+  {re.escape(SENTENCE)}\n", printed.out)
    assert "[" not in printed.err


def test_a_line_that_is_less_precise_than_asked_or_unknown_is_said(capsys, tiny, tmp_path):
    (tmp_path / "lines.txt").write_text(f"{SENTENCE}\nthe 🍕 .\n")
    main(["score", "--file", str(tmp_path / "lines.txt"), "--precision", "1e-9", "--max-draws", "60", *tiny])
    printed = capsys.readouterr()
    assert all(re.match(r"\d+\.\d\d nats \[\S+, \S+\]\*, perplexity", line) for line in printed.out.splitlines())
    assert printed.err.endswith("; 2 less precise than requested (*); 1 unknown tokens\n")


def test_compared_texts_show_their_difference_to_the_first(capsys, tiny):
    main(["score", SENTENCE, "the king .", "--paired", "--order", "entropy", *tiny])
    shown = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in shown if "against" in line] == [shown[-1].strip()]
    assert re.fullmatch(r"    [+-]\d+\.\d nats against the first text", shown[-1])


def test_choices_show_small_probabilities_and_unknown_options(run, capsys, tiny, tmp_path):
    lines = run("choose", "the old\tking [BLANK] the city of paris today .", "saw", "river\triver", "🍕", *tiny)
    assert re.search(r"^\d\.\d{4}  saw$", lines, flags=re.MULTILINE)
    assert "  🍕  (1 unknown tokens)" in lines
    assert re.search(r"^\S+  river\triver$", lines, flags=re.MULTILINE)  # the tab stays
    assert _shown_choice({"probability": 1e-9, "option": "saw", "num_unknown": 0}) == "<.0001  saw"
    (tmp_path / "lines.txt").write_text("the king saw a river\n")
    with pytest.raises(SystemExit):
        main(["choose", "--file", str(tmp_path / "lines.txt"), *tiny])
    assert "line 1: no tab in 'the king saw a river'; give a text and two or more" in capsys.readouterr().err


def test_a_prompt_that_include_swallows_is_said(capsys, tiny):
    main(["generate", "--length", "9", "--include", "river", "the old king", *tiny])
    assert "'the old king' is taken as a word of --include or --forbid; put a prompt before" in capsys.readouterr().err


def test_a_file_continued_with_a_random_seed_equals_an_undisturbed_one(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "in").write_text("the old king\nnobody\na river\n")
    for command, *options in (["generate", "--max-new-tokens", "4"], ["rewrite", "--strength", "0.9"]):
        arguments = [command, *options, "--file", str(tmp_path / "in"), "--json", *tiny]
        out, whole = str(tmp_path / f"{command}.out"), str(tmp_path / f"{command}.whole")
        with monkeypatch.context() as patched:
            patched.setattr(lines._Output, "save", _stopping_after(1, lines._Output.save))
            with pytest.raises(SystemExit):
                main([*arguments, "--output", out])
        main([*arguments, "--output", out])
        found = [json.loads(line) for line in (tmp_path / f"{command}.out").read_text().splitlines()]
        main([*arguments, "--output", whole, "--seed", str(found[0]["seed"])])
        assert found == [json.loads(line) for line in (tmp_path / f"{command}.whole").read_text().splitlines()]
        assert "stopped after line 1; the same command continues" in capsys.readouterr().err


def _stopping_after(number, save):
    """Saves so many times, then stops as Ctrl-C does."""
    calls = itertools.count(1)

    def saved(self, chunk):
        save(self, chunk)
        if next(calls) == number:
            raise KeyboardInterrupt

    return saved


def test_markup_is_printed_literally(run, tiny):
    text = "[bold]the[/bold] [/red] :sea: ."
    assert run("score", text, "--precision", "1", *tiny).splitlines()[0] == text


def test_an_infinite_number_is_still_json(objects, tiny, monkeypatch):
    """A long web address is one word of more than 709 nats, whose perplexity no float64 holds."""
    [known] = trained().score(["nobody"])
    monkeypatch.setattr(inference_score, "score", lambda *_, **__: [replace(known, perplexity_per_word=math.inf)])
    [score] = objects("score", "nobody", *tiny)
    assert score["perplexity_per_word"] is None


# ---- info and help --------------------------------------------------------------------------------------------------


def test_info_describes_a_model(run, objects):
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
    entries = re.split(r"\n(?=-[a-z-])", "\n".join(line for line in lines if line.strip("-─")))
    assert len(entries) > 1
    for entry in entries:
        assert "None" not in entry
        assert "(default: )" not in entry
        text = re.sub(r"\s*\((default: \S+|required)\)\s*$", "", entry)
        words = re.sub(r"\s*\n\s*", "  ", text).partition("  ")[2]
        assert len(words.split()) >= 2, entry


def defaults_of(command: type) -> dict[str, object]:
    """The defaults of a command's options, those in groups included."""
    found = {}
    for field in dataclasses.fields(command):
        group = field.default_factory
        found |= {field.name: field.default} if group is dataclasses.MISSING else defaults_of(group)
    return found


def test_the_commands_have_the_defaults_of_the_library():
    for command, function in (
        (Generate, Model.generate),
        (Rewrite, Model.rewrite),
        (Fill, Model.fill),
        (Score, Model.score),
        (Choose, Model.choose),
        (Evaluate, diffusionbert.evaluate),
    ):
        defaults = {name: given.default for name, given in inspect.signature(function).parameters.items()}
        options = defaults_of(command)
        spelled = {"length": {"corpus": None}, "num_alternatives": {1: None}, "precision": {"0.5%": 0.005}}
        spelled["top_k"] = {0: None}
        if command is Rewrite:
            spelled["num_return_sequences"] = {1: None}
        shared = (defaults.keys() & options.keys()) - {"texts", "data", "model", "device"}
        assert len(shared) >= 2
        for name in shared:
            assert spelled.get(name, {}).get(options[name], options[name]) == defaults[name], (command, name)


def test_version_and_top_level_help(run, help_of):
    assert run("--version") == f"diffusionbert {diffusionbert.__version__}\n"
    shown = help_of()
    assert all(name in shown for name in (*COMMANDS, "--plugin", "--verbosity", "--version"))


QUICK = """
import contextlib, io, sys
import diffusionbert
from diffusionbert.cli.main import main

assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
for command in sys.argv[1:]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([command, "--help"])
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        main([command, "--nonsense"])
assert not {"torch", "transformers"} & sys.modules.keys()
"""


def test_help_does_not_wait_for_torch():
    done = subprocess.run([sys.executable, "-c", QUICK, *COMMANDS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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


def test_a_plugin_registers_parts_of_ones_own(run, wrong, tmp_path, tiny, monkeypatch):
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(Sampler.registry, "_members", {**Sampler.registry._members})
    options = ["generate", "--length", "6", "--seed", "1", "--steps", "4", *tiny]
    assert "unknown sampler 'half-hearted'" in wrong(*options, "--sampler", "half-hearted")
    own = run("--plugin", "my_plugin", *options, "--sampler", "half-hearted")
    assert own == run(*options, "--sampler", "ancestral", "--plugin=my_plugin")


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
    command = [sys.executable, "-m", "diffusionbert", "generate", "--length", "5", "--seed", "1", *tiny]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == trained().generate(length=5, seed=1)[0] + "\n"


# ---- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    {
        "": "generate, fill, rewrite, score",
        "nonsense": "nonsense",
        "generate --nonsense": "--nonsense",
        "info 'stray words'": "stray words",
        "generate --steps many": "--steps",
        "generate --seed": "--seed",
        "score --precision high 'a .'": "--precision",
    }.items(),
)
def test_words_that_are_no_option_are_named_in_one_line(wrong, command, message):
    line = wrong(*shlex.split(command))
    assert message in line
    assert "--help" in line
    assert not re.search(r"[│╭╰─\x1b]", line)


@pytest.mark.parametrize(
    ("command", "message"),
    {
        "genrate": "unknown command 'genrate' (did you mean generate?); see diffusionbert --help",
        "generate --temprature 1": "unknown option --temprature (did you mean --temperature?)",
        "train --output x --validation y --validation-sentences 3": "unknown option --validation-sentences",
        "train --output x --batch-token 3": "unknown option --batch-token (did you mean --batch-tokens?)",
        "train": "--output PATH is required; see diffusionbert train --help",
        "generate --steps many": "--steps must be a whole number, got 'many'",
        "generate --temperature hot": "--temperature must be a number, got 'hot'",
        "score a --format xml": "--format must be one of",
        "score a --json --format csv": "--json and --format csv contradict each other; give one of them",
        "fill --seed": "--seed needs a value",
    }.items(),
)
def test_a_misspelled_word_gets_a_suggestion(wrong, command, message):
    assert message in wrong(*shlex.split(command))


def test_messages_speak_of_options():
    message = "`top_k` must be >= 1, use `block=32`, not `nonsense` or `nonsense=1`"
    assert (
        in_flags(message, {"top_k", "block"}) == "--top-k must be >= 1, use --block 32, not `nonsense` or `nonsense=1`"
    )


@pytest.mark.parametrize("arguments", [["fill", "--seed", "x", "a"], ["nonsense"], ["generate", "--seed"]], ids=str)
def test_errors_are_the_same_on_a_terminal_without_boxes(arguments):
    command = [sys.executable, "-m", "diffusionbert", *arguments]
    said = [
        subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, timeout=60).stderr
        for encoding in ("ascii", "utf-8")
    ]
    assert said[0] == said[1]
    assert b"---" not in said[0]


REFUSALS = {
    "generate --length 0": "--length must be >= 1 token, got 0",
    "generate --length many": "'many'",
    "generate --length 9-3": "9-3",
    "generate --length 23": "23 tokens, but this model reads at most 22",
    "generate --length 99999": "--block",
    "generate -n 0": "0",
    "generate -n 1000000000": "1000000000",
    "generate --sampler nonsense": "unknown sampler 'nonsense'; known: ancestral",
    "generate --sampler refinement": "for a model trained by SUNDAE",
    "generate --sampler left-to-right": "for a model that is a decoder",
    "generate --sampler ancestral:threshold=0.5": "'ancestral' has no setting 'threshold'; it has none",
    "generate --sampler confidence:threshold=5": "threshold must be between 0.0 and 1.0",
    "generate --sampler remasking:eat=0.5": "did you mean 'eta'",
    "generate --sampler remasking:eta=5": "eta must be between 0 and 1, got 5.0",
    "generate --steps 0": "steps",
    "generate --steps 100000000000": "steps",
    "generate --temperature 0": "temperature",
    "generate --temperature nan": "temperature",
    "generate --top-p 2": "--top-p",
    "generate --top-k=-1": "--top-k must be >= 1, or 0 for all tokens, got -1",
    "generate --block 0": "block",
    "generate --block 30 --length 60": "block",
    "generate --block 5 --length 60 --include river": "with words to include",
    "generate 'the old king saw' --length 3": "--length must be >= 5 with a prompt of 4 tokens",
    "generate 'caf\udce9' --length 6": "UTF-8",
    "generate --include king --forbid King": "'king'",
    "generate --include antidisestablishmentarianism --length 3": "free positions of sequence 0",
    "generate --include ''": "words to include or forbid must not be empty, got ''",
    "generate --strength 0.5": "--strength",
    "generate --max-new-tokens 0": "--max-new-tokens must be >= 1",
    "generate --max-new-tokens 5 --length 9": "at most one of --max-new-tokens and --length",
    "generate --source 'the king'": "pairs",
    "generate --num-candidates 3": "1 without a --source, got 3",
    "generate --watch --json": "--json",
    "generate --watch -n 3": "-n",
    "generate --device nonsense": "nonsense",
    "generate --device meta": "meta",
    "rewrite": "--file",
    "rewrite ''": "nothing to rewrite",
    "rewrite 'the king .' --strength 1.5": "strength",
    "rewrite 'the king .' --length 5": "--length",
    "rewrite 'the king .' -n 0": "0",
    "rewrite 'the king .' --forbid ''": "words to include or forbid must not be empty",
    "fill 'no blank here .'": "[MASK] for one token, [BLANK]",
    "fill": "--file",
    "fill 'the [CLS] [MASK] .'": "special tokens",
    "fill 'the [BLANK] .' --max-blank-tokens 50": "--max-blank-tokens must be <= 22, the most tokens",
    "fill 'the [MASK] .' --num-alternatives 0": "--num-alternatives must be >= 1, got 0",
    "fill 'the [MASK] .' --max-blank-tokens 0": "--max-blank-tokens must be >= 1, got 0",
    "fill 'the [MASK] .' --json 'a [MASK] .'": "'a [MASK] .' is separated from the other arguments",
    "fill 'the [MASK] .' --forbid ''": "words to include or forbid must not be empty, got ''",
    "fill 'caf\udce9 [MASK] .'": "UTF-8",
    "fill 'the [MASK] .' --device cuda:99": "cuda:99",
    "score": "--file",
    "score 'the king .' '  '": "text 2 has no tokens",
    f"score 'the king .' '{'king ' * 30}' --overlong error": "text 2",
    "score 'the king .' --steps 0": "--steps must be a whole number >= 1",
    "score 'the king .' --steps many": "--steps must be a whole number",
    "score 'the king .' --order left-to-right --steps 8": "at most one of --order and --steps",
    "score 'the [MASK] .'": "a scored text must not contain [MASK], got 'the [MASK] .'; use",
    "choose 'the [BLANK] .'": "two or more",
    "choose 'the [BLANK] .' king": "a text needs two or more options, got 1 for 'the [BLANK] .'",
    "choose 'the [BLANK] .' king king": "options must differ, got 'king' 2 times",
    "choose 'the [MASK] .' king queen": "use [BLANK] for the option",
    "choose": "--file",
    "score 'the king .' --precision 0": "precision",
    "score 'caf\udce9 .'": "UTF-8",
    "score 'the king .' --device nonsense": "nonsense",
}


@pytest.mark.parametrize("command", REFUSALS, ids=lambda command: ascii(command)[:50])
def test_wrong_use_is_refused_in_one_line(wrong, tiny, command):
    assert REFUSALS[command] in wrong(*shlex.split(command), *tiny)


REMEDIES = {
    "generate --length 23": ("ask for fewer", "generate --length 22"),
    "generate --length 30 --seed 0": ("--block", "generate --length 30 --seed 0 --block 8"),
    "generate 'the old king saw' --length 3": (
        "raise it, or shorten the prompt",
        "generate 'the old king saw' --length 5",
    ),
    "generate 'a [MASK] .'": ("use `fill`", "fill 'a [MASK] .'"),
    "generate --top-k=-1": ("0 for all tokens", "generate --length 5 --top-k 0"),
    "generate --length 5 --max-new-tokens 4": ("at most one of", "generate --length 5"),
    "generate --steps 0": (
        "--steps must be between 1 and 1000000, got 0; 128 is usual",
        "generate --length 5 --steps 128",
    ),
    "generate -n 0": ("--num-return-sequences must be between 1 and 100000", "generate --length 5 -n 1"),
    "generate --temperature 0": ("use --top-k 1 for greedy", "generate --length 5 --top-k 1"),
    "generate --sampler remasking:eat=0.5": ("did you mean 'eta'", "generate --length 5 --sampler remasking:eta=0.5"),
    "rewrite 'the king .' --strength 1.5": ("0.4 masks 40 %", "rewrite 'the king .' --strength 0.4"),
    "fill 'no blank here .'": ("use [MASK] for one token, [BLANK]", "fill 'no [BLANK] here .'"),
    "fill 'a [MASK] .' --forbid ''": ("leave it out", "fill 'a [MASK] .'"),
    "score 'the [BLANK] .'": ("use `fill`", "fill 'the [BLANK] .'"),
    "score 'the king .' --order entropy --steps 8": ("at most one", "score 'the king .' --order entropy"),
    f"score '{'king ' * 30}' --overlong error": ("split it", f"score '{'king ' * 15}' '{'king ' * 15}'"),
    "score 'the king .' --device nonsense": ("use cpu", "score 'the king .' --device cpu"),
    "choose 'the [BLANK] .' king": ("two or more", "choose 'the [BLANK] .' king queen"),
    "choose 'the [BLANK] .' king ''": ("leave it out", "choose 'the [BLANK] .' king queen"),
    "choose 'the [BLANK] .' king king queen": ("leave all but one out", "choose 'the [BLANK] .' king queen"),
    "choose 'the [MASK] .' king queen": ("use [BLANK] for the option", "choose 'the [BLANK] .' king queen"),
    "fill 'a [MASK] .' --top-k 5 'the [MASK] .'": (
        "put all of them before the options",
        "fill 'a [MASK] .' 'the [MASK] .' --top-k 5",
    ),
    "genrate": ("did you mean generate?", "generate --length 5"),
    "fill 'a [MASK] .' --num-alternative 2": (
        "did you mean --num-alternatives?",
        "fill 'a [MASK] .' --num-alternatives 2",
    ),
}
"""What is refused, the remedy that the message names, and the remedy carried out."""


@pytest.mark.parametrize("command", REMEDIES, ids=lambda command: command[:50])
def test_the_remedy_of_a_message_works(wrong, tiny, capsys, command):
    advice, remedy = REMEDIES[command]
    assert advice in wrong(*shlex.split(command), *tiny)
    main([*shlex.split(remedy), *tiny])
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "is empty"),
    ],
    ids=["missing", "empty"],
)
def test_a_bad_file_is_refused_in_one_line(wrong, tiny, tmp_path, content, message):
    file = tmp_path / "file.txt"
    if content is not None:
        file.write_bytes(content)
    assert message in wrong("score", "--file", str(file), *tiny)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(range(256)), "not UTF-8"),
        ("café".encode("latin-1"), "line 1: not UTF-8"),
        ("the [MASK]".encode("utf-16"), "not UTF-8"),
        (b"[MASK] " * 20_000, "line 1: more than 100000 characters; split it"),
        (b"\x00\x01\x02", "line 1: text 1 has no tokens"),
    ],
    ids=["binary", "latin-1", "utf-16", "huge line", "control characters"],
)
def test_a_bad_line_of_a_file_does_not_stop_the_others(capsys, tiny, tmp_path, content, message):
    (tmp_path / "file.txt").write_bytes(content + b"\nthe king .\n")
    with pytest.raises(SystemExit) as caught:
        main(["score", "--file", str(tmp_path / "file.txt"), "--precision", "1", *tiny])
    printed = capsys.readouterr()
    assert caught.value.code == 1
    assert printed.out.splitlines()[-1].endswith("the king .")
    assert message in printed.err
    assert "lines failed; their results are empty" in printed.err.splitlines()[-1]


def test_control_characters_of_a_scored_text_do_not_reach_the_terminal(capsys, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    (tmp_path / "file.txt").write_text("the king \x1b[31m saw \x07 a river .\n")
    for options in ([], ["--tokens"]):
        main(["score", "--file", str(tmp_path / "file.txt"), *options, *tiny])
        printed = capsys.readouterr().out
        assert "river" in printed
        assert "\x1b" not in printed
        assert "\x07" not in printed


def test_a_folder_two_sources_and_a_bad_stdin_are_refused(wrong, tiny, tmp_path, monkeypatch):
    assert "Is a directory" in wrong("score", "--file", str(tmp_path), *tiny)
    for command in ("fill", "score", "rewrite"):
        assert "give only one of them" in wrong(command, "the [MASK] .", "--file", "x", *tiny)
    for stdin in (io.TextIOWrapper(io.BytesIO(b"")), None):  # None: it was closed
        monkeypatch.setattr(sys, "stdin", stdin)
        assert "empty" in wrong("score", "--file", "-", *tiny)


@pytest.mark.parametrize("command", [["generate"], ["fill", "a [MASK] ."], ["score", "a ."], ["info"]], ids=" ".join)
def test_a_missing_model_is_refused_in_one_line(wrong, tmp_path, command):
    for name in ("no/such-model", "no such model", "x" * 300):  # more in tests/test_model.py
        assert "no model at" in wrong(*command, "--model", name)
    assert str(tmp_path) in wrong(*command, "--model", str(tmp_path))
    (tmp_path / "experiment.json").write_text("{}")
    assert "is a run without a model yet" in wrong(*command, "--model", str(tmp_path))


def test_a_model_of_pairs_needs_a_source_that_fits(wrong):
    model = ["--model", str(run_of("pairs")), "--seed", "0"]
    assert "source" in wrong("rewrite", SENTENCE, *model)
    line = wrong("generate", "--source", "king " * 40, "--length", "5", *model)
    assert "source and text together would have 46 tokens" in line


KINDS = {"vectors": "bound", "decoder": "exact", "unrolled": None, "learned": "bound"} | dict.fromkeys(
    ("mouth", "mask-predict"), "bound"
)
"""The kind of likelihood of models by other methods, if they have any."""


@pytest.mark.parametrize(("kind", "likelihood"), KINDS.items())
def test_every_command_works_with_every_method_or_says_why_not(objects, wrong, tmp_path, kind, likelihood):
    model = ["--model", str(run_of(kind))]
    [facts] = objects("info", *model)
    assert facts["objective"]["name"]
    texts = objects("generate", "-n", "2", "--length", "6", "--steps", "5", "the old king", *model)
    assert all(each["text"].startswith("the old king") and each["length"] == 6 for each in texts)
    assert objects("doctor", "-n", "4", "--length", "6", "--steps", "4", *model)
    if likelihood is None:
        assert "no likelihood" in wrong("score", SENTENCE, *model)
    else:
        [score] = objects("score", SENTENCE, "--precision", "1.0", *model)
        assert score["kind"] == likelihood
    if kind in ("vectors", "decoder", "unrolled"):
        assert "[MASK]" in wrong("fill", "a [MASK] .", *model)
        assert "rewrite" in wrong("rewrite", SENTENCE, *model)
    else:
        assert objects("fill", "the [MASK] saw a river .", *model)
    quick = ["--sentences", "4", "--samples", "4", "--length", "6", "--steps", "4", "--max-draws", "32"]
    [report] = objects("evaluate", *model, "--data", str(corpus()), "--output", str(tmp_path / "evaluation"), *quick)
    text = json.dumps(report)
    assert (f'"{likelihood}"' in text) if likelihood else ("no likelihood" in text)
    assert (tmp_path / "evaluation" / "evaluation.json").exists()


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


def test_masked_positions_are_dim_and_tokens_are_not():
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


def test_tokens_of_many_nats_are_red_and_others_green():
    line = colored([("the", 0.1), ("king", 12.0), ("##dom", 5.0)])
    assert line.plain == "the(0.1) king(12.0)dom(5.0)"
    colors = {line.plain[span.start : span.end].strip(): str(span.style) for span in line.spans}
    red, green = ([int(part) for part in re.findall(r"\d+", colors[word])] for word in ("king", "the"))
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


def test_a_closed_pipe_is_no_error(monkeypatch, tiny):
    monkeypatch.setattr(sys, "stdout", Unread())
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--length", "4", *tiny])
    assert caught.value.code == 0
    assert said.closed  # or the interpreter would complain of the pipe once more


def test_the_toy_english_has_the_lengths_and_tokens_that_tests_assume():
    """What the tests above rest on: lengths of 5 to 17 tokens, words that are one piece each."""
    assert {len(sentence.split()) for sentence in toy_sentences(400)} <= set(range(5, 18))
    vocabulary = model_of("linear").engine.vocabulary
    assert all(len(vocabulary.pieces(word)) == 1 for word in SENTENCE.split())


@pytest.mark.parametrize(("policy", "expected"), [(None, "1000"), ("PASSIVE", None)])
def test_threads_spin_briefly_between_kernels_unless_told_otherwise(policy, expected, monkeypatch, capsys):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    with pytest.raises(SystemExit):
        main(["info", "--help"])
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    assert "usage" in capsys.readouterr().out
