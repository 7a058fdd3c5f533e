#!/usr/bin/env bash
# A softmax model on its way to selective attention, beside the same training without selection: what docs/finetuning.md
# tells was measured. Needs the reference checkpoint llama-softmax and the text that lies beside it.
# usage: benchmarks/retrofit.sh SHARED WORK   (environment: ITERS 500, BATCH 32, SEED 0, MEGABYTES 20)
set -euo pipefail
shared=${1:?SHARED} work=${2:?WORK}
iters=${ITERS:-500} batch=${BATCH:-32} seed=${SEED:-0}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work" && cd "$work"

for kind in softmax selective; do
  [ -d $kind ] || mlx-selective convert --hf-path "$shared/checkpoints/llama-softmax" --mlx-path $kind \
    --attention $kind --dtype float32
done
[ -d data ] || python "$here/training_text.py" --model softmax --data "$shared/data" --to data \
  --megabytes "${MEGABYTES:-20}" --seed "$seed"
printf 'lr_schedule: {name: cosine_decay, arguments: [5.0e-4, %s], warmup: %s}\n' "$iters" $((iters / 50)) > rate.yaml

# name, model and what is added to the flags that all have
train() {
  local name=$1 model=$2
  shift 2
  echo "== $name"
  mlx-selective finetune --model "$model" --train --data data --fine-tune-type full --num-layers -1 \
    --optimizer adamw --iters "$iters" --batch-size "$batch" --max-seq-length 1024 --seed "$seed" -c rate.yaml \
    --steps-per-report $((iters / 20 > 0 ? iters / 20 : 1)) --steps-per-eval "$iters" --val-batches 4 \
    --save-every "$iters" --adapter-path "$name" "$@"
  python "$here/pruned_perplexity.py" --model "$model" --adapter-path "$name" \
    --documents "$shared/checkpoints/llama-softmax/expected.npz" $budgets
}
budgets="" train without-selection softmax
budgets="--budgets 256 128 64" train retrofit selective --retrofit
budgets="--budgets 256 128 64" train retrofit-memory-loss selective --retrofit --memory-loss 0.1
