"""The nouns: states and their legal moves, commands, effects, keys and rows.

Frozen data and pure functions; nothing here reads, waits or draws chance. Read `states.py` first (what a job may become), then
`rows.py` (what is stored of it) and `commands.py` (what changes it).
"""
