"""An S3 of this process (moto): a fixture for tests that read and write objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import requests


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "ACCESS_KEY_ID": "k",
        "SECRET_ACCESS_KEY": "s",
        "ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fs = fsspec.filesystem("s3")
    fs.mkdir("bucket")
    yield fs
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    requests.post(f"http://{host}:{port}/moto-api/reset", timeout=10)  # it keeps its objects beyond its end
    server.stop()
