"""Files that are whole or not there: folders and JSON under a full disk, tensors to the last bit, no pickle."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from backbones import backbone_of
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import diffusionbert.storage.files as files
from diffusionbert.storage.files import (
    atomic_folder,
    load_tensors,
    read_json,
    save_tensors,
    write_json,
)
from diffusionbert.training.checkpoint import optimizer_state, set_optimizer_state, set_weights, weights_of
from diffusionbert.training.run_folder import RunFolder


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def old(tmp_path) -> Path:
    """A folder that was written before."""
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "weights").write_text("old")
    return tmp_path / "model"


# ---- run folders ------------------------------------------------------------------------------------------------


def test_a_run_finds_its_model_or_reports_that_there_is_none_yet(tmp_path):
    run = RunFolder(tmp_path)
    assert run.find_model() is None
    assert RunFolder(Path("x" * 5000)).find_model() is None
    write_json(run.config, {})
    with pytest.raises(ValueError, match="is a run without a model yet; wait until it ends, or --resume it"):
        run.find_model()
    run.model.mkdir()
    assert run.find_model() == tmp_path / "model"


def test_the_test_of_a_writable_folder_leaves_nothing_behind(tmp_path):
    files.require_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/inside/of", "x" * 300])
def test_a_folder_that_is_not_writable_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"^'.*' is not writable \([A-Z].*\); choose another --output$"):
        files.require_writable(tmp_path / name)


# ---- folders ----------------------------------------------------------------------------------------------------


def test_a_written_folder_replaces_the_old_one(old):
    with atomic_folder(old) as folder:
        assert content(old) == {"weights": "old"}
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text("new")
    assert content(old) == {"inner/weights": "new"}
    assert [path.name for path in old.parent.iterdir()] == ["model"]


def test_parent_folders_are_created(tmp_path):
    with atomic_folder(tmp_path / "a" / "b" / "c") as folder:
        (folder / "file").write_text("text")
    assert content(tmp_path) == {"a/b/c/file": "text"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), ValueError("wrong")], ids=repr)
def test_a_failed_write_leaves_only_the_old_folder(old, error):
    def write() -> None:
        with atomic_folder(old) as folder:
            (folder / "weights").write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert content(old.parent) == {"model/weights": "old"}


def test_a_disk_that_is_full_while_tensors_are_written_leaves_the_old_folder(old, monkeypatch):
    def save_file(tensors, path):
        Path(path).write_bytes(b"half")
        full_disk()

    monkeypatch.setattr(files, "save_file", save_file)
    with pytest.raises(OSError, match="No space left"), atomic_folder(old) as folder:
        save_tensors({"a": torch.zeros(3)}, folder / "weights")
    assert content(old.parent) == {"model/weights": "old"}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_of_a_folder_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        with atomic_folder(tmp_path / "model") as folder:
            save_tensors({"a": torch.zeros(3)}, folder / "weights")
            (folder / "other").write_text("")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "model").iterdir()}
    assert modes == dict.fromkeys(("weights", "other"), 0o666 & ~umask)


@pytest.mark.parametrize("error", [SafetensorError, Exception])
def test_what_rust_raises_while_a_folder_is_written_is_an_oserror_in_one_line(old, error):
    with pytest.raises(OSError, match=r"'.*model' cannot be written \(full\)$"), atomic_folder(old):
        raise error("full\nbacktrace")
    assert content(old.parent) == {"model/weights": "old"}


def test_a_disk_that_is_full_while_files_are_synced_leaves_the_old_folder(old, monkeypatch):
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"), atomic_folder(old) as folder:
        (folder / "weights").write_text("new")
    assert content(old.parent) == {"model/weights": "old"}


def test_the_remains_of_a_killed_write_are_removed_by_the_next(old):
    """A kill in a write leaves `.unfinished`, a kill between the renames `.replaced`."""
    for name in ("model.unfinished", "model.replaced"):
        (old.parent / name).mkdir()
        (old.parent / name / "litter").write_text("litter")
    with atomic_folder(old) as folder:
        (folder / "weights").write_text("new")
    assert content(old.parent) == {"model/weights": "new"}


class Killed(BaseException):
    """What no handler of errors catches."""


@pytest.fixture
def torn(old, monkeypatch) -> Path:
    """What is left of a folder if a kill comes between the two renames of its replacement."""
    rename = Path.rename

    def killed(self, target):
        if self.name.endswith(".unfinished"):
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        patched.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed), atomic_folder(old) as folder:
            (folder / "weights").write_text("new")
    assert content(old.parent) == {"model.replaced/weights": "old", "model.unfinished/weights": "new"}
    return old


def test_a_kill_between_the_renames_leaves_the_old_model(torn):
    run = RunFolder(torn.parent)
    write_json(run.config, {})
    found = run.find_model()
    assert found is not None
    assert content(found) == {"weights": "old"}
    assert not torn.exists()  # reading moves nothing: a run may be about to rename


def test_a_failed_write_after_a_kill_between_the_renames_leaves_the_old_folder(torn):
    with pytest.raises(OSError, match="No space left"), atomic_folder(torn):
        full_disk()
    assert content(torn.parent) == {"model/weights": "old"}


def test_a_kill_between_the_renames_of_a_checkpoint_leaves_the_old_one(tmp_path):
    run = run_of(tmp_path, range(10, 11))
    run.checkpoint(10).rename(run.checkpoints / "step-00000010.replaced")
    assert run.resume_candidates() == [run.checkpoint(10)]
    assert run.checkpoint(10).is_dir()


def test_a_rename_that_fails_leaves_the_old_folder(old, monkeypatch):
    rename = Path.rename

    def failing(self, target):
        if self.name.endswith(".unfinished"):
            full_disk()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="No space left"), atomic_folder(old) as folder:
        (folder / "weights").write_text("new")
    assert content(old.parent) == {"model/weights": "old"}


# ---- JSON -------------------------------------------------------------------------------------------------------


def test_json_is_read_as_it_was_written(tmp_path):
    value = {"text": "Λ \n\u2028", "number": 0.1, "list": [1, None, True]}
    write_json(tmp_path / "file.json", value)
    assert read_json(tmp_path / "file.json") == value
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]


def test_a_failed_write_leaves_the_old_json_file(tmp_path, monkeypatch):
    write_json(tmp_path / "last.json", {"checkpoint": "old"})
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "last.json", {"checkpoint": "new"})
    monkeypatch.undo()
    assert read_json(tmp_path / "last.json") == {"checkpoint": "old"}
    write_json(tmp_path / "last.json", {"checkpoint": "newer"})
    assert content(tmp_path).keys() == {"last.json"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"a": ', "is not valid JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        (None, "does not exist"),
    ],
)
def test_damaged_json_is_named_in_one_line(tmp_path, text, message):
    if text is not None:
        (tmp_path / "last.json").write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_json(tmp_path / "last.json")
    assert "last.json" in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- run folders ------------------------------------------------------------------------------------------------


def run_of(path: Path, steps: range) -> RunFolder:
    run = RunFolder(path)
    for step in steps:
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "weights.safetensors").write_text(str(step))
    return run


def test_the_best_the_last_and_the_newest_checkpoints_are_kept(tmp_path):
    run = run_of(tmp_path, range(0, 100, 10))
    run.write_pointer("best", run.checkpoint(20))
    run.write_pointer("last", run.checkpoint(60))  # a kill came between a checkpoint and its name
    for name in ("step-00000030.unfinished", "step-00000040.replaced"):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "half").write_text("half")
    run.remove_old_checkpoints(keep=2)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-00000020",
        "step-00000060",
        "step-00000080",
        "step-00000090",
    ]
    assert run.read_pointer("best") == run.checkpoint(20)
    assert run.read_pointer("last") == run.checkpoint(60)


def test_without_pointers_the_newest_checkpoints_are_kept(tmp_path):
    run = run_of(tmp_path, range(3))
    run.remove_old_checkpoints(keep=5)
    assert len(list(run.checkpoints.iterdir())) == 3
    run.remove_old_checkpoints(keep=1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]
    assert run.read_pointer("best") is None


@pytest.mark.parametrize("name", ["step-00000000-before-surgery", ".DS_Store"])
def test_other_files_among_the_checkpoints_are_kept(tmp_path, name):
    run = run_of(tmp_path, range(3))
    mine = run.checkpoints / name
    if name.startswith("."):
        mine.write_text("a file")
    else:
        mine.mkdir()
    run.remove_old_checkpoints(keep=1)
    assert mine.exists()


# ---- tensors ----------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().contiguous().view(torch.uint8)


def test_tensors_are_read_exactly_as_they_were_written(tmp_path):
    tensors = {
        "transposed": torch.randn(3, 4).T,
        "strided": torch.randn(8)[::2],
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(3.0),
        "odd": torch.tensor([torch.nan, torch.inf, -0.0, 1e-45]),
        "none": torch.zeros(0, 3),
    }
    save_tensors(tensors, tmp_path / "file.safetensors")
    loaded = load_tensors(tmp_path / "file.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(bits(loaded[name]), bits(tensor))


@pytest.mark.parametrize("kept", [0, 5, 20, 100, -1])
def test_a_truncated_file_is_named_in_one_line(tmp_path, kept):
    path = tmp_path / "weights.safetensors"
    save_tensors({"weight": torch.randn(100)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"weights.safetensors' cannot be read \(.*; restore it, or create") as caught:
        load_tensors(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"weights\.safetensors' cannot be read"):
        load_tensors(tmp_path / "weights.safetensors")


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match=r"model' cannot be written"), atomic_folder(tmp_path / "model") as folder:
        save_tensors({"weight": torch.zeros(3)}, folder / "no such folder" / "weights.safetensors")


# ---- weights and optimizers -------------------------------------------------------------------------------------


def stirred(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def test_tied_weights_are_stored_once_and_load_back_tied(tmp_path):
    donor, heir = stirred(backbone_of("bert"), 1), stirred(backbone_of("bert"), 2)
    words = donor.get_input_embeddings().weight
    assert donor.get_output_embeddings().weight is words
    save_tensors(weights_of(donor), tmp_path / "weights.safetensors")
    stored = load_file(tmp_path / "weights.safetensors")
    assert len([tensor for tensor in stored.values() if tensor.shape == words.shape]) == 1
    assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in donor.parameters())
    set_weights(heir, stored)
    assert heir.get_output_embeddings().weight is heir.get_input_embeddings().weight
    for mine, theirs in zip(heir.parameters(), donor.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_gathered_parameters_are_copies():
    module = nn.Linear(2, 2)
    weights = weights_of(module)
    stirred(module, 3)
    assert not torch.equal(weights["weight"], module.weight)


def test_wrappers_do_not_change_parameter_names():
    module = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module._orig_mod = module
    assert weights_of(wrapped).keys() == weights_of(module).keys() == {"0.weight", "0.bias"}
    set_weights(wrapped, {name: tensor + 1 for name, tensor in weights_of(module).items()})


@pytest.mark.parametrize(
    ("change", "counts", "first"),
    [
        (lambda weights: weights.pop("bias"), "1 missing, 0 unknown", "bias"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "0 missing, 1 unknown", "extra"),
        (lambda weights: weights.update(other=weights.pop("weight")), "1 missing, 1 unknown", "weight"),
    ],
)
def test_parameters_of_another_network_are_refused(change, counts, first):
    module = nn.Linear(2, 2)
    before = weights_of(module)
    weights = {name: tensor + 1 for name, tensor in before.items()}
    change(weights)
    with pytest.raises(
        ValueError, match=f"do not fit the network: {counts}, first '{first}'; use the settings they were saved with"
    ):
        set_weights(module, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(module).items())


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        module(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def learner() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    module.append(nn.Linear(4, 2).requires_grad_(False))  # never touched by the optimizer
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def test_a_restored_optimizer_continues_exactly(tmp_path):
    module, optimizer = learner()
    steps(module, optimizer, range(5))
    save_tensors(weights_of(module), tmp_path / "weights.safetensors")
    save_tensors(optimizer_state(optimizer, module), tmp_path / "optimizer.safetensors")
    stored = load_tensors(tmp_path / "optimizer.safetensors")
    assert {name.rpartition("/")[2] for name in stored} == {"step", "exp_avg", "exp_avg_sq"}
    resumed, restored = learner()
    steps(resumed, restored, range(90, 92))  # it may have any past
    set_weights(resumed, load_tensors(tmp_path / "weights.safetensors"))
    set_optimizer_state(restored, resumed, stored)
    again = optimizer_state(restored, resumed)
    assert again.keys() == stored.keys()
    for name, tensor in stored.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)
    steps(module, optimizer, range(5, 10))
    steps(resumed, restored, range(5, 10))
    for mine, theirs in zip(resumed.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_unused_optimizer_is_restored(tmp_path):
    """As that of a checkpoint before the first step, whose file has no tensors."""
    module, optimizer = learner()
    save_tensors(optimizer_state(optimizer, module), tmp_path / "optimizer.safetensors")
    stored = load_tensors(tmp_path / "optimizer.safetensors")
    assert stored == {}
    resumed, restored = learner()
    set_optimizer_state(restored, resumed, stored)
    steps(module, optimizer, range(2))
    steps(resumed, restored, range(2))
    for mine, theirs in zip(resumed.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
