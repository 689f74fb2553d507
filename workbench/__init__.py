"""Workbench for streaming speech recognition on GPUs: profile, graph, batch, tune and size a NeMo model.

Importing the package costs milliseconds: nothing below is imported here, so that reading a configuration or a record never
loads torch. Start with `workbench --help`, or in Python:

    from workbench.config import load_config
    from workbench.runtime.recognizer import Recognizer
"""

__version__ = "0.1.0"
