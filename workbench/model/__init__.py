"""Models and speech: NeMo checkpoints, named shapes with random weights, the demo model, audio files and manifests."""
