"""Every public tensor argument is checked against its axes while the tests run."""

import logging
import os

from jaxtyping import install_import_hook

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach a network, even by mistake
install_import_hook("diffusionbert", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402
from shared import folder  # noqa: E402

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
