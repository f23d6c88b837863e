# SPDX-License-Identifier: Apache-2.0
"""The hang report: when a creation does not return, one message says which ranks wait, where, and why.

A rank that waits in `perform_nocolor_split` holds Python's global lock, so no thread of it can speak, and a
store client that waits blocks the process's other users of it.  So each rank has a watcher, a small process
of its own (`watcher.py`), which reads what the rank writes down of its creations (`record.py`).  The watchers
of a job know each other (`hub.py`), and one of them asks the others and prints (`diagnosis.py`).

The watcher imports this package as well, so it imports nothing.
"""
