"""A checkpoint whose weights were damaged on the way is refused when it is loaded."""

from __future__ import annotations

import pytest

from workbench.errors import ModelError
from workbench.model.load import DEMO_MODEL, load_model

DAMAGED_AT = 3_000_000  # inside the weights


def test_weights_that_are_no_numbers_are_refused_and_not_run(tmp_path):
    damaged = bytearray(DEMO_MODEL.read_bytes())
    damaged[DAMAGED_AT : DAMAGED_AT + 1000] = b"\xff" * 1000
    (tmp_path / "damaged.nemo").write_bytes(damaged)
    with pytest.raises(ModelError, match=r"damaged\.nemo is damaged: \d+ of \d+ weights of encoder\.\S+ are NaN"):
        load_model(str(tmp_path / "damaged.nemo"), device="cpu")


@pytest.mark.parametrize("size", [0, 700, 6_000_000])
def test_a_file_that_was_cut_short_is_one_typed_error(tmp_path, size):
    (tmp_path / "cut.nemo").write_bytes(DEMO_MODEL.read_bytes()[:size])
    with pytest.raises(ModelError, match="cannot be restored"):
        load_model(str(tmp_path / "cut.nemo"), device="cpu")
