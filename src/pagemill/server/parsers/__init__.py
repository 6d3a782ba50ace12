"""From a model's text to what a chat answer is made of: content, reasoning, tool calls.

One protocol (:class:`deltas.Parser`): ``feed(text)`` and ``finish()`` give deltas. Each format of tool calls is a small
file; the machine that reads them is calls.py. Nothing here knows HTTP or the engine.
"""
