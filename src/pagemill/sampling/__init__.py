"""From logits to tokens: parameters by row, processors, filters, noise, log probabilities."""
