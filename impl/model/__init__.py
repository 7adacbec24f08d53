"""GPT and BERT, written once; where LayerNorm stands is a value."""
