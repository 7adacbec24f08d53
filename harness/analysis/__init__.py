"""Tables of many records: rendering, throughput, scaling, perplexity, and where a step's time goes.

May import impl and harness.records.
"""
