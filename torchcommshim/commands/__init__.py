# SPDX-License-Identifier: Apache-2.0
"""What a person types: `torchcommshim doctor`, `verify`, `explain`, `run`, `path`."""
