#!/bin/sh
# Latency on CPU of every form beside its rivals, for two models of usual sizes.
#
#     benchmarks/cpu.sh OUT [WORK]
#
# Writes OUT_<model>_batch-<size>.{json,md,png}. Checkpoints and bundles are made in WORK, a
# temporary folder if not given, from a seed, and kept there: those that are there are used
# again. On 2 cores verifying the six exports takes about half an hour, and measuring 40 minutes.
set -eu

out=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
work=${2:-$(mktemp -d)}
rivals=eager,torchscript,compile,naive,openvino,openvino-bf16

make_forms() { # MODEL OPTIONS.. : a checkpoint and three bundles
    model=$1
    shift
    [ -e "$work/$model" ] || causal-encoder new "$work/$model" "$@"
    for form in "fp32 cpu" "fp32 portable" "int8 cpu"; do
        precision=${form% *} target=${form#* }
        bundle=$work/$model-$precision-$target
        [ -e "$bundle" ] || causal-encoder export onnx "$work/$model" "$bundle" \
            --precision "$precision" --target "$target"
    done
}

measure() ( # MODEL BATCH_SIZE SEQ_LENS
    name=$1_batch-$2
    cd "$work" # so that the page shows a command without the folders of this machine
    causal-encoder bench "$1-fp32-cpu" "$1-fp32-portable" "$1-int8-cpu" \
        --checkpoint "$1" --against $rivals --device cpu --batch-size "$2" --seq-len "$3" \
        --json "$name.json" --markdown "$name.md" --plot "$name.png"
    for kind in json md png; do mv "$name.$kind" "${out}_$name.$kind"; done
)

make_forms a --vocab-size 1000 --d-model 512 --num-heads 8 --num-layers 2 --max-len 4096
make_forms b --vocab-size 50257 --d-model 768 --num-heads 12 --num-layers 12 --max-len 1024
measure a 1 16,128,512,1024,2048,4096
measure a 8 128,512
measure a 32 32,128
measure b 1 16,128,512,1024
measure b 8 128
