# SPDX-License-Identifier: Apache-2.0
"""What repairs: from the wrappers' calls to a group that is made right, and a pure model of all of it."""
