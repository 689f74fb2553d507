"""Recognition at run time: stream state, stages, worker threads, `Recognizer` and `Stream`."""
