"""What a model's layers are given to work on, as sums over a text: made once, read whenever a model is quantized."""
