# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 · Your first stream
#
# **What you will see:** one clip of real human speech pushed into a streaming recogniser piece by piece, the words appearing while it is
# spoken, and three facts that everything else rests on: streaming gives exactly the tokens of an offline pass at the same look-ahead, any cutting
# of the audio gives the same result, and the incremental features are those of the whole file.
#
# Takes about half a minute on two CPU cores; no GPU and no network needed.

# %%
import matplotlib.pyplot as plt
import numpy as np

from workbench.config import load_config
from workbench.model.speech import SHIPPED_SPEECH, read_audio, read_manifest
from workbench.runtime.offline import offline_labels
from workbench.runtime.recognizer import Recognizer

# %% [markdown]
# ## A clip
# The shipped speech is listed in a NeMo manifest, with its text. The clips were held out when the demo model was trained. It is a small model:
# about one word in five of new telephone prompts is wrong, and most words of other speakers (`workbench/data/MODEL_CARD.md`), so look at
# when words appear and not only at which.

# %%
items = {item.path.stem: item for item in read_manifest(SHIPPED_SPEECH).items}
item = items["at-tone-time-exactly"]
samples = read_audio(item, sample_rate_hz=16000)
print(f"said: {item.text}\n{samples.size / 16000:.2f} s, {samples.dtype}, {samples.size} samples")

# %%
seconds = np.arange(samples.size) / 16000
fig, ax = plt.subplots(figsize=(8, 2))
ax.plot(seconds, samples, linewidth=0.4, color="#0072B2")
ax.set(xlabel="time, s", ylabel="amplitude", xlim=(0, seconds[-1]))
plt.show()

# %% [markdown]
# ## Push and step
# `att_context_size` is the look-ahead: `[56, 1]` means that a step covers 2 encoder frames of 80 ms and sees 56 earlier ones.
# `push` stores audio; `step` runs every chunk that is complete and returns its events.

# %%
recognizer = Recognizer.open(load_config({"asr": {"att_context_size": [56, 1], "device": "cpu"}}))
geometry = recognizer.loaded.geometry
print(
    "a chunk is", geometry.chunk_ms, "ms; the first one runs after", geometry.chunk_ready_samples(0) / 16, "ms of audio"
)

# %%
PIECE = 16000 // 4  # a quarter of a second, as a microphone might deliver
lines, shown, times, lengths = [], "", [], []
with recognizer.stream() as stream:
    for start in range(0, samples.size, PIECE):
        stream.push(samples[start : start + PIECE])
        for event in stream.step():
            times.append(event.audio_s)
            lengths.append(len(event.text))
            if event.text != shown:
                shown = event.text
                lines.append(f"{event.audio_s:5.2f} s  {shown}")
    final = stream.finish()[-1]
print("\n".join([*lines, f"final    {final.text}"]))

# %% [markdown]
# ## The words arrive while they are spoken

# %%
fig, ax = plt.subplots(figsize=(8, 2.4))
ax.step(times, lengths, where="post", color="#0072B2", linewidth=2)
ax.set(xlabel="audio received, s", ylabel="text so far, characters", xlim=(0, seconds[-1]))
plt.show()

# %% [markdown]
# ## Fact 1: streaming equals offline
# An offline pass with the masks of the same look-ahead sees the whole recording at once. The tokens are the same, one for one.

# %%
offline = offline_labels(recognizer.loaded, samples)
assert offline == stream.labels
print("tokens streaming == offline:", offline == stream.labels, f"({len(offline)} tokens)")

# %% [markdown]
# ## Fact 2: any cutting gives the same
# Pieces of random length, from one sample to a second, give the same events.

# %%
rng = np.random.default_rng(7)
same = []
for _ in range(3):
    cuts = np.sort(rng.integers(0, samples.size, 20))
    with recognizer.stream() as other:
        for piece in np.split(samples, cuts):
            other.push(piece)
            other.step()
        other.finish()
    same.append(other.labels == stream.labels)
assert all(same)
print("equal however the audio is cut:", same)

# %% [markdown]
# ## Fact 3: incremental features are whole-file features
# Each chunk computes only its own mel frames; put together they are NeMo's features of the whole file.

# %%
import torch

from workbench.runtime.offline import mel_chunks

featurizer = recognizer.loaded.model.preprocessor.featurizer
pieces = [mel[0, :, chunk.history_mel :] for mel, chunk, _ in mel_chunks(geometry, featurizer, "cpu", samples)]
incremental = torch.cat(pieces, dim=1)
whole, frames = recognizer.loaded.model.preprocessor(
    input_signal=torch.from_numpy(samples)[None], length=torch.tensor([samples.size])
)
difference = (incremental - whole[0, :, : int(frames)]).abs().max().item()
assert incremental.shape[1] == int(frames) and difference < 1e-4
print("mel frames:", int(frames), "· largest difference below 1e-4:", difference < 1e-4)

# %%
fig, ax = plt.subplots(figsize=(8, 2.4))
image = ax.imshow(
    incremental.numpy(), origin="lower", aspect="auto", cmap="cividis", extent=(0, seconds[-1], 0, incremental.shape[0])
)
ax.set(xlabel="time, s", ylabel="mel band")
fig.colorbar(image, label="log energy")
plt.show()

# %%
recognizer.close()

# %% [markdown]
# ## Try
# - Another look-ahead: `[56, 0]` (80 ms) or `[56, 13]` (1.12 s). How do the words and their timing change?
# - Your own recording: `read_audio("my.wav")`.
# - All shipped clips with their word error rate: `workbench transcribe workbench/data/speech --wer` in a terminal.
