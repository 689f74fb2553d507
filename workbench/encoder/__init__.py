"""The encoder step: the CUDA-graph path around the step of NeMo."""
