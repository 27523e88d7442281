"""How far trainer and engine are apart: figures, by what they are made of, and drawn."""
