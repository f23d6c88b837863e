#!/bin/bash
# The report's script: pre-train a GPT with pipeline parallelism.
#
#     ./pretrain_gpt.sh                                       small, 4 processes on the CPU, about 2 minutes
#     SIZE=report ./pretrain_gpt.sh CHECKPOINTS TENSORBOARD DATA_PREFIX TOKENIZER     the report's, 8 GPUs
#
# DATA_PREFIX names DATA_PREFIX.bin and DATA_PREFIX.idx; they are made from the standard library's sources
# if both are missing, and so is the tokenizer. Each number below can be overridden by the variable of its
# name: `PP=2 TRAIN_ITERS=10 ./pretrain_gpt.sh`. EXTRA_ARGS is appended, and the last of a repeated flag
# counts. Ranks are started by LAUNCH, run SCRIPT, and go through VIA if it is set (see one_gpu.py).
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

HERE=$(cd "$(dirname "$0")" && pwd)
CHECKPOINT_PATH=${1:-run/checkpoints}
TENSORBOARD_LOGS_PATH=${2:-run/tensorboard}
DATA_PATH=${3:-run/data/stdlib}
TOKENIZER_MODEL=${4:-run/data/stdlib.model}
DATA_CACHE_PATH=${DATA_CACHE_PATH:-}

case "${SIZE:-small}" in
report)
    : "${GPUS_PER_NODE:=8}" "${NUM_LAYERS:=32}" "${HIDDEN_SIZE:=4096}" "${NUM_ATTENTION_HEADS:=32}"
    : "${SEQ_LENGTH:=4096}" "${GLOBAL_BATCH_SIZE:=128}" "${TRAIN_ITERS:=275}" "${LR:=3.0e-4}" "${MIN_LR:=3.0e-5}"
    : "${LR_WARMUP_FRACTION:=.001}" "${INIT_METHOD_STD:=0.006}" "${PRECISION:=--fp16}"
    : "${TRANSFORMER_IMPL:=transformer_engine}"
    ;;
small)
    : "${GPUS_PER_NODE:=4}" "${NUM_LAYERS:=4}" "${HIDDEN_SIZE:=64}" "${NUM_ATTENTION_HEADS:=4}"
    : "${SEQ_LENGTH:=64}" "${GLOBAL_BATCH_SIZE:=16}" "${TRAIN_ITERS:=200}" "${LR:=2.0e-3}" "${MIN_LR:=2.0e-4}"
    : "${LR_WARMUP_FRACTION:=.1}" "${INIT_METHOD_STD:=0.02}" "${PRECISION:=}"
    : "${TRANSFORMER_IMPL:=local}"
    ;;
*)
    echo "pretrain_gpt.sh: error: SIZE=$SIZE is neither small nor report" >&2
    exit 1
    ;;
esac

PYTHON=${PYTHON:-python3}
LAUNCH=${LAUNCH:-$PYTHON -m torch.distributed.run}
SCRIPT=${SCRIPT:-$HERE/pretrain_gpt.py}

# A lone .bin at a prefix that was given is the user's: training says which file is missing.
if [ ! -e "$DATA_PATH.idx" ] && { [ -z "${3:-}" ] || [ ! -e "$DATA_PATH.bin" ]; }; then
    "$PYTHON" "$HERE/preprocess_data.py" --output-prefix "$DATA_PATH" --tokenizer-model "$TOKENIZER_MODEL" \
        --max-characters "${MAX_CHARACTERS:-4000000}"
fi

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes 1
    --master_addr localhost
    --master_port "${MASTER_PORT:-6000}"
)

GPT_MODEL_ARGS=(
    --use-mcore-models
    --transformer-impl "$TRANSFORMER_IMPL"
    --num-layers "$NUM_LAYERS"
    --hidden-size "$HIDDEN_SIZE"
    --num-attention-heads "$NUM_ATTENTION_HEADS"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_ITERS"
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std "$INIT_METHOD_STD"
    --clip-grad 1.0
    $PRECISION
    --lr "$LR"
    --lr-decay-style cosine
    --min-lr "$MIN_LR"
    --lr-warmup-fraction "$LR_WARMUP_FRACTION"
    --lr-decay-iters "$TRAIN_ITERS"
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size "${PP:-4}"
    --use-distributed-optimizer
    --sequence-parallel
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --split 100,0,0
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --data-cache-path $DATA_CACHE_PATH
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --save-interval 10000
    --eval-interval 1000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --eval-iters 0
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

exec $LAUNCH "${DISTRIBUTED_ARGS[@]}" ${VIA:-} "$SCRIPT" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    ${EXTRA_ARGS:-}
