# SPDX-License-Identifier: Apache-2.0
"""The parts of `pretrain_gpt.py`, in the order in which it uses them.

errors      how a job of many processes ends with one message
arguments   the command line
groups      which ranks talk to each other
data        token files and the samples cut from them
model       one pipeline stage of a GPT
pipeline    forward and backward of a batch through all stages
optimizer   gradients, loss scale, learning rate, AdamW
checkpoint  saving and resuming
log         the log line, the progress bar, TensorBoard
"""
