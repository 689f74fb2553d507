"""Every reason for an eager step on a real GPU, moved weights, lifecycle and memory, streams, threads, failures, torch.compile."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from stream_walk import call_of, eager, run, same

from workbench.encoder.graphed import StepShape, detach, set_streaming_cuda_graphs

MIB = 1 << 20
WORKSPACE = 64 * MIB  # cuBLAS scratch of the capture stream, which PyTorch never frees


def test_every_reason_is_provoked_and_counted(tiny):
    encoder = tiny.encoder
    step = set_streaming_cuda_graphs(tiny, max_graphs=1, when_full="refuse")
    call = call_of(encoder)

    run(step, call._replace(drop=0))
    run(step, call._replace(keep_all_outputs=True))
    run(step, call._replace(inputs=call.inputs._replace(cache_channel=None, cache_time=None, cache_channel_len=None)))
    embedded = call.inputs._replace(
        signal=torch.randn(2, 4, encoder.d_model, device="cuda"), signal_len=torch.tensor([4, 4], device="cuda")
    )
    run(step, call._replace(bypass_pre_encode=True, inputs=embedded))
    with torch.autocast("cuda", torch.bfloat16):
        run(step, call)
    encoder.train()
    run(step, call)
    encoder.eval()
    cpu = call._replace(inputs=type(call.inputs)(*(t.cpu() for t in call.inputs)))
    with pytest.raises(RuntimeError):
        run(step, cpu)
    with torch.inference_mode(False), torch.enable_grad():
        run(step, call_of(encoder))
    run(step, call)  # warm-up
    run(step, call)  # captured and replayed
    other = call_of(encoder, 3)
    run(step, other)
    run(step, other)
    step.disable_cuda_graphs()
    run(step, call)
    assert step.report()["eager"] == {
        **{
            reason: 1
            for reason in ("first_chunk", "keep_all_outputs", "no_caches", "bypass_pre_encode", "autocast", "training")
        },
        **{"not_cuda": 1, "grad": 1, "warmup": 2, "max_graphs": 1, "disabled": 1},
    }
    off = set_streaming_cuda_graphs(tiny, mode="off")
    run(off, call)
    assert off.report()["eager"] == {"off": 1}


def test_a_step_inside_somebody_elses_capture_becomes_part_of_it(tiny):
    step = set_streaming_cuda_graphs(tiny, warmup_steps=0)
    call = call_of(tiny.encoder)
    eager(tiny.encoder, call)
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        inside = run(step, call)
    outer.replay()
    assert same(inside, eager(tiny.encoder, call)) and step.report()["eager"] == {"capturing": 1}


def test_a_failed_capture_ends_only_its_shape(tiny):
    encoder = tiny.encoder
    step = set_streaming_cuda_graphs(tiny, warmup_steps=0)

    def synchronises_at_five_rows(module, args, kwargs):
        if kwargs["x"].shape[0] == 5 and torch.cuda.is_current_stream_capturing():
            kwargs["x"].sum().item()

    run(step, call_of(encoder, 2))
    handle = encoder.layers[0].register_forward_pre_hook(synchronises_at_five_rows, with_kwargs=True)
    try:
        bad = call_of(encoder, 5)
        with pytest.warns(UserWarning, match="capturing the encoder step failed"):
            assert same(run(step, bad), eager(encoder, bad))
        assert same(run(step, bad), eager(encoder, bad))
        for batch in (2, 3, 4):
            call = call_of(encoder, batch)
            assert same(run(step, call), eager(encoder, call))
    finally:
        handle.remove()
    report = step.report()
    assert report["eager"] == {"capture_failed": 2} and report["captured"] == 3 and report["held"] == 3
    torch.cuda.empty_cache()  # does nothing for ever if the allocator still believes in a capture
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        torch.ones(8, device="cuda").add_(1)


def _replace_table(encoder):
    encoder.pos_enc.extend_pe(encoder.pos_enc.pe.size(1), torch.device("cuda"), next(encoder.parameters()).dtype)


def _there_and_back(encoder):
    encoder.cpu()
    ballast = torch.full((64 * MIB,), 7.0, device="cuda")  # takes the place that the weights had
    encoder.cuda()
    del ballast


def _half_and_back(encoder):
    encoder.half()
    encoder.float()


@pytest.mark.parametrize("change", [_replace_table, _there_and_back, _half_and_back])
def test_moved_weights_or_table_capture_anew(change):
    from workbench.model.shapes import build_model

    encoder = build_model("tiny", layers=2).encoder.cuda().eval()
    step = set_streaming_cuda_graphs(encoder, warmup_steps=0)
    with torch.inference_mode():
        call = call_of(encoder)
        run(step, call)
        with torch.inference_mode(False):
            change(encoder)
        torch.cuda.empty_cache()
        assert same(run(step, call), eager(encoder, call))
    assert step.report()["captured"] == 2 and step.report()["invalidated"] == 1
    detach(encoder)


def test_a_long_offline_call_between_steps_is_noticed(tiny):
    encoder = tiny.encoder
    step = set_streaming_cuda_graphs(tiny, warmup_steps=0)
    call = call_of(encoder)
    run(step, call)
    before = encoder.pos_enc.pe.data_ptr()
    frames = encoder.max_audio_length + 200
    encoder(audio_signal=torch.randn(1, 80, frames, device="cuda"), length=torch.tensor([frames], device="cuda"))
    assert encoder.pos_enc.pe.data_ptr() != before
    assert same(run(step, call), eager(encoder, call)) and step.report()["invalidated"] == 1


def test_training_and_validation_hooks_give_the_memory_back(large_gpu):
    import workbench.encoder.nemo_api  # noqa: F401

    encoder = large_gpu.encoder
    encoder.set_default_att_context_size([56, 3])
    gc.collect()
    torch.cuda.empty_cache()
    step = set_streaming_cuda_graphs(large_gpu)
    with torch.inference_mode():
        step.precapture([StepShape(batch=1)])  # the workspace, once
        step.disable_cuda_graphs()
        step.maybe_enable_cuda_graphs()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        for _ in range(3):
            step.precapture([StepShape(batch=32), StepShape(batch=8)])
            call = call_of(encoder, 32)
            assert same(run(step, call), eager(encoder, call))
            del call
            assert torch.cuda.memory_reserved() > base[0] + 300 * MIB
            large_gpu.on_train_epoch_start()
            torch.cuda.empty_cache()
            assert torch.cuda.memory_allocated() <= base[1] + MIB
            assert torch.cuda.memory_reserved() <= base[0] + WORKSPACE
            assert step.report()["held_bytes"] == 0
            large_gpu.on_validation_epoch_start()
            assert step.report()["enabled"] is True
    detach(encoder)


def test_a_gradient_step_between_replays():
    from workbench.model.shapes import build_model

    # A model of its own: a positional table extended in inference mode by another test could not take part in a backward pass.
    model = build_model("tiny", layers=2).cuda()
    encoder = model.encoder
    step = set_streaming_cuda_graphs(model, warmup_steps=0)
    with torch.inference_mode():
        call = call_of(encoder)
        before = run(step, call)
    model.on_train_epoch_start()
    model.train()
    signal, lengths = torch.randn(2, 80, 120, device="cuda"), torch.tensor([120, 90], device="cuda")
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-3)
    encoder(audio_signal=signal, length=lengths)[0].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    model.on_validation_epoch_start()
    with torch.inference_mode():
        after = run(step, call)
        assert same(after, eager(encoder, call)) and not torch.equal(before[0], after[0])
    assert step.report()["captured"] == 2
    detach(encoder)


def test_reserved_memory_is_flat_over_500_shapes():
    from workbench.model.shapes import build_model

    encoder = build_model("tiny", layers=1, d_model=64, subsampling_channels=32).encoder.cuda().eval()
    step = set_streaming_cuda_graphs(encoder, max_graphs=4, warmup_steps=0)
    reserved = []
    with torch.inference_mode():
        for _ in range(2):
            for index in range(250):
                run(step, call_of(encoder, 1 + index % 25, mel_frames=17 + 8 * (index // 25)))
            reserved.append(torch.cuda.memory_reserved())
    report = step.report()
    assert report["captured"] == 500 and report["held"] == 4 and report["evicted"] == 496
    assert reserved[1] <= reserved[0] + 32 * MIB
    detach(encoder)


def test_a_caller_on_its_own_stream_and_a_switch_of_streams(tiny):
    encoder = tiny.encoder
    step = set_streaming_cuda_graphs(tiny, warmup_steps=0)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    pairs = []
    for index in range(60):
        with torch.cuda.stream(streams[index % 3]):
            call = call_of(encoder, 8)
            pairs.append((call, run(step, call)))
    torch.cuda.synchronize()
    assert all(same(got, eager(encoder, call)) for call, got in pairs)
    assert step.report()["captured"] == 1


def test_eight_threads_no_crosstalk(tiny):
    encoder = tiny.encoder
    step = set_streaming_cuda_graphs(tiny, max_graphs=3, warmup_steps=1)
    results, errors = [], []

    def work(seed):
        try:
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                for index in range(25):
                    call = call_of(encoder, 1 + (seed + index) % 4)._replace(drop=0 if index == 0 else None)
                    results.append((call, run(step, call)))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:  # shown by the assertion below
            errors.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    torch.cuda.synchronize()
    assert len(results) == 200 and all(same(got, eager(encoder, call)) for call, got in results)


def test_beside_compiled_code_with_graphs_of_its_own(tiny):
    encoder = tiny.encoder
    step = set_streaming_cuda_graphs(tiny, warmup_steps=0)
    calls = {batch: call_of(encoder, batch) for batch in (2, 8)}
    expected = {batch: eager(encoder, call) for batch, call in calls.items()}
    weight = torch.randn(512, 512, device="cuda")
    compiled = torch.compile(lambda x: torch.relu(x @ weight) @ weight, mode="reduce-overhead")
    for index in range(40):
        x = torch.randn(64 if index < 20 else 96, 512, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(x), torch.relu(x @ weight) @ weight, rtol=1e-2, atol=1e-1)
        for batch, call in calls.items():
            assert same(run(step, call), expected[batch]), (index, batch)
        if index % 10 == 0:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
    assert step.report()["captured"] == 2


def test_a_compiled_encoder_layer_inside_the_graph(tiny_gpu):
    from workbench.model.shapes import build_model

    encoder = build_model("tiny", layers=1).encoder.cuda().eval()
    encoder.layers[0].compile(dynamic=False)
    step = set_streaming_cuda_graphs(encoder, warmup_steps=1)
    with torch.inference_mode():
        call = call_of(encoder)
        for _ in range(4):
            assert same(run(step, call), eager(encoder, call))
    assert step.report()["captured"] + len(step.report()["failures"]) == 1
    detach(encoder)
