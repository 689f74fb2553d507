"""Graphed equals eager by `torch.equal`: outputs and all caches, over whole streams, every context and batch, both models."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from stream_walk import CONTEXTS, call_of, eager, run, same, walk

from workbench.encoder.graphed import GraphError, StepShape, detach, set_streaming_cuda_graphs


@pytest.mark.parametrize("batch", [1, 2, 8, 32])
@pytest.mark.parametrize("context", CONTEXTS, ids=str)
@pytest.mark.parametrize("name", ["tiny_gpu", "large_gpu"])
def test_whole_streams(request, name, context, batch):
    model = request.getfixturevalue(name)
    encoder = model.encoder
    encoder.set_default_att_context_size(context)
    step = set_streaming_cuda_graphs(model)
    try:
        with torch.inference_mode():
            assert walk(encoder, step, batch) == []
        report = step.report()
        assert report["captured"] == 1 and report["replayed"] > 0
        assert report["eager"] == {"first_chunk": 1, "warmup": 1, "keep_all_outputs": 1}
    finally:
        detach(encoder)


@pytest.mark.parametrize("batch", [3])
@pytest.mark.parametrize("context", CONTEXTS, ids=str)
@pytest.mark.parametrize("name", ["tiny_gpu", "large_gpu"])
def test_whole_streams_with_a_graphed_first_chunk(request, name, context, batch):
    encoder = request.getfixturevalue(name).encoder
    encoder.set_default_att_context_size(context)
    step = set_streaming_cuda_graphs(encoder, first_chunk=True, warmup_steps=0)
    try:
        with torch.inference_mode():
            assert walk(encoder, step, batch) == [] and walk(encoder, step, batch) == []
        report = step.report()
        assert report["captured"] == 2 and report["eager"] == {"keep_all_outputs": 2}
    finally:
        detach(encoder)


@pytest.mark.parametrize("batch", [48, 64])
def test_large_batches(tiny, batch):
    step = set_streaming_cuda_graphs(tiny)
    assert walk(tiny.encoder, step, batch) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context", [[56, 0], [56, 3]], ids=str)
def test_half_precision_with_half_caches(dtype, context):
    from workbench.model.shapes import build_model

    encoder = build_model("tiny").encoder.to("cuda", dtype).eval()
    encoder.set_default_att_context_size(context)
    step = set_streaming_cuda_graphs(encoder)
    with torch.inference_mode():
        assert walk(encoder, step, 4) == []
        call = call_of(encoder, 4)
        got = run(step, call)
        assert {t.dtype for t in (got[0], got[2], got[3])} == {dtype}
        fp32_cache = call._replace(inputs=call.inputs._replace(cache_channel=call.inputs.cache_channel.float()))
        assert _outcome(lambda: run(step, fp32_cache)) == _outcome(lambda: eager(encoder, fp32_cache))
    detach(encoder)


def _outcome(function):
    """Either the dtypes of the result or the type of the error: mixed caches must behave as without graphs."""
    try:
        return [t.dtype for t in function()]
    except Exception as error:
        return type(error)


def test_equal_rows_of_a_half_precision_batch_stay_equal(large_gpu):
    encoder = large_gpu.encoder
    encoder.set_default_att_context_size([56, 0])
    step = set_streaming_cuda_graphs(encoder, warmup_steps=0)
    with torch.inference_mode():
        one = call_of(encoder, 1)
        expand = lambda t, dim: t.expand(*[8 if d == dim else -1 for d in range(t.dim())]).clone()  # noqa: E731
        rows = one._replace(
            inputs=type(one.inputs)(*(expand(t, d) for t, d in zip(one.inputs, (0, 0, 1, 1, 0), strict=True)))
        )
        got, want = run(step, rows), eager(encoder, rows)
    assert same(got, want)
    rows_differ_eagerly = [i for i in range(8) if not torch.equal(want[0][i], want[0][0])]
    assert [i for i in range(8) if not torch.equal(got[0][i], got[0][0])] == rows_differ_eagerly == []
    detach(encoder)


def test_strided_inputs_and_outputs_like_eager(tiny):
    encoder = tiny.encoder
    step = set_streaming_cuda_graphs(encoder, warmup_steps=0)
    call = call_of(encoder, 4)
    wide = torch.randn(4, 80, 60, device="cuda")
    strided = call.inputs._replace(
        signal=wide[:, :, 7 : 7 + call.inputs.signal.shape[2]],
        cache_channel=call.inputs.cache_channel.transpose(0, 1).contiguous().transpose(0, 1),
    )
    got, want = run(step, call._replace(inputs=strided)), eager(encoder, call._replace(inputs=strided))
    assert same(got, want)
    assert [t.stride() for t in got] == [t.stride() for t in want]


def test_precision_switch_captures_anew(large_gpu):
    encoder = large_gpu.encoder
    encoder.set_default_att_context_size([56, 0])
    step = set_streaming_cuda_graphs(encoder, warmup_steps=0)
    matmul, old = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    results = []
    try:
        with torch.inference_mode():
            call = call_of(encoder, 4)
            for value in (True, False, True):
                matmul.allow_tf32 = value
                results.append(run(step, call))
                assert same(results[-1], eager(encoder, call))
    finally:
        matmul.allow_tf32 = old
        captured = step.report()["captured"]
        detach(encoder)
    assert captured == 2 and same(results[0], results[2]) and not torch.equal(results[0][0], results[1][0])


def test_static_inputs_and_stable_outputs_are_distinct_memory(tiny):
    step = set_streaming_cuda_graphs(tiny, warmup_steps=0)
    call = call_of(tiny.encoder, 2)
    got = run(step, call)
    graph = step.newest
    spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (*graph.static, *graph.stable, *got, *call.inputs)]
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_outputs_belong_to_the_callers_mode(tiny_gpu):
    step = set_streaming_cuda_graphs(tiny_gpu, warmup_steps=0)
    tiny_gpu.encoder.set_default_att_context_size([56, 0])
    try:
        with torch.inference_mode():
            step.precapture([StepShape(batch=2)])
        with torch.no_grad():
            outputs = run(step, call_of(tiny_gpu.encoder, 2))
            assert not any(t.is_inference() for t in outputs)
            outputs[0].add_(1)
        with torch.inference_mode():
            assert all(t.is_inference() for t in run(step, call_of(tiny_gpu.encoder, 2)))
        assert step.report()["captured"] == 1 and step.report()["eager"] == {}
    finally:
        detach(tiny_gpu.encoder)


def test_forced_mode_raises(tiny):
    step = set_streaming_cuda_graphs(tiny, mode="forced")
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(GraphError, match="autocast"):
        run(step, call_of(tiny.encoder))
