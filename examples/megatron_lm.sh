#!/bin/bash
# The report's flags on an unmodified checkout of Megatron-LM. GPUs only.
#
#     MEGATRON_LM=/path/to/Megatron-LM ./megatron_lm.sh CHECKPOINTS TENSORBOARD DATA_PREFIX TOKENIZER
#
# The checkout of the report is commit 85bd1f9af2 (2024-07-27), which passes device_id to
# init_process_group; it needs setuptools < 70, six, regex, pyyaml, sentencepiece, make, a C++ compiler and
# nvcc on PATH. Sizes and EXTRA_ARGS are as in pretrain_gpt.sh, by default the report's:
#     SIZE=small GPUS_PER_NODE=4 TRAIN_ITERS=5 ./megatron_lm.sh     for a small model
# Where neither Transformer Engine nor apex is installed, Megatron-LM's own layers and torch's optimizer are
# used. Several ranks share a GPU with VIA=examples/one_gpu.py.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ ! -f "${MEGATRON_LM:?set MEGATRON_LM to the folder of a Megatron-LM checkout}/pretrain_gpt.py" ]; then
    echo "megatron_lm.sh: error: there is no $MEGATRON_LM/pretrain_gpt.py" >&2
    exit 1
fi

has() { "${PYTHON:-python3}" -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$1'))"; }

if ! has transformer_engine && ! has apex; then
    export TRANSFORMER_IMPL=local VIA="${VIA:-} $here/megatron_lm_without_apex.py"
    EXTRA_ARGS="--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion ${EXTRA_ARGS:-}"
fi
export SIZE=${SIZE:-report} EXTRA_ARGS=${EXTRA_ARGS:-}
export SCRIPT=$MEGATRON_LM/pretrain_gpt.py
export DATA_CACHE_PATH=${DATA_CACHE_PATH:-run/cache}
exec "$here/pretrain_gpt.sh" "$@"
