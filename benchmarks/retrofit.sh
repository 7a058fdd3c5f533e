#!/usr/bin/env bash
# A softmax model on its way to selective attention, beside the same training without selection, and SSA's temperatures
# alone: what docs/finetuning.md tells was measured. Needs the reference checkpoint llama-softmax and the text that lies
# beside it. Ended anywhere, it goes on from there when it is run again.
# usage: benchmarks/retrofit.sh SHARED WORK [ARM...]
# arms: without-selection retrofit retrofit-memory-loss temperatures temperatures-shared
# environment: ITERS 1000, BATCH 64, SEED 0, MEGABYTES 60, RATE 5e-4, TEMPERATURES_RATE 1e-3, VALIDATION 25
set -euo pipefail
shared=${1:?SHARED} work=${2:?WORK}
shift 2
iters=${ITERS:-1000} batch=${BATCH:-64} seed=${SEED:-0}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work" && cd "$work"

convert() {
  [ -d "$1" ] || mlx-selective convert --hf-path "$shared/checkpoints/llama-softmax" --mlx-path "$1" \
    --attention "$2" --dtype float32
}

# name, model, learning rate and what is added to the flags that all have
train() {
  local name=$1 model=$2 rate=$3
  shift 3
  echo "== $name"
  # without the correction the first hundred steps of MLX's AdamW are up to three times as large
  printf 'lr_schedule: {name: cosine_decay, arguments: [%s, %s], warmup: %s}\n%s\n' "$rate" "$iters" $((iters / 50)) \
    'optimizer_config: {adamw: {bias_correction: true}}' > "$name.yaml"
  if [ ! -e "$name.trained" ]; then # a state of a stopped one is taken up again
    [ ! -e "$name/training_state.safetensors" ] || set -- "$@" --resume
    mlx-selective finetune --model "$model" --train --data data --num-layers -1 --optimizer adamw --iters "$iters" \
      --batch-size "$batch" --max-seq-length 1024 --seed "$seed" -c "$name.yaml" \
      --steps-per-report $((iters / 50 > 0 ? iters / 50 : 1)) --steps-per-eval "$iters" --val-batches "${VALIDATION:-25}" \
      --save-every "$iters" --adapter-path "$name" "$@"
    touch "$name.trained"
  fi
  python "$here/pruned_perplexity.py" --model "$model" --adapter-path "$name" \
    --documents "$shared/checkpoints/llama-softmax/expected.npz" $budgets | tee "$name.perplexity"
}

convert softmax softmax
convert selective selective
convert ssa ssa
convert ssa-shared '{"kind": "ssa", "token_map": "weight_sharing"}'
[ -d data ] || python "$here/training_text.py" --model softmax --data "$shared/data" --to data \
  --megabytes "${MEGABYTES:-60}" --seed "$seed"
[ $# -gt 0 ] || set -- without-selection retrofit retrofit-memory-loss temperatures temperatures-shared
for name in "$@"; do
  budgets="--budgets 256 128 64" selecting="--fine-tune-type full --retrofit --retrofit-iters $((iters / 3))"
  case $name in
    without-selection) budgets="" train $name softmax "${RATE:-5e-4}" --fine-tune-type full ;;
    retrofit) train $name selective "${RATE:-5e-4}" $selecting ;;
    retrofit-memory-loss) train $name selective "${RATE:-5e-4}" $selecting --memory-loss 0.1 ;;
    temperatures) budgets="" train $name ssa "${TEMPERATURES_RATE:-1e-3}" --fine-tune-type temperatures ;;
    temperatures-shared) budgets="" train $name ssa-shared "${TEMPERATURES_RATE:-1e-3}" --fine-tune-type temperatures ;;
    *) echo "unknown arm: $name" >&2; exit 2 ;;
  esac
done
