# SPDX-License-Identifier: Apache-2.0
"""What tells: reports, traces, and the comparisons between ranks.  It changes no group."""
