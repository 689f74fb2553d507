"""One import line that makes NeMo's own usage work on a NeMo without a graphed streaming step (3.0.0).

    import workbench.encoder.nemo_api
    asr_model.encoder.set_streaming_cuda_graphs(True)      # then NeMo's usual cache-aware streaming loop

Nothing changes until that call. A NeMo that brings its own step keeps it; only its decoder is shielded (decoder_shield).
"""

from __future__ import annotations

from workbench.encoder.nemo_hooks import install

INSTALLED = install()
