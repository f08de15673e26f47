"""Every public tensor argument is checked against its axes while the tests run."""

import logging
import os
import sys

from jaxtyping import install_import_hook

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a network, even by mistake
if sys.version_info >= (3, 11):  # before, beartype does not know Unpack, which typing does not have yet
    install_import_hook("diffusionbert", "beartype.beartype")

import pytest
import torch
from shared import folder

folder()  # in the process that starts the workers, which inherit it

# Many small tests on few cores: pytest's workers are the parallelism.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_initialization() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _verbosity_of_a_library() -> None:
    """Commands that ran in this process before leave their handler and level behind."""
    logger = logging.getLogger("diffusionbert")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
