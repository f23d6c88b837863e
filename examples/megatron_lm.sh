#!/bin/bash
# The report's flags on an unmodified checkout of Megatron-LM. GPUs only.
#
#     MEGATRON_LM=/path/to/Megatron-LM ./megatron_lm.sh CHECKPOINTS TENSORBOARD DATA_PREFIX TOKENIZER
#
# The checkout of the report is commit 85bd1f9af2 (2024-07-27), which passes device_id to
# init_process_group; it needs setuptools < 70, six, regex, pyyaml, sentencepiece, make, a C++ compiler and
# nvcc on PATH. Sizes and EXTRA_ARGS are as in pretrain_gpt.sh, by default the report's. Without apex:
#     EXTRA_ARGS="--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
# and without Transformer Engine:
#     TRANSFORMER_IMPL=local
set -euo pipefail
if [ ! -f "${MEGATRON_LM:?set MEGATRON_LM to the folder of a Megatron-LM checkout}/pretrain_gpt.py" ]; then
    echo "megatron_lm.sh: error: there is no $MEGATRON_LM/pretrain_gpt.py" >&2
    exit 1
fi
export SIZE=${SIZE:-report}
export SCRIPT=$MEGATRON_LM/pretrain_gpt.py
export DATA_CACHE_PATH=${DATA_CACHE_PATH:-run/cache}
exec "$(dirname "$0")/pretrain_gpt.sh" "$@"
