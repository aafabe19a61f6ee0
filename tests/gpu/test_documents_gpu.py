"""The documents' Python blocks that need a GPU."""

import pytest
from helpers.documents import python_blocks, run_block

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block", python_blocks(needs_gpu=True))
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_block(block, tmp_path)
