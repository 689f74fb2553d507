#!/usr/bin/env bash
# Packs the speech synthesisers for a training host without network: flite with five English voices, espeak-ng with its English
# data, and hibari-tts. Needs apt-get, dpkg, gcc, pip. Usage: pack.sh OUT_FOLDER     (about 25 MiB; used by synthesize.py)
# The programs only write files there, so the sound servers' libraries that they link to are replaced by ones whose functions fail.
set -euo pipefail
out=$(realpath -m "$1"); work=$(mktemp -d); mkdir -p "$out/lib" "$out/bin" "$out/python"
(cd "$work" && apt-get -q download flite libflite1 espeak-ng espeak-ng-data libespeak-ng1 libpcaudio0 libsonic0 >/dev/null)
for package in "$work"/*.deb; do dpkg -x "$package" "$work/unpacked"; done
lib="$work/unpacked/usr/lib/x86_64-linux-gnu"
cp "$work"/unpacked/usr/bin/{flite,espeak-ng} "$out/bin/"
for name in flite flite_usenglish flite_cmulex flite_cmu_us_kal flite_cmu_us_kal16 flite_cmu_us_awb flite_cmu_us_rms flite_cmu_us_slt \
    flite_cmu_grapheme_lang flite_cmu_grapheme_lex flite_cmu_indic_lang flite_cmu_indic_lex flite_cmu_time_awb espeak-ng pcaudio sonic; do
  for file in "$lib"/lib$name.so.[0-9]; do [ -e "$file" ] && cp -L "$file" "$out/lib/"; done
done
mkdir -p "$out/espeak-ng-data"
cp -r "$lib"/espeak-ng-data/{phon*,intonations,en_dict,lang,voices} "$out/espeak-ng-data/"
for stand_in in asound.so.2:snd_ pulse.so.0:pa_ pulse-simple.so.0:pa_simple_; do
  # Lines "symbol@VERSION" that the programs ask for; the stand-in defines each symbol under the version asked for.
  nm -D --undefined-only "$out"/lib/*.so.* "$out"/bin/* | grep -o "\b${stand_in#*:}[a-z_0-9]*@.*" | sort -u > "$work/symbols"
  sed 's/@.*//; s/.*/int &(void) { return -1; }/' "$work/symbols" > "$work/stand_in.c"
  for version in $(sed 's/.*@//' "$work/symbols" | sort -u); do
    echo "$version { $(grep "@$version$" "$work/symbols" | sed 's/@.*/;/' | tr '\n' ' ') };"
  done > "$work/versions"
  gcc -shared -w -o "$out/lib/lib${stand_in%:*}" "$work/stand_in.c" -Wl,-soname,"lib${stand_in%:*}",--version-script,"$work/versions"
done
python3 -m pip install -q --no-deps --target "$out/python" hibari-tts==0.2.1
rm -rf "$work" "$out"/python/hibari/assets/*gb*
find "$out" -name __pycache__ -exec rm -rf {} +
du -sh "$out"
