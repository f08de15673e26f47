"""A loaded model: its network, tokenizer, token statistics and configuration, and what is made of them when needed.

Generation, infilling and scoring are functions on an `Engine`. It stores nothing about a call, so one engine serves
many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from diffusionbert.data.canvas import target_histogram
from diffusionbert.data.text import MASK
from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.gaussian import Gaussian
from diffusionbert.diffusion.process import Process
from diffusionbert.likelihood.estimate import length_nats
from diffusionbert.networks.attention import keep_masks
from diffusionbert.networks.base import HasBackbone, copy_sharing_parameters
from diffusionbert.networks.captured import Captured, can_compile, compile_layers
from diffusionbert.networks.int8 import int8_copy, leave_int8, pays, use_int8
from diffusionbert.networks.masked import Denoiser, MaskedNetwork
from diffusionbert.networks.remote import Remote, has_float64, working_device
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import Objective, ScoringQuantity, TrainingModule
from diffusionbert.reporting import require_type
from diffusionbert.samplers.base import Sampler, SamplingContext
from diffusionbert.samplers.blocks import Blocks
from diffusionbert.samplers.confidence import Confidence, Criterion
from diffusionbert.samplers.config import SamplingRequest
from diffusionbert.samplers.exact import Exact
from diffusionbert.storage.hub import HubOptions
from diffusionbert.storage.weights import WeightFormat
from diffusionbert.training.model_folder import ModelMetadata, find_model, read_model, restore_beside, save_model

SEQUENCES_AT_ONCE = {"cpu": 32, "cuda": 512}
"""The most sequences that are generated in one batch, by device; the texts do not depend on it."""
CONTINUING = Confidence(Criterion.ENTROPY)
"""The default sampler after a prompt, chosen by a judge's perplexity and entropy (docs/bundled_model.md): the most
certain position is unmasked first, one per call. It is as exact as a random order, in which networks predict worse."""
LOGITS_AT_ONCE = 750_000_000
"""The most positions times tokens for which a batch has probabilities at once: 6 GB in float64."""


@final
class Engine:
    """A loaded model.

    Args:
        metadata: What its folder holds beside the parameters.
        folder: The model folder.
        name: What the model is called in results and messages.
        device: Where the network runs.
        dtype: The type of the network's parameters; None keeps float32, and generates in bfloat16 on a GPU and, where
            that is faster, in integers on a CPU. int8 keeps float32, too, and computes everything in integers.
        compile: Whether to generate with a compiled network on a GPU.
    """

    network: HasBackbone

    def __init__(
        self,
        metadata: ModelMetadata,
        folder: Path,
        name: str,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        compile: bool = False,
    ) -> None:
        self.metadata, self.folder, self.name = metadata, folder, name
        network = metadata.config.make_network(metadata.statistics)
        restore_beside(network, folder, metadata.config)
        self._module: nn.Module = network.eval()
        self._is_masked = isinstance(network, Denoiser)
        self.network = cast("HasBackbone", self._module)
        self._dtype, self._copy = dtype, _SamplingCopy()
        self._compile = compile
        if compile and not self._is_masked:
            raise ValueError("`compile` is for masked language models, and this is none; leave it out")
        self._sampling: nn.Module | None = None
        self.to(device, dtype)
        self.config = metadata.config
        self.statistics = metadata.statistics.padded(len(self.network.allowed))
        self.vocabulary, self.length_histogram = metadata.vocabulary, metadata.length_histogram
        self.paired, self.training_text = metadata.paired, metadata.training_text

    @property
    def device(self) -> torch.device:
        """Where the tensors around the network are: where it runs, or on the CPU if its device has no float64."""
        return working_device(self.network_device)

    @property
    def network_device(self) -> torch.device:
        """Where the network runs."""
        return next(self._module.parameters()).device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Moves the network."""
        device = self.network_device if device is None else torch.device(device)
        chosen = dtype or self._dtype
        if chosen is torch.int8 and device.type != "cpu":
            raise ValueError(f"int8 is for CPUs, and the device is {str(device)!r}; give dtype=torch.bfloat16")
        if self._compile and device.type != "cuda":
            raise ValueError(f"`compile` is for GPUs, and the device is {str(device)!r}; leave it out")
        self._dtype = chosen
        self._module.to(device=device, dtype=torch.float32 if dtype is torch.int8 else dtype)
        if dtype is torch.int8:
            use_int8(self.network.backbone)
        elif dtype is not None:
            leave_int8(self.network.backbone)
        if isinstance(self._module, Remote):
            self._module = self._module.network
        if not has_float64(device):
            self._module = Remote(self._module)
        self.network = cast("HasBackbone", self._module)
        self.__dict__.pop("process", None)
        self.__dict__.pop("scoring_objective", None)

    def with_network(self, network: nn.Module, sampling: nn.Module) -> Engine:
        """The same model, whose network is called through other modules with the same methods.

        Args:
            network: What text is scored and filled with.
            sampling: What text is generated with.
        """
        other = copy(self)
        other._module, other.network, other._sampling = network, cast("HasBackbone", network), sampling
        return other

    def with_steps(self, num_steps: int) -> Engine:
        """The same network scored by the bound over another T; unchanged if its objective has no T."""
        other = copy(self)
        other.config = replace(self.config, objective=self.config.objective.with_steps(num_steps))
        other.__dict__.pop("scoring_objective", None)
        return other

    def save(self, target: Path, form: WeightFormat) -> Path:
        """Writes the model, with its parameters as they are now, as a new model folder."""
        network = self._module.network if isinstance(self._module, Remote) else self._module
        return save_model(network, self.vocabulary, self.folder, target, form)

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(parameter.numel() for parameter in self._module.parameters())

    @property
    def max_positions(self) -> int:
        """The most positions of a sequence, special tokens included: what the network reads and was trained on."""
        return min(self.network.max_length, self.config.data.max_length)

    @property
    def max_length(self) -> int:
        """The most tokens of a text."""
        return self.max_positions - self.vocabulary.num_special(paired=False)

    def sequences_at_once(self, positions: int) -> int:
        """How many sequences of so many positions are generated in one batch."""
        most = SEQUENCES_AT_ONCE.get(self.device.type, SEQUENCES_AT_ONCE["cpu"])
        return max(1, min(most, LOGITS_AT_ONCE // (max(1, positions) * len(self.statistics.allowed))))

    # ---- what is made when needed -----------------------------------------------------------------------------------

    @cached_property
    def process(self) -> Process | Gaussian | None:
        """The forward process, on the network's device."""
        process = self.config.objective.process(self.statistics)
        return process.to(self.device) if isinstance(process, Process) else process

    @property
    def scoring_quantity(self) -> ScoringQuantity:
        """The quantity by which text is scored unless another is asked for; raises ValueError if there is none."""
        return self.config.objective.scoring_quantities(self.config.time).primary

    @cached_property
    def scoring_objective(self) -> Objective[Any]:
        """The objective that estimates the scoring quantity, on the network's device."""
        return self.scoring_quantity.build(self.statistics).to(self.device)

    def module(self, objective: Objective[Any] | None = None) -> TrainingModule:
        """The network with an objective, by default that of the scoring quantity."""
        return TrainingModule(self._module, self.scoring_objective if objective is None else objective.to(self.device))

    def default_sampler(self, steps: int, *, continues: bool) -> Sampler:
        """The sampler of a request that names none: the objective's, or `CONTINUING` where that is equally exact."""
        default, process = self.config.objective.default_sampler(), self.process
        is_equal = isinstance(default, Exact) and isinstance(process, Absorbing) and not process.schedule.by_token
        is_one_by_one = self.config.time is TimeEmbedding.NONE and steps >= self.max_length
        return CONTINUING if continues and is_equal and is_one_by_one else default

    def sampler(
        self, request: SamplingRequest, start_time: float = 1.0, *, continues: bool = False
    ) -> tuple[Sampler, SamplingContext]:
        """The sampler of a request and its context; raises ValueError if the model cannot be sampled like this.

        Args:
            request: Which sampler, with which settings.
            start_time: 1 starts from pure noise, less from a partly masked text.
            continues: Whether a given text is continued.
        """
        objective, process = self.config.objective, self.process
        default = self.default_sampler(request.config.steps, continues=continues)
        sampler = objective.choose_sampler(request.sampler or default)
        if start_time < 1 and not isinstance(process, Process):
            raise ValueError(f"this model does not generate from {MASK}, so it cannot rewrite text; use another model")
        if request.block is not None:
            sampler = Blocks(request.block, sampler)
        context = SamplingContext(
            mask_id=self.statistics.mask_id,
            process=process,
            config=request.config,
            allowed_tokens=self.statistics.allowed.to(self.device),
            forbidden=self.statistics.never_sampled,
            time_agnostic=self.config.time is TimeEmbedding.NONE,
            start_time=start_time,
            max_length=self.max_positions,
            word_vectors=cast("Any", self.network) if isinstance(process, Gaussian) else None,
            causal=objective.is_causal,
        )
        return sampler.resolve(context), context

    def lengths_after(self, source: str | None) -> Tensor | None:
        """The length histogram of texts, for pairs that of the targets of sources about as long; None if unknown."""
        table = self.metadata.source_lengths
        if source is None or table is None or not len(table):
            return self.length_histogram
        return target_histogram(table, len(self.vocabulary.own([source])[0]))

    def length_nats(self, lengths: Tensor) -> Tensor:
        """-log p(length) of texts, as the training corpus has it; 0 for all where one of them is not known."""
        histogram = self.length_histogram
        if histogram is None or int(lengths.max()) >= len(histogram):
            return torch.zeros(len(lengths), dtype=torch.float64)
        return length_nats(histogram, lengths)

    @property
    def sampling_network(self) -> Any:
        """The network as samplers call it.

        On a GPU by CUDA graphs. Unless its type was chosen, in bfloat16 on a GPU, and on a CPU in integers if it pays.
        """
        network = self._module
        if self._sampling is not None:
            return self._sampling
        if not isinstance(network, Denoiser):
            return self.network
        if self.device.type == "cuda":
            return self._copy.of(network, _Capturing(torch.bfloat16 if self._dtype is None else None, self._compile))
        if self.device.type == "cpu" and self._dtype is None and pays(network.backbone):
            return self._copy.of(network, int8_copy)
        return self.network

    # ---- checks -----------------------------------------------------------------------------------------------------

    @property
    def masked_network(self) -> MaskedNetwork | None:
        """The network, if it is a masked language model; None for decoders and word vectors."""
        return cast("MaskedNetwork", self._module) if self._is_masked else None

    def require_single_texts(self, task: str) -> None:
        """Raises ValueError if the model was trained on pairs."""
        if self.paired:
            raise ValueError(
                f"this model was trained on pairs of source and target and cannot {task} single texts; give a `source`"
            )

    def require_positions(self, positions: int, what: str, remedy: str) -> None:
        """Raises ValueError if a sequence has more positions than the model reads at once."""
        if positions > self.max_positions:
            num_tokens = positions - self.max_positions + self.max_length
            raise ValueError(f"{what} {num_tokens} tokens, but this model reads at most {self.max_length}; {remedy}")


class _SamplingCopy:
    """What samplers call instead of a network, made anew when its parameters have changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version: object = None
        self._made: Captured | Denoiser | None = None

    def of(self, network: Denoiser, make: Callable[[Denoiser], Captured | Denoiser]) -> Captured | Denoiser:
        """The network as `make` makes it."""
        version = make, *((one.data_ptr(), one._version) for one in network.parameters())
        with self._lock:
            if self._made is None or self._version != version:
                self._version, self._made = version, make(network)
            return self._made


@dataclass(frozen=True)
class _Capturing:
    """How a network is made whose calls are replayed as CUDA graphs."""

    dtype: torch.dtype | None  # in which it computes; None is that of the network
    compile: bool

    def __call__(self, network: Denoiser) -> Captured:
        copy = copy_sharing_parameters(network) if self.dtype is None else deepcopy(network).to(self.dtype)
        keep_masks(copy.backbone)
        is_compiled = self.compile and can_compile(copy)
        if is_compiled:
            compile_layers(copy)
        return Captured(copy, compiled=is_compiled)


def load_engine(
    name_or_folder: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    compile: bool = False,
    **options: Unpack[HubOptions],
) -> Engine:
    """Opens a model: the bundled one, a run directory, a model folder, or any masked or causal language model."""
    require_type("a model", name_or_folder, (str, Path, type(None)), "a folder or a Hub name")
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = "bundled" if name_or_folder is None else str(name_or_folder)
    if not name.strip():
        raise ValueError("the name of the model is empty; give a folder or a Hub name, or None for the bundled model")
    folder = find_model(name, **options)
    return Engine(read_model(folder), folder, name, chosen, dtype, compile=compile)
