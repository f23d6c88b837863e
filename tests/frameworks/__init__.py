# SPDX-License-Identifier: Apache-2.0
"""Training programs of other projects, run without the shim and with it: `scripts/test frameworks`."""
