"""Requests drawn from the OpenAPI description: no failure of the server, no hang, only answers that it describes."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def described(served):
    return schemathesis.openapi.from_url(f"{served[0]}/openapi.json")


described_api = schemathesis.pytest.from_fixture("described")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # the server's thread may
@described_api.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_makes_the_server_fail(case, served):
    response = case.call(base_url=served[0], timeout=30)
    case.validate_response(response, checks=CHECKS)
